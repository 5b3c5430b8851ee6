// The page: programs, filters, tabs, and what belongs to each.

const data = JSON.parse(document.getElementById("data").textContent);
const programs = { before: unpackProgram(data.before, data.strings), after: unpackProgram(data.after, data.strings) };
const titles = { before: "Before", after: "After" };
const keyOf = (op) => `${op.graph}\n${op.name}`;
const byName = {};
for (const which of ["before", "after"]) byName[which] = new Map(programs[which].ops.map((op) => [keyOf(op), op]));
const ranges = new Map(data.ranges.map((range) => [range.name, range]));
const axis = axisOf(data.ranges, data.limits);
const short = { float16: "fp16", bfloat16: "bf16", float32: "fp32", float64: "fp64" };
const state = { which: "after", chosen: null, filter: { text: "", kind: "", type: "", group: "" }, found: [] };
const $ = (id) => document.getElementById(id);

const tagOf = (op) => (op.kind === CAST ? `→ ${short[op.precision] || op.precision}` :
  op.kind === 2 ? "untouched" : short[op.precision] || op.precision);
const graph = new Graph($("canvas"), tagOf, (op) => choose(op, false));
const details = new Details($("details"), data, ranges, axis, (op) => choose(op, true));

// -- tables ------------------------------------------------------------------------------------------
const plainColumn = (title, key, width = "") => ({ title, width, text: (item) => item[key], sort: (item) => item[key] });
const pathColumn = (title, key, width = "wide") => ({ ...plainColumn(title, key, width), path: true });
const numberColumn = (title, value, show, width = "narrow") => ({
  title, width, number: true, text: (item) => show(value(item)), sort: (item) => Number(value(item)),
});
const kindColumn = {
  title: "runs", width: "narrow", sort: (op) => op.kind,
  fill: (cell, op) => cell.append(element("span", { class: `tag kind-${op.kind}` }, data.kinds[op.kind])),
};
const operators = new Table($("panel-operators"), "Operators", [
  pathColumn("name", "name"), plainColumn("type", "type", "middle"), kindColumn,
  plainColumn("reason", "reason", "widest"), pathColumn("scope", "scope", ""),
], (op) => choose(op, true));
const reasons = new Table($("panel-reasons"), "Reasons", [
  numberColumn("operators", (each) => each[1], String), { title: "reason", width: "wide", text: (each) => each[0] || "no reason" },
], (each) => filterBy({ group: each[0] }, "operators"));
const casts = new Table($("panel-casts"), "Casts", [
  pathColumn("tensor", "tensor"), plainColumn("direction", "direction", "middle"),
  numberColumn("moves", (cast) => cast.bytes, bytes), pathColumn("cast", "name"),
  { title: "whose", width: "middle", text: (cast) => (cast.inserted ? "inserted" : "the model's own"), sort: (cast) => cast.inserted },
], (cast) => choose(programs[state.which].ops[cast.index], true));
const constants = new Table($("panel-constants"), "Constants", [
  pathColumn("constant", "name"), plainColumn("problem", "problem", "narrow"),
  numberColumn("values", (note) => note.count, String), numberColumn("of", (note) => note.size, String),
  numberColumn("worst", (note) => note.worst, number), plainColumn("what was done", "action", "wide"),
]);
const pictures = new Table($("panel-ranges"), "Calibration ranges", [
  pathColumn("tensor", "name"),
  { title: "range", head: rangeAxis(axis, data.limits), width: "wide", fill: (cell, range) => cell.append(rangePicture(range, axis, data.limits)) },
  numberColumn("smallest", (range) => range.smallest, number), numberColumn("largest", (range) => range.largest, number),
  numberColumn("rounding", (range) => range.rounding, number), numberColumn("error", (range) => range.error, number),
  { title: "in words", width: "", text: (range) => verdict(range, data.limits), sort: (range) => verdict(range, data.limits) },
], (range) => chooseTensor(range.name));

/** Choose the operator that makes a tensor, or the first that reads it. */
function chooseTensor(name) {
  const program = programs[state.which];
  const tensor = program.tensors.find((each) => each.name === name);
  const index = tensor ? (tensor.producer >= 0 ? tensor.producer : tensor.readers[0]) : undefined;
  if (index !== undefined) choose(program.ops[index], true);
}

/** What stayed fp32, and why: a paragraph a reason, with the operators that begin each. */
function showKept() {
  const groups = keptBy(programs[state.which].ops);
  const count = groups.reduce((sum, [, ops]) => sum + ops.length, 0);
  const head = count ? `${count} ${count > 1 ? "operators stay" : "operator stays"} in fp32, for ${groups.length} ${groups.length > 1 ? "reasons" : "reason"}.` :
    "No operator stays in fp32.";
  $("panel-kept").replaceChildren(element("h2", {}, state.which === "after" ? head : `${count} operators are in fp32 before the conversion.`),
    ...groups.map(([group, ops]) => {
      const types = countBy(ops, (op) => op.type).map(([type, found]) => `${found} ${type}`);
      const more = types.length > 8 ? ` and ${types.length - 8} more types` : "";
      const shown = ops.slice(0, 4).map((op) => element("button", { type: "button", onclick: () => lead(op) }, op.name));
      const rest = element("button", { type: "button", class: "all", onclick: () => filterBy({ kind: FULL, group }, "operators") },
        `list all ${ops.length}`);
      return element("section", {}, element("h3", {}, element("span", { class: "count" }, String(ops.length)), group || "no reason given"),
        element("p", {}, types.slice(0, 8).join(", ") + more), element("p", { class: "names" }, ...shown, ...(ops.length > 4 ? [rest] : [])));
    }));
  return count;
}

/** Show an operator in the graph. */
function lead(op) {
  showTab("graph");
  choose(op, true);
}

// -- choosing ----------------------------------------------------------------------------------------
function choose(op, move) {
  state.chosen = op;
  operators.chosen = op;
  operators.draw();
  graph.select(op, move);
  if (!op) return details.clear();
  const other = state.which === "after" ? "before" : "after";
  details.show(op, programs[state.which], { title: titles[other].toLowerCase(), op: byName[other].get(keyOf(op)) });
}

function showProgram(which) {
  const there = (op) => (op ? byName[which].get(keyOf(op)) : undefined);
  const same = there(state.chosen);
  const near = graph.program && graph.viewWidth ? there(graph.middle(there)) : undefined;
  state.which = which;
  const program = programs[which];
  graph.show(program);
  casts.show(program.casts);
  state.kept = showKept();
  reasons.show(countBy(program.ops, (op) => op.group));
  fillSelect("type", countBy(program.ops, (op) => op.type));
  fillSelect("group", countBy(program.ops, (op) => op.group).filter(([text]) => text));
  fillSelect("kind", data.kinds.map((name, i) => [name, program.ops.filter((op) => op.kind === i).length, i]));
  for (const key of ["type", "group"]) state.filter[key] = $(key).value;
  applyFilter();
  choose(same || null, Boolean(same));
  if (!same && near) graph.centre(near);
  else if (!same && graph.viewWidth) graph.start();
  showTabs();
}

// -- filters -----------------------------------------------------------------------------------------
/** Options [text, count, value]; the choice stays where it is still one of them. */
function fillSelect(id, pairs) {
  const chosen = String(state.filter[id]);
  const options = pairs.map(([text, count, value]) => {
    const made = element("option", { value: value === undefined ? text : value }, `${shorten(text, 60)} (${count})`);
    made.selected = made.value === chosen && chosen !== "";
    return made;
  });
  $(id).replaceChildren(element("option", { value: "" }, "any"), ...options);
}

function filterBy(change, tab) {
  Object.assign(state.filter, { text: "", kind: "", type: "", group: "" }, change);
  for (const key of ["kind", "type", "group"]) $(key).value = state.filter[key];
  $("search").value = state.filter.text;
  applyFilter();
  showTab(tab);
}

function applyFilter() {
  const program = programs[state.which];
  const any = Object.values(state.filter).every((value) => value === "");
  state.found = any ? program.ops : program.ops.filter((op) => passes(op, state.filter));
  const kept = any ? null : new Set(state.found);
  operators.show(state.found);
  graph.mark((op) => !kept || kept.has(op));
  $("found").textContent = `${state.found.length} of ${program.ops.length} operators`;
}

/** Go to the next match (step 1) or the one before (-1), round the end. */
function step(by) {
  const found = state.found;
  if (!found.length) return;
  const at = found.indexOf(state.chosen);
  const next = found[at < 0 ? (by > 0 ? 0 : found.length - 1) : (at + by + found.length) % found.length];
  choose(next, true);
  operators.reveal(operators.shown.indexOf(next));
}

$("search").addEventListener("input", () => {
  state.filter.text = $("search").value.trim().toLowerCase();
  applyFilter();
});
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
});
for (const key of ["kind", "type", "group"]) {
  $(key).addEventListener("change", () => {
    state.filter[key] = key === "kind" && $(key).value !== "" ? Number($(key).value) : $(key).value;
    applyFilter();
  });
}
$("next").addEventListener("click", () => step(1));
$("previous").addEventListener("click", () => step(-1));
$("zoom-in").addEventListener("click", () => graph.zoom(1.25));
$("zoom-out").addEventListener("click", () => graph.zoom(0.8));
$("zoom-fit").addEventListener("click", () => graph.fit());
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|SELECT)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    $("search").focus();
  }
});

// -- tabs --------------------------------------------------------------------------------------------
let current = "kept";
const tabs = {
  kept: () => `${state.which === "after" ? "Stayed fp32" : "In fp32"} (${state.kept})`, graph: () => "Graph", operators: () => `Operators (${programs[state.which].ops.length})`,
  reasons: () => `Reasons (${reasons.items.length})`, casts: () => `Casts (${casts.items.length})`,
  constants: () => `Constants (${data.constants.length})`, ranges: () => `Ranges (${data.ranges.length})`,
  outcome: () => `Outcome (${data.notes.length + data.rounds.length} notes)`,
};

function showTabs() {
  for (const [name, title] of Object.entries(tabs)) $(`tab-${name}`).textContent = title();
}

function showTab(name) {
  current = name;
  for (const each of Object.keys(tabs)) {
    $(`tab-${each}`).setAttribute("aria-selected", each === name);
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
    $(`panel-${each}`).hidden = each !== name;
  }
}

function makeTabs() {
  const names = Object.keys(tabs);
  for (const name of names) {
    const attributes = { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` };
    $("tabs").append(element("button", { ...attributes, onclick: () => showTab(name) }));
    $(`panel-${name}`).setAttribute("role", "tabpanel");
    $(`panel-${name}`).setAttribute("aria-labelledby", `tab-${name}`);
  }
  $("tabs").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    showTab(names[(names.indexOf(current) + by + names.length) % names.length]);
    $(`tab-${current}`).focus();
  });
}

// -- the rest ----------------------------------------------------------------------------------------
function textLines(title, lines) {
  return lines.length ? [element("h2", {}, title), ...lines.map((line) => element("pre", {}, line))] : [];
}

function fillOutcome() {
  const allowed = data.tolerance === null ? "" : `, tolerance ${number(data.tolerance)}`;
  const judged = (error) => (data.tolerance === null ? "" : Number(error) <= Number(data.tolerance) ? ": met" : ": not met");
  const parts = [
    ...textLines("Notes", data.notes), ...textLines("Runs of auto mode", data.rounds),
    ...textLines(`Relative error of the outputs${allowed}`, data.outputs.map(([name, error]) => `${name}: ${number(error)}${judged(error)}`)),
  ];
  $("panel-outcome").append(...(parts.length ? parts : [element("p", {}, "no notes")]));
}

function makeHeader() {
  $("title").textContent = document.title;
  $("headline").textContent = data.headline;
  if (matchMedia("(max-width: 560px)").matches) $("filters").open = false;
  for (const [label, text] of data.facts) {
    $("facts").append(element("div", {}, element("dt", {}, label), element("dd", {}, text)));
  }
  for (const which of ["before", "after"]) {
    const radio = element("input", { type: "radio", name: "which", onchange: () => showProgram(which) });
    radio.checked = which === state.which;
    $("which").append(element("label", {}, radio, ` ${titles[which]}`));
  }
  const words = ["in 16 bit", "in fp32", "as the model has it", "cast that the conversion put in"];
  data.kinds.forEach((name, i) => {
    $("legend").append(element("li", {}, element("span", { class: `tag kind-${i}` }, name), element("span", { class: "words" }, words[i])));
  });
  const explain = "Magnitudes on a log2 axis. Hatched at the left: the format has no number there, values become 0; " +
    "striped: subnormal, fewer digits; hatched at the right: overflow.";
  $("panel-ranges").prepend(element("p", { class: "explain" }, explain));
}

makeHeader();
makeTabs();
constants.show(data.constants);
pictures.show(data.ranges);
fillOutcome();
showProgram("after");
showTab(current);
