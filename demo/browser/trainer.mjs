// The worker that trains, so that the page stays awake. It is sent messages { do, … }; each answer has `is`.

import { TrainingStep, files, url } from "../runners/amp_step.mjs";
import { Source } from "./data.mjs";
import { build } from "./keep.mjs";

const EVERY = 10; // steps from one evaluation to the next

let step, task, source, held, home;
let running = false;
let bright = false; // the next batch is to overflow
let turn = Promise.resolve(); // sessions run one after the other

const tell = (is, what = {}, transfer = []) => postMessage({ is, ...what }, transfer);

/** Run one thing after the other; what goes wrong is told. */
function inTurn(work) {
  turn = turn.then(work).catch((error) => {
    running = false;
    tell("error", { message: error.message, kind: error.name });
  });
  return turn;
}

const actions = {
  async open({ name, provider }) {
    await step?.close();
    step = undefined;
    home = new URL(`steps/${name}/`, location.href);
    task = JSON.parse(new TextDecoder().decode(await url(home)("task.json")));
    const ort = await import(`./${build(provider)}`);
    if (!self.crossOriginIsolated) ort.env.wasm.numThreads = 1; // threads share memory, which such pages alone may do
    const options = { executionProviders: [provider], logSeverityLevel: 3 };
    const begin = performance.now();
    step = await TrainingStep.open(url(new URL("step/", home)), { ort, options, onDevice: provider === "webgpu" });
    source = new Source(task);
    held = source.held();
    const threads = provider === "wasm" ? ort.env.wasm.numThreads || 1 : null;
    const seconds = (performance.now() - begin) / 1e3;
    tell("opened", { task, place: step.place, provider, threads, seconds, scale: await step.lossScale() });
    await evaluate();
  },

  start() {
    if (running) return;
    running = true;
    inTurn(next);
  },

  pause() {
    running = false;
    if (step) tell("paused", { step: step.step });
  },

  overflow() {
    bright = true;
  },

  add({ image, label }) {
    source.add(image, label);
    if (source.use !== "generated") held = source.held();
  },

  async use({ which }) {
    source.use = which;
    held = source.held();
    if (step && !running) await evaluate();
  },

  async infer({ image, id }) {
    if (!step) return;
    const fetched = await step.infer({ [task.image]: image });
    tell("inferred", { id, scores: Array.from(fetched[task.scores], Number) });
  },

  async checkpoint() {
    tell("files", { files: await step.checkpoint("demo/browser") });
  },

  async model() {
    tell("files", { files: new Map([[`${task.name}_fp16.onnx`, (await step.model()).get("model.onnx")]]) });
  },

  async load({ files: given }) {
    await step.load(chosen(given));
    tell("loaded", { step: step.step, scale: await step.lossScale() });
    await evaluate();
  },
};

/** Reads files that were chosen. Browsers number what is downloaded again: the one that ends alike will do. */
function chosen(given) {
  return (name) => {
    const alike = [...given.keys()].filter((each) => each.endsWith(name.slice(name.lastIndexOf("."))));
    return files(given)(given.has(name) || alike.length !== 1 ? name : alike[0]);
  };
}

async function next() {
  if (!running) return;
  const feeds = source.batch(step.step);
  if (bright) feeds[task.image] = feeds[task.image].map((value) => value * 3e4);
  bright = false;
  const begin = performance.now();
  const fetched = await step.train(feeds);
  const milliseconds = performance.now() - begin;
  const { losses, loss_scale: scaling } = step.manifest;
  const skipped = Boolean(scaling?.found_inf && fetched[scaling.found_inf][0]);
  tell("step", { step: step.step, loss: fetched[losses[0]][0], scale: await step.lossScale(), skipped, milliseconds });
  if (step.step % EVERY === 0) await evaluate();
  setTimeout(() => inTurn(next)); // behind what the page has asked for in between
}

async function evaluate() {
  const fetched = await step.evaluate(held);
  const scores = fetched[task.scores];
  const labels = held[task.label];
  const classes = scores.length / labels.length;
  let right = 0;
  for (let i = 0; i < labels.length; i += 1) {
    let best = 0;
    for (let c = 1; c < classes; c += 1) if (scores[i * classes + c] > scores[i * classes + best]) best = c;
    right += best === Number(labels[i]);
  }
  tell("accuracy", { step: step.step, accuracy: right / labels.length, loss: fetched[step.manifest.losses[0]][0] });
}

onmessage = ({ data }) => {
  const action = actions[data.do];
  if (data.do === "pause" || data.do === "start" || data.do === "overflow") action(data);
  else inTurn(() => action(data));
};
