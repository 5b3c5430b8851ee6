// The page: what is chosen, drawn and shown. Training is the worker's (trainer.mjs).

import { Chart } from "./chart.mjs";
import { drawSample, hiddenCanvas } from "./data.mjs";
import { keep } from "./keep.mjs";
import { Pad } from "./pad.mjs";

const $ = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`)?.value;
const worker = new Worker(new URL("trainer.mjs", import.meta.url), { type: "module" });
const ask = (what, more = {}) => worker.postMessage({ do: what, ...more });

/** Powers of two as such. */
function power(value) {
  const exponent = Math.log2(value);
  if (value < 1024 || !Number.isInteger(exponent)) return String(value);
  return `2${Array.from(String(exponent), (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

const charts = {
  loss: new Chart($("c-loss"), { name: "Loss", smooth: 10 }),
  accuracy: new Chart($("c-accuracy"), {
    name: "Accuracy", scale: "share", goal: 0.95, format: (value) => `${Math.round(value * 100)} %`,
  }),
  scale: new Chart($("c-scale"), { name: "Loss scale", scale: "log2", stepped: true, format: power }),
  skipped: new Chart($("c-skipped"), { name: "Skipped steps", stepped: true }),
};

let tasks = [];
let task = null;
let pad = null;
let training = false;
let keeping = false;
let counts = {};
let timer = null; // of the seconds that are shown
let webgpu = "is not looked for yet";

// -- the worker's answers -------------------------------------------------------------------------------
const answers = {
  opened({ task: said, place, provider, threads, seconds, scale }) {
    task = said;
    const where = provider === "wasm" ? `wasm, ${threads === 1 ? "1 thread" : `${threads} threads`}` : `WebGPU (${webgpu})`;
    $("about").textContent = `${task.about}. Runs in ${where}; lowered for ${place}; opened in ${seconds.toFixed(1)} s.`;
    begin(0, scale);
    showSamples();
    pad.open(task);
    enable(true);
    status("Ready");
    keepAll();
  },

  step({ step, loss, scale, skipped, milliseconds }) {
    counts.skipped += skipped;
    counts.times = [...(counts.times ?? []), milliseconds].slice(-20);
    charts.loss.add(step, loss);
    charts.scale.add(step, scale);
    charts.skipped.add(step, counts.skipped);
    if (skipped) charts.scale.mark(step);
    show({ step, loss: Number.isFinite(loss) ? loss.toPrecision(3) : String(loss), scale: power(scale), skipped: counts.skipped });
    show({ time: `${counts.times.toSorted((a, b) => a - b)[counts.times.length >> 1].toFixed(0)} ms` });
  },

  accuracy({ step, accuracy }) {
    charts.accuracy.add(step, accuracy);
    show({ accuracy: `${(100 * accuracy).toFixed(1)} %` });
    if (step) pad.infer(); // what it makes of the drawing now
  },

  paused({ step }) {
    stopped(`Paused at step ${step}`);
  },

  inferred({ scores, id }) {
    pad.told(scores, id);
  },

  loaded({ step, scale }) {
    begin(step, scale);
    stopped(`Goes on from step ${step}`);
  },

  files({ files }) {
    $("files").replaceChildren();
    for (const [name, bytes] of files) {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([bytes]));
      Object.assign(link, { download: name, textContent: name });
      const line = document.createElement("li");
      line.append(link, ` ${(bytes.length / 1e6).toFixed(2)} MB`);
      $("files").append(line);
      link.click();
    }
  },

  error({ message }) {
    stopped("Stopped");
    complain(message);
  },
};

worker.onmessage = ({ data }) => answers[data.is](data);
worker.onerror = (event) => complain(event.message ?? "the worker does not start");

// -- what is shown --------------------------------------------------------------------------------------
function show(values) {
  for (const [name, value] of Object.entries(values)) $(`n-${name}`).textContent = value;
}

function status(text) {
  $("state").textContent = text;
  document.body.dataset.state = text.split(" ")[0].toLowerCase();
}

function complain(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function enable(yes) {
  for (const id of ["start", "overflow", "again", "model", "checkpoint", "load"]) $(id).disabled = !yes;
}

/** Empty charts, from a step on. */
function begin(step, scale) {
  counts = { skipped: 0, seconds: 0 };
  for (const chart of Object.values(charts)) chart.clear();
  show({ step, loss: "–", accuracy: "–", scale: scale === null ? "none" : power(scale), skipped: 0, time: "–", elapsed: "0 s" });
}

function stopped(text) {
  training = false;
  clearInterval(timer);
  $("start").textContent = "Resume";
  status(text);
}

function showSamples() {
  const { size, classes } = task;
  const context = hiddenCanvas(size).getContext("2d", { willReadFrequently: true });
  const shown = 8;
  $("samples").replaceChildren();
  classes.forEach((name, label) => {
    const strip = Object.assign(document.createElement("canvas"), { width: shown * (size + 2), height: size });
    const drawn = strip.getContext("2d");
    for (let i = 0; i < shown; i += 1) {
      drawSample(context, task, label, i);
      drawn.drawImage(context.canvas, i * (size + 2), 0);
    }
    strip.setAttribute("role", "img");
    strip.setAttribute("aria-label", `generated images of ${name}`);
    $("samples").append(task.kind === "pictures" ? named(label) : text("span", name), strip);
  });
}

function text(kind, content) {
  return Object.assign(document.createElement(kind), { textContent: content });
}

/** The name of a class, to change: whoever brings pictures has classes of another kind. */
function named(label) {
  const input = Object.assign(document.createElement("input"), { value: task.classes[label], size: 8 });
  input.setAttribute("aria-label", `name of class ${label + 1}`);
  input.onchange = () => {
    task.classes[label] = input.value.trim() || `class ${label + 1}`;
    input.value = task.classes[label];
    pad.name();
  };
  return input;
}

// -- what is chosen -------------------------------------------------------------------------------------
function open() {
  enable(false);
  complain("");
  stopped("Loading…");
  $("start").textContent = "Start";
  for (const input of document.querySelectorAll("input[name=use]")) {
    input.disabled = input.value !== "generated";
    input.checked = input.value === "generated";
  }
  ask("open", { name: chosen("task"), provider: chosen("provider") });
}

$("start").onclick = () => {
  if (training) {
    ask("pause");
    return;
  }
  complain("");
  training = true;
  $("start").textContent = "Pause";
  status("Training");
  const from = performance.now() - 1e3 * counts.seconds;
  timer = setInterval(() => {
    counts.seconds = (performance.now() - from) / 1e3;
    show({ elapsed: `${Math.floor(counts.seconds)} s` });
  }, 250);
  ask("start");
};
$("overflow").onclick = () => ask("overflow");
$("again").onclick = () => {
  ask("pause");
  open();
};
$("model").onclick = () => ask("model");
$("checkpoint").onclick = () => ask("checkpoint");
$("load").onchange = async ({ target }) => {
  const given = await Promise.all(Array.from(target.files, async (file) => [file.name, new Uint8Array(await file.arrayBuffer())]));
  target.value = "";
  complain("");
  ask("pause");
  ask("load", { files: new Map(given) });
};
$("choice").onchange = () => {
  ask("pause");
  open();
};
for (const input of document.querySelectorAll("input[name=use]")) input.onchange = () => ask("use", { which: input.value });

async function findWebgpu() {
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  const input = document.querySelector("input[value=webgpu]");
  if (!adapter) webgpu = "this browser offers none";
  else if (!adapter.features.has("shader-f16")) webgpu = "its adapter has no 16-bit arithmetic (shader-f16)";
  else {
    webgpu = [adapter.info?.vendor, adapter.info?.architecture, adapter.info?.description].filter(Boolean).join(" ") || "an adapter";
    input.disabled = false;
  }
  input.parentElement.title = `WebGPU: ${webgpu}`;
  input.parentElement.querySelector("span").textContent = input.disabled ? `WebGPU: ${webgpu}` : "WebGPU";
}

/** Let the service worker (sw.js) have the page; it takes one more load to be isolated by it. */
async function settle() {
  if (!navigator.serviceWorker || crossOriginIsolated) return;
  await navigator.serviceWorker.register("sw.js");
  await navigator.serviceWorker.ready;
  if (sessionStorage.getItem("settled")) return;
  sessionStorage.setItem("settled", "yes");
  location.reload();
  await new Promise(() => {});
}

/** Have the service worker keep what was not needed yet: the other task, the other place. */
function keepAll() {
  if (keeping || !navigator.serviceWorker?.controller) return;
  keeping = true;
  const offered = Array.from(document.querySelectorAll("input[name=provider]:enabled"), (input) => input.value);
  keep(tasks, offered).then(() => ($("kept").hidden = false), () => {}); // works without
}

async function main() {
  await settle().catch(() => {}); // works without
  pad = new Pad($, ask, complain);
  try {
    const answer = await fetch("steps/tasks.json");
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    tasks = await answer.json();
    const asked = new URLSearchParams(location.search);
    tasks.forEach(({ name, title }, i) => {
      const input = Object.assign(document.createElement("input"), { type: "radio", name: "task", value: name });
      input.checked = asked.has("task") ? asked.get("task") === name : i === 0;
      const label = document.createElement("label");
      label.append(input, text("span", title));
      $("tasks").append(label);
    });
    await findWebgpu();
    const wanted = document.querySelector(`input[name=provider][value="${CSS.escape(asked.get("provider") ?? "")}"]:enabled`);
    if (wanted) wanted.checked = true;
    open();
  } catch (error) {
    status("Stopped");
    complain(`steps/tasks.json cannot be read (${error.message}); python demo/browser/make_folders.py writes it`);
  }
}

main();
