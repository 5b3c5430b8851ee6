// Tables of any length: only the visible rows are in the document.

/** An element with attributes and children; strings become text, never markup. */
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Put a name into a cell that cuts off its beginning, not its end, where it is too long. */
function endOf(cell, text) {
  cell.title = text;
  cell.classList.add("path");
  cell.append(element("bdi", { dir: "ltr" }, text));
}

const ROW_HEIGHT = 28;
/** Beyond this browsers cut an element off: a longer table is scrolled in proportion. */
const TALLEST = 8e6;

class Table {
  /**
   * columns: {title, width ("narrow", "middle", "wide" or ""), number (bool), path (bool), text(item), fill(cell, item),
   * sort(item)}; `fill` draws what is not plain text, `sort` gives the key of an ordering; a `path` that is too long
   * keeps its end. `choose(item)`: what a click does.
   */
  constructor(parent, title, columns, choose) {
    Object.assign(this, { columns, choose, items: [], shown: [], order: null, chosen: null });
    this.head = element("div", { class: "head", role: "row" }, ...columns.map((c) => this.headCell(c)));
    this.space = element("div", { class: "space" });
    this.body = element("div", { class: "table", tabindex: "0", role: "grid", "aria-label": title }, this.space);
    this.body.addEventListener("scroll", () => this.draw());
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.empty = element("p", { class: "empty" }, "nothing to show");
    parent.append(this.head, this.body, this.empty);
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  headCell(column) {
    const name = `cell ${column.width} ${column.number ? "number" : ""}`;
    if (!column.sort) return element("div", { class: name, role: "columnheader" }, column.head || column.title);
    const button = element("button", { type: "button", onclick: () => this.sortBy(column) }, column.title);
    return element("div", { class: name, role: "columnheader" }, button);
  }

  show(items) {
    this.items = items;
    this.arrange();
  }

  sortBy(column) {
    const down = this.order && this.order.column === column && !this.order.down;
    this.order = { column, down };
    this.columns.forEach((each, i) => {
      const sorted = each === column ? (down ? "descending" : "ascending") : "none";
      this.head.children[i].setAttribute("aria-sort", sorted);
    });
    this.arrange();
  }

  arrange() {
    this.shown = this.items;
    if (this.order) {
      const { column, down } = this.order;
      const keyed = this.items.map((item, i) => [column.sort(item), i, item]);
      keyed.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0) * (down ? -1 : 1) || a[1] - b[1]);
      this.shown = keyed.map((each) => each[2]);
    }
    this.space.style.height = `${Math.min(this.shown.length * ROW_HEIGHT, TALLEST)}px`;
    this.body.setAttribute("aria-rowcount", this.shown.length);
    this.empty.hidden = this.shown.length > 0;
    this.body.hidden = this.head.hidden = this.shown.length === 0;
    this.draw();
  }

  /** Pixels that the rows would be taller than the document lets them, at this scroll position. */
  shift() {
    const excess = Math.max(0, this.shown.length * ROW_HEIGHT - TALLEST);
    const room = Math.max(1, Math.min(this.shown.length * ROW_HEIGHT, TALLEST) - this.body.clientHeight);
    return excess * Math.min(1, this.body.scrollTop / room);
  }

  draw() {
    const shift = this.shift();
    const first = Math.max(0, Math.floor((this.body.scrollTop + shift) / ROW_HEIGHT) - 4);
    const last = Math.min(this.shown.length, first + Math.ceil(this.body.clientHeight / ROW_HEIGHT) + 9);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(this.row(this.shown[i], i, shift));
    this.space.replaceChildren(...rows);
  }

  row(item, i, shift) {
    const row = element("div", { class: "row", role: "row", "aria-rowindex": i + 1 });
    row.style.top = `${i * ROW_HEIGHT - shift}px`;
    row.classList.toggle("chosen", item === this.chosen);
    if (this.choose) {
      row.classList.add("clickable");
      row.addEventListener("click", () => this.pick(item));
    }
    for (const column of this.columns) {
      const cell = element("div", { class: `cell ${column.width} ${column.number ? "number" : ""}`, role: "gridcell" });
      if (column.fill) column.fill(cell, item);
      else if (column.path) endOf(cell, column.text(item));
      else cell.textContent = cell.title = column.text(item);
      row.append(cell);
    }
    return row;
  }

  pick(item) {
    this.chosen = item;
    this.draw();
    this.choose(item);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !this.choose || !this.shown.length) return;
    event.preventDefault();
    const at = Math.min(this.shown.length - 1, Math.max(0, this.shown.indexOf(this.chosen) + step));
    this.reveal(at);
    this.pick(this.shown[at]);
  }

  reveal(at) {
    const [top, height] = [at * ROW_HEIGHT - this.shift(), this.body.clientHeight];
    if (top < this.body.scrollTop || top + ROW_HEIGHT > this.body.scrollTop + height) {
      const room = Math.max(1, Math.min(this.shown.length * ROW_HEIGHT, TALLEST) - height);
      const whole = Math.max(1, this.shown.length * ROW_HEIGHT - height);
      this.body.scrollTop = Math.max(0, (at * ROW_HEIGHT - height / 2) * room / whole);
    }
  }
}
