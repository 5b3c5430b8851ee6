// The picture of a program on a canvas: pan, zoom, pick. Only what is in view is drawn.

const CELL_WIDTH = 176, CELL_HEIGHT = 74, NODE_WIDTH = 156, NODE_HEIGHT = 42, STRIP = 18;
/** Beside each fold of the overview, in pixels: room for the names of its parts, without names, the height of one. */
const MARGIN = 96, GAP = 24, LABEL = 14;

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
    this.shares = null;
    this.unfold();
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
  fold(op) { return Math.floor(op.layer / this.layers); }
  left(op) { return op.column * CELL_WIDTH + this.offsets[this.fold(op)]; }
  top(op) { return (op.layer - this.fold(op) * this.layers) * CELL_HEIGHT; }

  /** One column: a single fold of all `layers`, and nothing beside it. */
  unfold() {
    [this.layers, this.offsets, this.lefts, this.parts] = [Math.max(1, this.program.rows.length), [0], [0], []];
  }

  get folded() { return this.offsets.length > 1; }

  /** The top of the graph at a readable size. */
  start() {
    const first = this.program.ops.find((op) => op.layer === 0) || this.program.ops[0];
    this.scale = 1;
    if (first) this.centre(first, 0.15);
  }

  /** The whole program; a deep one is folded into columns, to be read like a newspaper. */
  fit() {
    if (!this.viewWidth) return;
    this.unfold();
    const room = this.viewWidth - STRIP - 20, height = this.viewHeight - 20, depth = this.program.rows.length;
    const gap = this.program.ops.some((op) => op.scope) ? MARGIN : GAP;
    let best = { scale: 0 };
    for (let count = 1; count * gap < room && count <= depth; count++) {
      const layers = Math.ceil(depth / count), spans = this.spans(layers);
      const width = spans.reduce((sum, [low, high]) => sum + high - low, 0) * CELL_WIDTH;
      const margin = spans.length > 1 ? gap : 0;
      const scale = Math.min(1, (room - spans.length * margin) / width, height / (layers * CELL_HEIGHT));
      if (scale > best.scale) best = { scale, layers, spans, margin: margin / scale };
    }
    [this.scale, this.layers] = [best.scale, best.layers];
    let end = 0;
    this.lefts = best.spans.map(([low, high]) => {
      const left = end + best.margin;
      end = left + (high - low) * CELL_WIDTH;
      return left;
    });
    this.offsets = best.spans.map(([low], fold) => this.lefts[fold] - low * CELL_WIDTH);
    if (this.folded) this.parts = partsOf(this.program.rows, best.spans.length * Math.floor(height / LABEL));
    this.x = (this.viewWidth - STRIP - end * this.scale) / 2;
    this.y = (this.viewHeight - this.layers * CELL_HEIGHT * this.scale) / 2;
    this.redraw();
  }

  /** The first and the last column of each fold of so many layers. */
  spans(layers) {
    const found = [];
    this.program.rows.forEach((row, layer) => {
      const [low, high] = found[Math.floor(layer / layers)] || [Infinity, -Infinity];
      const ends = row.length ? [row[0].column, row[row.length - 1].column + 1] : [Infinity, -Infinity];
      found[Math.floor(layer / layers)] = [Math.min(low, ends[0]), Math.max(high, ends[1])];
    });
    return found.map((span) => (span[0] < span[1] ? span : [0, 1]));
  }

  centre(op, height = 0.5) {
    this.unfold();
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
    if (layer < 0 || layer >= this.layers || y - layer * CELL_HEIGHT > NODE_HEIGHT) return null;
    const rows = this.offsets.map((_, fold) => this.program.rows[layer + fold * this.layers] || []);
    return rows.flat().find((op) => x >= this.left(op) && x <= this.left(op) + NODE_WIDTH) || null;
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
    const rows = this.program.rows;
    const first = this.folded ? 0 : Math.max(0, Math.floor(box.top / CELL_HEIGHT) - 1);
    for (let layer = first; layer < rows.length && (this.folded || layer * CELL_HEIGHT < box.bottom); layer++) {
      for (const op of rows[layer]) {
        const left = this.left(op);
        if (left + NODE_WIDTH >= box.left && left <= box.right) this.drawOperator(op);
      }
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawParts();
    this.drawStrip();
  }

  drawEdges(box) {
    const pen = this.pen, ops = this.program.ops;
    const colours = new Map([["float16", this.fills[0]], ["bfloat16", this.fills[0]], ["float32", this.fills[1]]]);
    const paths = new Map();
    const strong = new Path2D();
    for (const edge of this.program.edges) {
      const [a, b] = [ops[edge.from], ops[edge.to]];
      if (this.fold(a) !== this.fold(b)) continue;
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

  /** The names of the program's parts, in the margins of the overview. */
  drawParts() {
    const pen = this.pen;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.fillStyle = this.text;
    let last = [-1, 0];
    for (const { layer, name } of this.parts) {
      const fold = Math.floor(layer / this.layers);
      const x = this.x + this.lefts[fold] * this.scale - 6;
      const y = this.y + (layer - fold * this.layers) * CELL_HEIGHT * this.scale;
      if (fold === last[0] && y < last[1] + LABEL) continue;
      pen.fillText(shorten(name, 15), x, y + 9, MARGIN - 10);
      last = [fold, y];
    }
    pen.textAlign = "left";
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
    if (this.folded) return undefined;
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
    if (this.folded) return;
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
      if (this.folded) this.start();
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
