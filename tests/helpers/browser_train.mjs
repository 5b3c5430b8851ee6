// node browser_train.mjs FOLDER BATCHES STEPS TO [FROM] [--provider NAME] [--flag CHROMIUM_FLAG]…: as demo/runners/train.mjs,
// but in headless Chromium ($AMP_BROWSER), with the packages of demo/browser. Files come from the disk, as if from localhost.

import { existsSync } from "node:fs";
import { mkdir, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import process from "node:process";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const DEMO = fileURLToPath(new URL("../../demo", import.meta.url));
const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { provider: { type: "string", default: "wasm" }, flag: { type: "string", multiple: true, default: [] } },
});
const [home, batches, steps, to, from] = positionals;

/** In the page: train, and give what was fetched and the checkpoint, or the message of what went wrong. */
async function train({ provider, steps, from }) {
  const lines = [];
  try {
    const ort = await import(`/demo/browser/node_modules/onnxruntime-web/dist/ort.${provider === "wasm" ? "wasm" : "webgpu"}.min.mjs`);
    const { TrainingStep, readSafetensors, url } = await import("/demo/runners/amp_step.mjs");
    ort.env.wasm.numThreads = 1;
    const options = { executionProviders: [provider], logSeverityLevel: 3 };
    const checkpoint = from ? url("/from/") : undefined;
    const step = await TrainingStep.open(url("/step/"), { ort, options, checkpoint, onDevice: provider !== "wasm" });
    const data = readSafetensors(await url("/")("batches"));
    if (new Set([...data.values()].map(({ shape }) => shape[0])).size > 1) throw new Error("feeds in the batches differ in length");
    for (let left = steps; left > 0; left -= 1) {
      const feeds = {};
      for (const [name, { shape, data: all }] of data) {
        if (!shape[0]) throw new Error(`'${name}' has no batches`);
        const size = all.length / shape[0];
        const batch = all.slice((step.step % shape[0]) * size, ((step.step % shape[0]) + 1) * size);
        feeds[name] = { data: batch, shape: shape.slice(1) };
      }
      const fetched = Object.entries(await step.train(feeds));
      lines.push(`step ${step.step} ${fetched.map(([name, value]) => `${name} ${Number(value[0]).toPrecision(9)}`).join(" ")}`);
    }
    const made = Array.from(await step.checkpoint(), ([name, bytes]) => [name, btoa(Array.from(bytes, (b) => String.fromCharCode(b)).join(""))]);
    return { lines, made };
  } catch (error) {
    return { lines, wrong: error.message };
  }
}

const { chromium } = createRequire(`${DEMO}/browser/package.json`)("playwright-core");
const browser = await chromium.launch({ executablePath: process.env.AMP_BROWSER, args: ["--no-sandbox", ...values.flag] });
try {
  const page = await browser.newPage();
  await page.route(/.*/, (route) => {
    const path = new URL(route.request().url()).pathname;
    if (path === "/") return route.fulfill({ contentType: "text/html", body: "" });
    const file = path.replace("/demo/", `${DEMO}/`).replace("/step/", `${home}/`).replace("/from/", `${from}/`).replace(/^\/batches$/, batches);
    return existsSync(file) ? route.fulfill({ path: file }) : route.fulfill({ status: 404 });
  });
  await page.goto("http://localhost/");
  const { lines, made, wrong } = await page.evaluate(train, { provider: values.provider, steps: Number(steps), from: Boolean(from) });
  for (const line of lines) console.log(line);
  if (wrong) throw new Error(wrong);
  await mkdir(to);
  for (const [name, text] of made) await writeFile(`${to}/${name}`, Buffer.from(text, "base64"));
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
} finally {
  await browser.close();
}
