// What the page needs of onnxruntime-web, and how all that it may need is kept for when there is no server.

/** The module of onnxruntime-web for a provider: wasm or webgpu. */
export const build = (provider) => `node_modules/onnxruntime-web/dist/ort.${provider}.min.mjs`;

async function read(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return answer;
}

/** Ask for the files of all tasks for these providers, of which the service worker (sw.js) keeps what comes. */
export async function keep(tasks, providers) {
  for (const { name } of tasks) {
    const home = `steps/${name}/`;
    const manifest = await (await read(`${home}step/manifest.json`)).json();
    const places = manifest.places.filter(({ place }) => providers.includes(place === "cpu" ? "wasm" : place));
    const files = Object.keys(Object.assign({}, manifest.files, ...places.map((place) => place.files)));
    for (const file of ["task.json", "step/meta.json", ...files.map((each) => `step/${each}`)]) await read(home + file);
  }
  for (const provider of providers) {
    const text = await (await read(build(provider))).text();
    for (const [, name] of text.matchAll(/(ort-wasm-simd[\w.-]*)\.mjs/g)) {
      for (const ending of ["mjs", "wasm"]) await read(new URL(`${name}.${ending}`, new URL(build(provider), location.href)));
    }
  }
}
