// What somebody draws or takes: a pad, a webcam, files. The image goes to the model, and to the training if it is added.

export class Pad {
  constructor($, ask, { hiddenCanvas, pixels }) {
    Object.assign(this, { $, ask, hiddenCanvas, pixels, task: null, empty: true, asked: 0, own: [] });
    this.context = $("pad").getContext("2d", { willReadFrequently: true });
    this.#pen();
    $("clear").onclick = () => this.clear();
    $("add").onclick = () => this.add();
  }

  /** Show what this task takes. */
  open(task) {
    const { $ } = this;
    this.task = task;
    this.own = task.classes.map(() => 0);
    this.small = this.hiddenCanvas(task.size).getContext("2d", { willReadFrequently: true });
    const lines = task.classes.map((name) => {
      const line = document.createElement("li");
      const bar = document.createElement("i");
      bar.append(document.createElement("b"));
      line.append(Object.assign(document.createElement("span"), { textContent: name }), bar, document.createElement("output"));
      return line;
    });
    $("scores").replaceChildren(...lines);
    $("label").replaceChildren(...task.classes.map((name, i) => new Option(name, i)));
    $("added").textContent = "";
    this.clear();
  }

  clear() {
    this.empty = true;
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, 280, 280);
    this.$("add").disabled = true;
    for (const line of this.$("scores").children) this.#line(line, 0, false);
  }

  /** Draw with mouse, pen or finger. */
  #pen() {
    const canvas = this.$("pad");
    const at = (event) => [(event.offsetX * 280) / canvas.clientWidth, (event.offsetY * 280) / canvas.clientHeight];
    let last = null;
    canvas.onpointerdown = (event) => {
      canvas.setPointerCapture(event.pointerId);
      last = at(event);
      this.#stroke(last, last);
    };
    canvas.onpointermove = (event) => {
      if (last) this.#stroke(last, (last = at(event)));
    };
    canvas.onpointerup = canvas.onpointercancel = () => {
      if (last) this.infer();
      last = null;
    };
  }

  #stroke([x, y], [u, v]) {
    const { context } = this;
    context.strokeStyle = "#fff";
    context.lineWidth = 24;
    context.lineCap = "round";
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(u, v);
    context.stroke();
    this.empty = false;
    this.$("add").disabled = false;
  }

  /** The image as the model takes it: a drawing is moved and sized as the generated digits are. */
  image() {
    const { small, task } = this;
    small.fillStyle = "#000";
    small.fillRect(0, 0, task.size, task.size);
    const [left, top, width, height] = task.kind === "digits" ? this.#box() : [0, 0, 280, 280];
    const share = (task.kind === "digits" ? 0.72 : 1) * (task.size / Math.max(width, height));
    const [w, h] = [width * share, height * share];
    small.imageSmoothingQuality = "high";
    small.drawImage(this.context.canvas, left, top, width, height, (task.size - w) / 2, (task.size - h) / 2, w, h);
    const values = new Float32Array(task.channels * task.size * task.size);
    this.pixels(small, task, values, 0);
    return values;
  }

  #box() {
    const { data } = this.context.getImageData(0, 0, 280, 280);
    let [left, top, right, bottom] = [280, 280, 0, 0];
    for (let i = 0; i < 280 * 280; i += 1) {
      if (data[4 * i] > 60) {
        const [x, y] = [i % 280, Math.floor(i / 280)];
        [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x), Math.max(bottom, y)];
      }
    }
    return [left, top, Math.max(1, right - left + 1), Math.max(1, bottom - top + 1)];
  }

  infer() {
    if (!this.empty) this.ask("infer", { image: this.image(), id: (this.asked += 1) });
  }

  /** Scores of the model, for question `id`. */
  told(scores, id) {
    if (id !== this.asked || this.empty) return;
    const high = Math.max(...scores);
    const parts = scores.map((score) => Math.exp(score - high));
    const sum = parts.reduce((a, b) => a + b, 0);
    [...this.$("scores").children].forEach((line, i) => this.#line(line, parts[i] / sum, scores[i] === high));
  }

  #line(line, share, best) {
    line.className = best ? "best" : "";
    line.querySelector("b").style.width = `${100 * share}%`;
    line.querySelector("output").textContent = share ? `${Math.round(100 * share)} %` : "";
  }

  add() {
    if (this.empty) return;
    const label = Number(this.$("label").value);
    this.own[label] += 1;
    this.ask("add", { image: this.image(), label });
    for (const input of document.querySelectorAll("input[name=use]")) input.disabled = false;
    const told = this.task.classes.filter((_, i) => this.own[i]).map((name) => `${this.own[this.task.classes.indexOf(name)]} of ${name}`);
    this.$("added").textContent = `Yours: ${told.join(", ")}`;
    this.clear();
  }
}
