// What somebody draws or takes: a pad, a webcam, files. The image goes to the model, and to the training if it is added.

import { hiddenCanvas, pixels } from "./data.mjs";

const SIDE = 280; // of the pad, in its own pixels
const FRAMES = 12; // of a video that are taken

export class Pad {
  /** `$` gives elements by id, `ask` asks the worker, `complain` shows what is wrong. */
  constructor($, ask, complain) {
    Object.assign(this, { $, ask, complain, task: null, empty: true, asked: 0, counts: [], camera: null });
    this.context = $("pad").getContext("2d", { willReadFrequently: true });
    this.#pen();
    $("clear").onclick = () => this.clear();
    $("add").onclick = () => this.add();
    $("webcam").onclick = () => (this.camera ? this.close() : this.film());
    $("images").onchange = ({ target }) => this.take(target);
  }

  /** Show what this task takes. */
  open(task) {
    const { $ } = this;
    this.close();
    this.task = task;
    this.counts = task.classes.map(() => 0);
    this.small = hiddenCanvas(task.size).getContext("2d", { willReadFrequently: true });
    $("scores").replaceChildren(...task.classes.map(() => {
      const line = document.createElement("li");
      const bar = document.createElement("i");
      bar.append(document.createElement("b"));
      line.append(document.createElement("span"), bar, document.createElement("output"));
      return line;
    }));
    $("label").replaceChildren(...task.classes.map((_, i) => new Option("", i)));
    this.name();
    for (const id of ["webcam", "choose"]) $(id).hidden = task.kind !== "pictures";
    $("webcam").disabled = !navigator.mediaDevices?.getUserMedia;
    this.clear();
  }

  /** The names of classes, which may change. */
  name() {
    this.task.classes.forEach((name, i) => {
      this.$("scores").children[i].firstChild.textContent = this.$("label").options[i].text = name;
    });
    const told = this.task.classes.map((name, i) => this.counts[i] && `${this.counts[i]} of ${name}`).filter(Boolean);
    this.$("added").textContent = told.length ? `Yours: ${told.join(", ")}. One in four is held back.` : "";
  }

  clear() {
    this.empty = true;
    this.#wipe();
    this.context.fillStyle = "#888";
    this.context.font = "20px system-ui, sans-serif";
    this.context.textAlign = "center";
    const hint = this.task.kind === "digits" ? "draw a digit here" : "webcam, files, or draw";
    this.context.fillText(hint, SIDE / 2, SIDE / 2); // goes with the first stroke
    this.$("add").disabled = !this.camera;
    for (const line of this.$("scores").children) this.#line(line, 0, false);
  }

  #wipe() {
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, SIDE, SIDE);
  }

  // -- drawing -------------------------------------------------------------------------------------------
  /** Draw with mouse, pen or finger. */
  #pen() {
    const canvas = this.$("pad");
    const at = (event) => [(event.offsetX * SIDE) / canvas.clientWidth, (event.offsetY * SIDE) / canvas.clientHeight];
    let last = null;
    canvas.onpointerdown = (event) => {
      if (!this.task) return;
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
    if (this.empty) this.#wipe();
    context.strokeStyle = "#fff";
    context.lineWidth = 24;
    context.lineCap = "round";
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(u, v);
    context.stroke();
    this.#shown();
  }

  #shown() {
    this.empty = false;
    this.$("add").disabled = !this.task;
  }

  // -- taking pictures -----------------------------------------------------------------------------------
  /** Show the webcam in the place of the pad, and what the model makes of it. */
  async film() {
    const video = this.$("camera");
    try {
      this.camera = await navigator.mediaDevices.getUserMedia({ video: { width: 640, height: 480 } });
    } catch (error) {
      this.complain(`the webcam is not to be had: ${error.message}`);
      return;
    }
    video.srcObject = this.camera;
    await video.play();
    this.#filming(true);
    this.watch = setInterval(() => {
      this.#picture(video, video.videoWidth, video.videoHeight);
      this.infer();
    }, 500);
  }

  close() {
    clearInterval(this.watch);
    for (const track of this.camera?.getTracks() ?? []) track.stop();
    this.camera = null;
    this.#filming(false);
  }

  #filming(yes) {
    this.$("camera").hidden = !yes;
    this.$("pad").hidden = yes;
    this.$("clear").disabled = yes;
    this.$("webcam").textContent = yes ? "Webcam off" : "Webcam";
  }

  /** Add images, and frames of videos, from files. */
  async take(input) {
    const chosen = [...input.files];
    input.value = "";
    this.close();
    for (const file of chosen) {
      try {
        await (file.type.startsWith("video/") ? this.#frames(file) : this.#image(file));
      } catch {
        this.complain(`${file.name} is no image and no video that this browser reads`);
      }
    }
    this.infer();
  }

  async #image(file) {
    const image = await createImageBitmap(file);
    this.#picture(image, image.width, image.height);
    this.#add();
  }

  async #frames(file) {
    const video = Object.assign(document.createElement("video"), { muted: true, src: URL.createObjectURL(file) });
    const event = (name) => new Promise((done, failed) => {
      video.addEventListener(name, done, { once: true });
      video.addEventListener("error", failed, { once: true });
    });
    await event("loadeddata");
    for (let i = 0; i < FRAMES; i += 1) {
      video.currentTime = ((i + 0.5) / FRAMES) * (Number.isFinite(video.duration) ? video.duration : 1);
      await event("seeked");
      this.#picture(video, video.videoWidth, video.videoHeight);
      this.#add();
    }
    URL.revokeObjectURL(video.src);
  }

  /** The middle of an image or a frame, on the pad. */
  #picture(image, width, height) {
    const side = Math.min(width, height);
    this.context.drawImage(image, (width - side) / 2, (height - side) / 2, side, side, 0, 0, SIDE, SIDE);
    this.#shown();
  }

  // -- what becomes of it --------------------------------------------------------------------------------
  /** The image as the model takes it: a drawing is moved and sized as the generated digits are. */
  image() {
    const { small, task } = this;
    const drawn = task.kind === "digits";
    small.resetTransform();
    small.fillStyle = "#000";
    small.fillRect(0, 0, task.size, task.size);
    const [left, top, width, height] = drawn ? this.#box() : [0, 0, SIDE, SIDE];
    const share = ((drawn ? 0.72 : 1) * task.size) / Math.max(width, height);
    const [w, h] = [width * share, height * share];
    small.imageSmoothingQuality = "high";
    small.drawImage(this.context.canvas, left, top, width, height, (task.size - w) / 2, (task.size - h) / 2, w, h);
    const values = new Float32Array(task.channels * task.size * task.size);
    pixels(small, task, values, 0);
    return values;
  }

  #box() {
    const { data } = this.context.getImageData(0, 0, SIDE, SIDE);
    let [left, top, right, bottom] = [SIDE, SIDE, 0, 0];
    for (let i = 0; i < SIDE * SIDE; i += 1) {
      if (data[4 * i] > 60) {
        const [x, y] = [i % SIDE, Math.floor(i / SIDE)];
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
    this.#add();
    if (!this.camera && this.task.kind === "digits") this.clear();
  }

  #add() {
    const label = Number(this.$("label").value);
    this.counts[label] += 1;
    this.ask("add", { image: this.image(), label });
    for (const input of document.querySelectorAll("input[name=use]")) input.disabled = false;
    this.name();
  }
}
