"use strict";
// The data of the page: unpacking, searching, numbers in words. Nothing here touches the document.

/** Operators, tensors and edges of one packed program. `holder`, `producer`: indices of operators, -1 for none. */
function unpackProgram(packed, strings) {
  const tensors = packed.tensors.name.map((name, i) => ({
    name: strings[name], dtype: strings[packed.tensors.dtype[i]], shape: strings[packed.tensors.shape[i]],
    bytes: packed.tensors.bytes[i], producer: -1, readers: [],
  }));
  const ops = packed.name.map((name, i) => ({
    index: i, name: strings[name], type: strings[packed.type[i]], scope: strings[packed.scope[i]],
    graph: strings[packed.graph[i]], precision: strings[packed.precision[i]], reason: strings[packed.reason[i]],
    group: strings[packed.group[i]], kind: packed.kind[i], holder: packed.holder[i], reads: packed.reads[i],
    makes: packed.makes[i], layer: packed.layer[i], column: packed.column[i] / packed.steps,
  }));
  const edges = [];
  const outside = { feeds: new Set(packed.inputs.map((i) => strings[i])), fetches: new Set(packed.outputs.map((i) => strings[i])) };
  for (const op of ops) {
    for (const t of op.makes) tensors[t].producer = op.index;
    op.text = [op.name, op.type, op.reason, ...op.makes.map((t) => tensors[t].name)].join("\n").toLowerCase();
  }
  for (const op of ops) {
    for (const t of new Set(op.reads)) {
      tensors[t].readers.push(op.index);
      if (tensors[t].producer >= 0) edges.push({ from: tensors[t].producer, to: op.index, dtype: tensors[t].dtype });
    }
    const inside = op.reads.some((t) => tensors[t].producer >= 0 && ops[tensors[t].producer].holder === op.holder);
    if (op.holder >= 0 && op.reads.length && !inside) edges.push({ from: op.holder, to: op.index, dtype: "" });
  }
  const casts = packed.casts.map(([index, tensor, source, target, bytes, inserted]) => ({
    index, tensor: strings[tensor], direction: `${strings[source]} → ${strings[target]}`, bytes, inserted,
    name: ops[index].name,
  }));
  for (const op of ops) {
    const names = (indices, set) => [...new Set(indices.map((t) => tensors[t].name).filter((name) => set.has(name)))];
    op.feeds = names(op.reads.filter((t) => tensors[t].producer < 0), outside.feeds);
    op.fetches = op.holder < 0 ? names(op.makes, outside.fetches) : [];
  }
  return { ops, tensors, edges, casts, rows: rowsOf(ops) };
}

/** The operators of every layer, from left to right. */
function rowsOf(ops) {
  const rows = [];
  for (const op of ops) (rows[op.layer] ||= []).push(op);
  for (let i = 0; i < rows.length; i++) (rows[i] ||= []).sort((a, b) => a.column - b.column);
  return rows;
}

/**
 * Where the parts of a program begin: {layer, name} by the scopes of its operators, as finely divided as `most` allows;
 * layers between are of the part above.
 */
function partsOf(rows, most) {
  const paths = rows.map((row) => ((row.find((op) => op.scope) || {}).scope || "").split("/").filter(Boolean));
  let best = [];
  for (let depth = 1; depth <= 8; depth++) {
    const found = [];
    let last = "";
    paths.forEach((path, layer) => {
      const name = path.slice(0, depth).join("/");
      if (name && name !== last) found.push({ layer, name: path[Math.min(depth, path.length) - 1] });
      if (name) last = name;
    });
    if (found.length > most) break;
    best = found;
  }
  return best;
}

/** Whether an operator passes the filter {text, kind, type, group}; "" stands for anything. */
function passes(op, filter) {
  return (filter.kind === "" || op.kind === filter.kind) && (filter.type === "" || op.type === filter.type) &&
    (filter.group === "" || op.group === filter.group) &&
    filter.text.split(/\s+/).every((word) => op.text.includes(word));
}

/** Pairs [group, operators] of what stayed fp32, by the sort of the reason, the largest group first. */
function keptBy(ops) {
  const groups = new Map();
  for (const op of ops) {
    if (op.kind === FULL) groups.set(op.group, [...(groups.get(op.group) || []), op]);
  }
  return [...groups].sort((a, b) => b[1].length - a[1].length || (a[0] < b[0] ? -1 : 1));
}

/** Pairs [value, count] of what `key` gives for each item, the most frequent first. */
function countBy(items, key) {
  const found = new Map();
  for (const item of items) found.set(key(item), (found.get(key(item)) || 0) + 1);
  return [...found].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0));
}

/** The name of a tensor as it was before casts were put in: what a range is measured of. */
function sourceName(program, tensor) {
  for (;;) {
    const maker = program.tensors[tensor].producer;
    if (maker < 0 || program.ops[maker].kind !== CAST || !program.ops[maker].reads.length) {
      return program.tensors[tensor].name;
    }
    tensor = program.ops[maker].reads[0];
  }
}

const FULL = 1, CAST = 3;

/** What the format does to numbers of these magnitudes, in words. */
function verdict(range, limits) {
  const [largest, smallest] = [Number(range.largest), Number(range.smallest)];
  if (!range.finite || !Number.isFinite(largest)) return "not finite";
  if (largest === 0) return "all zero";
  if (largest > limits.largest) return "overflows";
  if (largest < limits.smallest) return "all below the smallest number";
  if (smallest < limits.smallest) return "some below the smallest number";
  if (smallest < limits.normal) return "some subnormal";
  return "fits";
}

const BAD = new Set(["not finite", "overflows", "all below the smallest number"]);

/** The axis of the pictures: log2 bounds that hold the format and every range. */
function axisOf(ranges, limits) {
  let [low, high] = [Math.log2(limits.smallest), Math.log2(limits.largest)];
  for (const range of ranges) {
    const [largest, smallest] = [Number(range.largest), Number(range.smallest)];
    if (smallest > 0 && Number.isFinite(smallest)) low = Math.min(low, Math.log2(smallest));
    if (largest > 0 && Number.isFinite(largest)) high = Math.max(high, Math.log2(largest));
  }
  return { low: Math.floor(low) - 2, high: Math.ceil(high) + 2 };
}

/** Where a magnitude stands on the axis, in percent; 0 and infinity are at its ends. */
function placeOn(axis, value) {
  const share = (Math.log2(Number(value)) - axis.low) / (axis.high - axis.low);
  return 100 * Math.min(1, Math.max(0, Number.isNaN(share) ? 1 : share));
}

function number(value) {
  const x = Number(value);
  if (!Number.isFinite(x)) return String(value);
  const size = Math.abs(x);
  if (x === 0) return "0";
  return size >= 1e-3 && size < 1e5 ? String(Number(x.toPrecision(4))) : x.toExponential(2);
}

function bytes(count) {
  let [value, unit] = [count, "B"];
  for (const larger of ["kB", "MB", "GB", "TB"]) {
    if (value < 999.5) break;
    [value, unit] = [value / 1000, larger];
  }
  return `${Number(value.toPrecision(3))} ${unit}`;
}

/** The end of a text: of a name with a path before it, the part that tells it from others. */
function shorten(text, length) {
  return text.length <= length ? text : "…" + text.slice(text.length - length + 1);
}
