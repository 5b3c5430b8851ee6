// A line over steps on a canvas, in the colours of the page.

let steps = 10; // of all charts, so that they lie below each other

/** Draws points (step, value) as they come. `scale`: "linear", "log2" or "share" (0 to 1). */
export class Chart {
  constructor(canvas, { name, scale = "linear", smooth = 0, stepped = false, goal = null, format = String }) {
    Object.assign(this, { canvas, name, scale, smooth, stepped, goal, format });
    this.clear();
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  clear() {
    steps = 10;
    this.points = [];
    this.marks = [];
    this.mean = 0;
    this.wanted = false;
    this.draw();
  }

  add(step, value) {
    steps = Math.max(steps, step);
    if (Number.isFinite(value)) {
      const weight = 1 / Math.min(this.points.length + 1, this.smooth || 1);
      this.mean = (1 - weight) * this.mean + weight * value;
      this.points.push([step, value, this.mean]);
    }
    this.later();
  }

  /** A step to mark. */
  mark(step) {
    this.marks.push(step);
    this.later();
  }

  later() {
    if (this.wanted) return;
    this.wanted = true;
    requestAnimationFrame(() => {
      this.wanted = false;
      this.draw();
    });
  }

  range() {
    if (this.scale === "share") return [0, 1];
    const values = this.points.map((point) => point[1]);
    if (!values.length) return this.scale === "log2" ? [1, 2] : [0, 1];
    if (this.scale === "log2") return [Math.min(...values) / 2, Math.max(...values) * 2];
    const sorted = values.toSorted((a, b) => a - b);
    const high = sorted[Math.round(0.97 * (sorted.length - 1))]; // a bad step's loss does not flatten the rest
    return [0, high * 1.15 || 1];
  }

  draw() {
    const { canvas } = this;
    const ratio = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${style.fontFamily}`;
    const [low, high] = this.range();
    const [left, top, right, bottom] = [44, 8, width - 8, height - 18];
    const x = (step) => left + ((right - left) * step) / steps;
    const bend = this.scale === "log2" ? Math.log2 : Number;
    const y = (value) => bottom - ((bottom - top) * (bend(Math.min(Math.max(value, low), high)) - bend(low))) / (bend(high) - bend(low));

    context.strokeStyle = color("--grid");
    context.fillStyle = color("--quiet");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of this.ticks(low, high)) {
      context.beginPath();
      context.moveTo(left, Math.round(y(value)) + 0.5);
      context.lineTo(right, Math.round(y(value)) + 0.5);
      context.stroke();
      context.fillText(this.format(value), left - 6, y(value));
    }
    context.textBaseline = "alphabetic";
    context.fillText(`step ${steps}`, right, height - 4);
    if (this.goal !== null) this.line(context, [[0, this.goal], [steps, this.goal]], x, y, color("--good"), 1, [4, 4]);
    context.fillStyle = color("--bad");
    for (const step of this.marks) context.fillRect(x(step) - 1, top, 2, bottom - top);
    const points = this.points;
    if (this.smooth) this.line(context, points, x, y, color("--faint"), 1);
    this.line(context, points.map(([step, value, mean]) => [step, this.smooth ? mean : value]), x, y, color("--line"), 2);
    const last = points.at(-1);
    canvas.setAttribute("aria-label", last ? `${this.name}: ${this.format(last[1])} at step ${last[0]}` : `${this.name}: no steps yet`);
  }

  line(context, points, x, y, color, width, dash = []) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.setLineDash(dash);
    context.beginPath();
    let before = null;
    for (const [step, value] of points) {
      if (this.stepped && before !== null) context.lineTo(x(step), y(before));
      context.lineTo(x(step), y(value));
      before = value;
    }
    context.stroke();
    context.setLineDash([]);
  }

  ticks(low, high) {
    if (this.scale === "share") return [0, 0.25, 0.5, 0.75, 1];
    if (this.scale === "log2") {
      const [first, last] = [Math.ceil(Math.log2(low)), Math.floor(Math.log2(high))];
      const every = Math.max(1, Math.ceil((last - first) / 5));
      return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => 2 ** (first + i * every));
    }
    const rough = (high - low) / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
    return Array.from({ length: Math.floor(high / every) + 1 }, (_, i) => Number((i * every).toPrecision(6)));
  }
}
