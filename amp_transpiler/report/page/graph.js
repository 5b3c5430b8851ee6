// The picture of a program on a canvas: pan, zoom, pick. Only what is in view is drawn.

const CELL_WIDTH = 176, CELL_HEIGHT = 74, NODE_WIDTH = 156, NODE_HEIGHT = 42, STRIP = 18;

class Graph {
  /** `choose(op)` is called with the operator that was clicked, null for the ground. */
  constructor(canvas, tags, choose) {
    Object.assign(this, { canvas, tags, choose, program: null, scale: 1, x: 0, y: 0, chosen: null, keep: () => true });
    this.pen = canvas.getContext("2d");
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.readColours();
      this.redraw();
    });
    new ResizeObserver(() => this.resize()).observe(canvas);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.fills = ["half", "full", "untouched", "cast"].map(colour);
    this.inks = ["half-text", "full-text", "untouched-text", "cast-text"].map(colour);
    [this.line, this.text, this.back, this.focus] = ["faint", "text", "back", "focus"].map(colour);
  }

  /** Show a program. `keep(op)`: whether it stands out; the others are drawn faintly. */
  show(program) {
    this.program = program;
    this.width = Math.max(1, ...program.rows.map((row) => (row.length ? row[row.length - 1].column + 1 : 1)));
    this.shares = null;
    this.redraw();
  }

  mark(keep) {
    this.keep = keep;
    this.redraw();
  }

  resize() {
    const ratio = devicePixelRatio || 1;
    const first = !this.viewWidth;
    [this.viewWidth, this.viewHeight] = [this.canvas.clientWidth, this.canvas.clientHeight];
    [this.canvas.width, this.canvas.height] = [this.viewWidth * ratio, this.viewHeight * ratio];
    if (first && this.program && this.viewWidth) this.start();
    this.redraw();
  }

  redraw() {
    if (!this.waiting) this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  // -- where things are ---------------------------------------------------------------------------
  left(op) { return op.column * CELL_WIDTH; }
  top(op) { return op.layer * CELL_HEIGHT; }

  /** The top of the graph at a readable size. */
  start() {
    const first = this.program.ops.find((op) => op.layer === 0) || this.program.ops[0];
    this.scale = 1;
    if (first) this.centre(first, 0.15);
  }

  fit() {
    const [width, height] = [this.width * CELL_WIDTH, this.program.rows.length * CELL_HEIGHT];
    this.scale = Math.min(1, (this.viewWidth - STRIP - 20) / width, (this.viewHeight - 20) / height);
    this.x = (this.viewWidth - STRIP - width * this.scale) / 2;
    this.y = (this.viewHeight - height * this.scale) / 2;
    this.redraw();
  }

  centre(op, height = 0.5) {
    this.x = (this.viewWidth - STRIP) / 2 - (this.left(op) + NODE_WIDTH / 2) * this.scale;
    this.y = this.viewHeight * height - (this.top(op) + NODE_HEIGHT / 2) * this.scale;
    this.redraw();
  }

  select(op, move) {
    this.chosen = op;
    if (op && move) {
      this.scale = Math.max(this.scale, 0.7);
      this.centre(op);
    }
    this.redraw();
  }

  /** The operator at a point of the canvas, null for none. */
  at(px, py) {
    const [x, y] = [(px - this.x) / this.scale, (py - this.y) / this.scale];
    const layer = Math.floor(y / CELL_HEIGHT);
    const row = this.program.rows[layer];
    if (!row || y - layer * CELL_HEIGHT > NODE_HEIGHT) return null;
    return row.find((op) => x >= this.left(op) && x <= this.left(op) + NODE_WIDTH) || null;
  }

  // -- drawing ------------------------------------------------------------------------------------
  draw() {
    if (!this.program || !this.viewWidth) return;
    const pen = this.pen, ratio = devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.viewWidth, this.viewHeight);
    pen.translate(this.x, this.y);
    pen.scale(this.scale, this.scale);
    const box = { left: -this.x / this.scale, top: -this.y / this.scale };
    box.right = box.left + this.viewWidth / this.scale;
    box.bottom = box.top + this.viewHeight / this.scale;
    this.drawEdges(box);
    const first = Math.max(0, Math.floor(box.top / CELL_HEIGHT) - 1);
    for (let layer = first; layer < this.program.rows.length && layer * CELL_HEIGHT < box.bottom; layer++) {
      for (const op of this.program.rows[layer]) {
        const left = this.left(op);
        if (left + NODE_WIDTH >= box.left && left <= box.right) this.drawOperator(op);
      }
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawStrip();
  }

  drawEdges(box) {
    const pen = this.pen, ops = this.program.ops;
    const colours = new Map([["float16", this.fills[0]], ["bfloat16", this.fills[0]], ["float32", this.fills[1]]]);
    const paths = new Map();
    const strong = new Path2D();
    for (const edge of this.program.edges) {
      const [a, b] = [ops[edge.from], ops[edge.to]];
      const [ya, yb] = [this.top(a) + NODE_HEIGHT, this.top(b)];
      if (ya > box.bottom || yb < box.top) continue;
      const [xa, xb] = [this.left(a) + NODE_WIDTH / 2, this.left(b) + NODE_WIDTH / 2];
      const bow = b.layer - a.layer > 1 ? NODE_WIDTH * 0.75 : 0;
      if (Math.max(xa, xb) + bow < box.left || Math.min(xa, xb) > box.right) continue;
      const colour = colours.get(edge.dtype) || this.line;
      let path = paths.get(colour);
      if (!path) paths.set(colour, (path = new Path2D()));
      if (this.chosen && (a === this.chosen || b === this.chosen)) path = strong;
      path.moveTo(xa, ya);
      if (this.scale < 0.12) path.lineTo(xb, yb);
      else if (!bow) path.bezierCurveTo(xa, ya + 18, xb, yb - 18, xb, yb);
      else this.bowed(path, xa, ya, xb, yb, Math.max(xa, xb) + bow);
    }
    pen.lineWidth = Math.max(1.5, 0.6 / this.scale);
    pen.globalAlpha = 0.7;
    for (const [colour, path] of paths) {
      pen.strokeStyle = colour;
      pen.stroke(path);
    }
    pen.globalAlpha = 1;
    pen.lineWidth *= 2;
    pen.strokeStyle = this.focus;
    pen.stroke(strong);
  }

  /** An edge over several layers goes beside the operators between, not behind them. */
  bowed(path, xa, ya, xb, yb, beside) {
    const turn = Math.min(CELL_HEIGHT * 0.8, (yb - ya) / 2);
    path.bezierCurveTo(xa, ya + turn / 2, beside, ya + turn / 2, beside, ya + turn);
    path.lineTo(beside, yb - turn);
    path.bezierCurveTo(beside, yb - turn / 2, xb, yb - turn / 2, xb, yb);
  }

  drawOperator(op) {
    const pen = this.pen, [x, y] = [this.left(op), this.top(op)];
    pen.globalAlpha = this.keep(op) ? 1 : 0.22;
    pen.fillStyle = this.back;
    pen.beginPath();
    pen.roundRect(x, y, NODE_WIDTH, NODE_HEIGHT, op.kind === CAST ? NODE_HEIGHT / 2 : 5);
    pen.fill();
    pen.fillStyle = this.fills[op.kind];
    pen.fill();
    if (op === this.chosen) {
      pen.strokeStyle = this.focus;
      pen.lineWidth = Math.max(4, 2 / this.scale);
      pen.stroke();
    }
    if (this.scale >= 0.3) {
      const inset = op.kind === CAST ? 16 : 8;
      pen.fillStyle = this.inks[op.kind];
      pen.font = "600 13px system-ui, sans-serif";
      pen.fillText(op.type.slice(0, 22), x + inset, y + 17, NODE_WIDTH - 2 * inset - (op.kind === 2 ? 54 : 34));
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "right";
      pen.fillText(this.tags(op), x + NODE_WIDTH - inset, y + 16);
      pen.textAlign = "left";
      if (this.scale >= 0.5) pen.fillText(shorten(op.name, op.kind === CAST ? 19 : 22), x + inset, y + 33);
    }
    if (this.scale >= 0.3) this.drawEnds(op, x, y);
    pen.globalAlpha = 1;
  }

  /** The inputs and outputs of the program, by their names. */
  drawEnds(op, x, y) {
    const pen = this.pen, middle = x + NODE_WIDTH / 2;
    const ends = [[op.feeds, "in", y, -14, -18], [op.fetches, "out", y + NODE_HEIGHT, 14, 24]];
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillStyle = pen.strokeStyle = this.text;
    pen.lineWidth = 2;
    for (const [names, word, from, length, at] of ends) {
      if (!names.length) continue;
      pen.beginPath();
      pen.moveTo(middle, from);
      pen.lineTo(middle, from + length);
      pen.stroke();
      pen.fillText(shorten(`${word}: ${names.join(", ")}`, 26), middle, from + at);
    }
    pen.textAlign = "left";
  }

  /** The operator nearest the middle of the view, upwards, that `known` accepts; undefined for none. */
  middle(known) {
    const rows = this.program.rows;
    const layer = Math.floor((this.viewHeight / 2 - this.y) / this.scale / CELL_HEIGHT);
    for (let i = Math.min(rows.length - 1, layer); i >= 0; i--) {
      const found = rows[i].find(known);
      if (found) return found;
    }
    return undefined;
  }

  /** The whole program in one strip at the right: how its operators run from top to bottom, and what is in view. */
  drawStrip() {
    const pen = this.pen, rows = this.program.rows, x = this.viewWidth - STRIP, height = this.viewHeight;
    if (!this.shares || this.shares.length !== height) this.shares = this.countShares(height);
    pen.fillStyle = this.back;
    pen.fillRect(x - 2, 0, STRIP + 2, height);
    for (let y = 0; y < height; y++) {
      const share = this.shares[y], all = share.reduce((a, b) => a + b, 0);
      let at = x;
      for (let kind = 0; all && kind < 4; kind++) {
        pen.fillStyle = this.fills[kind];
        pen.fillRect(at, y, STRIP * share[kind] / all, 1);
        at += STRIP * share[kind] / all;
      }
    }
    const whole = rows.length * CELL_HEIGHT * this.scale || 1;
    const top = Math.min(height, Math.max(0, -this.y / whole * height));
    const bottom = Math.min(height, Math.max(0, (height - this.y) / whole * height));
    pen.strokeStyle = this.text;
    pen.lineWidth = 2;
    pen.strokeRect(x, top, STRIP - 1, Math.max(4, bottom - top));
  }

  /** Operators of each kind for every line of the strip. */
  countShares(height) {
    const rows = this.program.rows;
    return Array.from({ length: height }, (_, y) => {
      const found = [0, 0, 0, 0];
      const first = Math.floor(y * rows.length / height);
      const last = Math.max(first + 1, Math.floor((y + 1) * rows.length / height));
      for (let i = first; i < last && i < rows.length; i++) for (const op of rows[i]) found[op.kind]++;
      return found;
    });
  }

  // -- hands --------------------------------------------------------------------------------------
  zoom(factor, px = this.viewWidth / 2, py = this.viewHeight / 2) {
    const scale = Math.min(3, Math.max(0.002, this.scale * factor));
    this.x = px - (px - this.x) * scale / this.scale;
    this.y = py - (py - this.y) * scale / this.scale;
    this.scale = scale;
    this.redraw();
  }

  move(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.redraw();
  }

  wheel(event) {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY * unit * 0.003), event.offsetX, event.offsetY);
    else this.move(-event.deltaX * unit, -event.deltaY * unit);
  }

  press(event) {
    const jump = (at) => {
      this.y = this.viewHeight / 2 - at.offsetY / this.viewHeight * this.program.rows.length * CELL_HEIGHT * this.scale;
      this.redraw();
    };
    const strip = event.offsetX > this.viewWidth - STRIP;
    let moved = 0;
    if (strip) jump(event);
    const drag = (next) => {
      moved += Math.abs(next.movementX) + Math.abs(next.movementY);
      if (strip) jump(next);
      else this.move(next.movementX, next.movementY);
    };
    const end = (last) => {
      this.canvas.removeEventListener("pointermove", drag);
      if (!strip && moved < 4 && last.type === "pointerup") this.choose(this.at(last.offsetX, last.offsetY));
    };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointermove", drag);
    this.canvas.addEventListener("pointerup", end, { once: true });
    this.canvas.addEventListener("pointercancel", end, { once: true });
  }

  key(event) {
    const step = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    const page = { PageUp: 0.9, PageDown: -0.9 }[event.key];
    if (step) this.move(...step);
    else if (page) this.move(0, page * this.viewHeight);
    else if (event.key === "+" || event.key === "=") this.zoom(1.25);
    else if (event.key === "-") this.zoom(0.8);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }
}
