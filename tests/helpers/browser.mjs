// node browser.mjs PACKAGES CHROMIUM SCRIPT [FLAG …]: runs a script in headless Chromium and prints what it gives as JSON.
// PACKAGES is a folder with playwright-core; the script's default export takes ({ browser, open }), where
// open(options) gives a page, whose errors and requests to other hosts end the run.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [packages, executablePath, script, ...flags] = process.argv.slice(2);
const { chromium } = createRequire(`${packages}/package.json`)("playwright-core");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", ...flags] });
const wrong = [];

async function open(options = {}) {
  const context = await browser.newContext(options);
  await context.route(/.*/, (route) => {
    if (new URL(route.request().url()).hostname === "localhost") return route.continue();
    wrong.push(`asks for ${route.request().url()}`);
    return route.abort();
  });
  context.on("request", (request) => request.method() === "GET" || wrong.push(`sends ${request.method()} ${request.url()}`));
  const page = await context.newPage();
  page.setDefaultTimeout(60_000);
  page.on("pageerror", (error) => wrong.push(error.message));
  page.on("console", (message) => message.type() === "error" && wrong.push(message.text()));
  return page;
}

try {
  const { default: run } = await import(pathToFileURL(script));
  const found = await run({ browser, open });
  console.log(JSON.stringify(found));
  if (wrong.length) throw new Error(wrong.join("; "));
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  await browser.close();
}
