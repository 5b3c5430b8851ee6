// node train.mjs FOLDER BATCHES STEPS TO [FROM] [--web] [--provider NAME] [--model TO]: trains with an exported step, as
// bare.py does. --web: onnxruntime-web (wasm) instead of onnxruntime-node; --provider: cpu, wasm, webgpu, …, whose
// step is taken, instead of the first place of the folder; --model: a new folder for the trained ONNX model.

import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { dirname, resolve } from "node:path";
import process from "node:process";
import { parseArgs } from "node:util";

import { TrainingStep, folder, readSafetensors } from "./amp_step.mjs";

try {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: { web: { type: "boolean" }, provider: { type: "string" }, model: { type: "string" } },
  });
  const [home, batches, steps, to, from] = positionals;
  if (!to) throw new Error("usage: node train.mjs FOLDER BATCHES STEPS TO [FROM] [--web] [--provider NAME] [--model TO]");
  if (!/^\d+$/.test(steps)) throw new Error(`STEPS is '${steps}'; expected a whole number`);
  const made = [to, values.model].filter(Boolean).map((path) => resolve(path));
  for (const path of made) {
    if (existsSync(path)) throw new Error(`'${path}' is there already`);
    if (!existsSync(dirname(path))) throw new Error(`there is no folder '${dirname(path)}'`);
  }
  const ort = await import(values.web ? "onnxruntime-web" : "onnxruntime-node");
  if (values.web) ort.env.wasm.numThreads = 1;
  const options = { logSeverityLevel: 3, ...(values.provider && { executionProviders: [values.provider] }) };
  const step = await TrainingStep.open(folder(home), { ort, options, checkpoint: folder(from ?? home) });
  const data = readSafetensors(new Uint8Array(await readFile(batches)));
  if (new Set([...data.values()].map(({ shape }) => shape[0])).size > 1) throw new Error(`feeds in '${batches}' differ in length`);
  for (let left = Number(steps); left > 0; left -= 1) {
    const feeds = {};
    for (const [name, { shape, data: all }] of data) {
      if (!shape[0]) throw new Error(`'${name}' in '${batches}' has no batches`);
      const size = all.length / shape[0];
      const batch = all.slice((step.step % shape[0]) * size, ((step.step % shape[0]) + 1) * size);
      feeds[name] = { data: batch, shape: shape.slice(1) };
    }
    const fetched = await step.train(feeds);
    const told = Object.entries(fetched).map(([name, value]) => `${name} ${Number(value[0]).toPrecision(9)}`);
    console.log(`step ${step.step} ${told.join(" ")}`);
  }
  await step.save(made[0]);
  if (values.model) await step.save(made[1], await step.model());
  await step.close();
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
}
