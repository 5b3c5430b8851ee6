// One operator in full, and the pictures of calibration ranges.

/** A bar from the smallest to the largest magnitude, on a log2 axis, before what the format can hold. */
function rangePicture(range, axis, limits) {
  const part = (name, from, to) => {
    const made = element("div", { class: name });
    made.style.left = `${from}%`;
    made.style.width = `${Math.max(0, to - from)}%`;
    return made;
  };
  const [lost, low, high] = [limits.smallest, limits.normal, limits.largest].map((x) => placeOn(axis, x));
  const words = verdict(range, limits);
  const [from, to] = [placeOn(axis, range.smallest), placeOn(axis, range.largest)];
  const said = `${number(range.smallest)} to ${number(range.largest)}: ${words}`;
  const bar = Number(range.largest) > 0 || BAD.has(words) ? [part(`span ${BAD.has(words) ? "bad" : ""}`, from, to)] : [];
  return element("div", { class: "picture", role: "img", "aria-label": said, title: said },
    part("lost", 0, lost), part("low", lost, low), part("lost", high, 100), ...bar);
}

/** The axis over a column of pictures: where the format ends. */
function rangeAxis(axis, limits) {
  const marks = [
    [limits.smallest, "smallest number", "-100%"], [limits.normal, "smallest normal number", "0"],
    [limits.largest, "largest number", "-100%"],
  ];
  const made = element("div", { class: "axis" });
  for (const [value, word, side] of marks) {
    const mark = element("span", { title: `${word}: ${number(value)}` }, `2^${Math.round(Math.log2(value))}`);
    mark.style.left = `${placeOn(axis, value)}%`;
    mark.style.transform = `translateX(${side})`;
    made.append(mark);
  }
  return made;
}

class Details {
  /** `ranges`: a Map from tensor name to range; `go(op)` chooses another operator. */
  constructor(parent, data, ranges, axis, go) {
    Object.assign(this, { parent, data, ranges, axis, go });
    this.clear();
  }

  clear() {
    this.parent.hidden = true;
  }

  show(op, program, other) {
    const line = (label, text) => (text ? [element("dt", {}, label), element("dd", {}, text)] : []);
    const facts = element("dl", {},
      ...line("why", op.reason), ...line("precision", op.precision), ...line("scope", op.scope),
      ...line("graph", op.graph), ...(op.holder >= 0 ? line("inside", program.ops[op.holder].name) : []),
      ...line(other.title, other.op ? `${other.op.precision || "no floating-point tensor"}` : "not there"));
    const tag = element("span", { class: `tag kind-${op.kind}` }, this.data.kinds[op.kind]);
    this.parent.replaceChildren(element("h2", {}, op.name), element("p", {}, op.type, " ", tag), facts,
      ...this.tensors("reads", op.reads, program, (t) => (t.producer >= 0 ? [t.producer] : [])),
      ...this.tensors("makes", op.makes, program, (t) => t.readers));
    this.parent.hidden = false;
    this.parent.scrollTop = 0;
  }

  tensors(title, indices, program, neighbours) {
    if (!indices.length) return [];
    const list = element("ul", {}, ...indices.map((i) => this.tensor(i, program, neighbours)));
    return [element("h2", {}, title), list];
  }

  tensor(i, program, neighbours) {
    const tensor = program.tensors[i];
    const range = this.ranges.get(sourceName(program, i));
    const constant = tensor.bytes >= 0 ? `, constant, ${bytes(tensor.bytes)}` : "";
    const made = element("li", {}, element("div", { class: "name" }, tensor.name),
      element("div", {}, `${tensor.dtype || "no tensor"}, ${tensor.shape}${constant}`));
    if (range) {
      const said = `measured ${number(range.smallest)} to ${number(range.largest)}, rounding ${number(range.rounding)}, ` +
        `error ${number(range.error)}: ${verdict(range, this.data.limits)}`;
      made.append(rangePicture(range, this.axis, this.data.limits), element("div", {}, said));
    }
    const near = neighbours(tensor);
    for (const index of near.slice(0, 12)) {
      const op = program.ops[index];
      made.append(element("button", { type: "button", onclick: () => this.go(op) }, `${op.type}: ${shorten(op.name, 40)}`));
    }
    if (near.length > 12) made.append(` and ${near.length - 12} more`);
    return made;
  }
}
