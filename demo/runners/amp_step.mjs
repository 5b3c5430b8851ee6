// Trains with a folder that Program.export_training wrote, in Node and in browsers; docs/exported_steps.md says how.
// It imports nothing: hand it onnxruntime-node or onnxruntime-web as `ort`.
//
//     const step = await TrainingStep.open(folder("step"), { ort });     // in a browser: url("step/")
//     const { cross_entropy_0 } = await step.train({ image: new Float32Array(…), label: new BigInt64Array(…) });
//     const files = await step.checkpoint();                             // name -> bytes; amp.load_checkpoint reads them

const FORMAT = "amp_transpiler.training_step";
const VERSION = 1;

/** What is wrong with a folder, a checkpoint or a feed. */
export class StepError extends Error {}

// Element types: that of typed arrays, and the name in safetensors files. float16 and bfloat16 are their bits.
const TYPES = {
  bool: [Uint8Array, "BOOL"], uint8: [Uint8Array, "U8"], int8: [Int8Array, "I8"], uint16: [Uint16Array, "U16"],
  int16: [Int16Array, "I16"], uint32: [Uint32Array, "U32"], int32: [Int32Array, "I32"], uint64: [BigUint64Array, "U64"],
  int64: [BigInt64Array, "I64"], float16: [Uint16Array, "F16"], bfloat16: [Uint16Array, "BF16"],
  float32: [Float32Array, "F32"], float64: [Float64Array, "F64"],
};
const BY_CODE = Object.fromEntries(Object.entries(TYPES).map(([dtype, [, code]]) => [code, dtype]));

// -- where files come from -----------------------------------------------------------------------------

/** Reads files of a folder, in Node. */
export function folder(path) {
  return async (name) => {
    const { readFile } = await import("node:fs/promises");
    return new Uint8Array(await readFile(`${path}/${name}`));
  };
}

/** Reads files below an address, in a browser. */
export function url(base) {
  const home = new URL(base, globalThis.location?.href);
  if (!home.pathname.endsWith("/")) home.pathname += "/";
  return async (name) => {
    const answer = await fetch(new URL(name, home));
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    return new Uint8Array(await answer.arrayBuffer());
  };
}

/** Reads files from memory: a Map, as `checkpoint()` gives it. */
export function files(map) {
  return async (name) => {
    if (!map.has(name)) throw new Error("it is not there");
    return map.get(name);
  };
}

async function bytesOf(read, name) {
  try {
    return await read(name);
  } catch (error) {
    throw new StepError(`${name} cannot be read: ${error.message}`);
  }
}

async function checked(read, name, said) {
  const bytes = await bytesOf(read, name);
  if ((await sha256(bytes)) !== said.sha256) {
    throw new StepError(`${name} was changed: its SHA-256 is not the one that was recorded`);
  }
  return bytes;
}

async function parsed(read, name) {
  const text = new TextDecoder().decode(await bytesOf(read, name));
  try {
    return JSON.parse(text);
  } catch {
    throw new StepError(`${name} is no JSON`);
  }
}

async function sha256(bytes) {
  if (!globalThis.crypto?.subtle) throw new StepError("SHA-256 sums cannot be checked: browsers compute them on https: and localhost alone");
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// -- safetensors -----------------------------------------------------------------------------------------

/** The tensors of a safetensors file: name -> { dtype, shape, data }. */
export function readSafetensors(bytes) {
  const start = bytes.length < 8 ? Infinity : 8 + Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  if (start > bytes.length) throw new StepError("a file of tensors is cut short");
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
  delete header.__metadata__;
  const read = ({ dtype, shape, data_offsets: [first, end] }) => {
    if (start + end > bytes.length) throw new StepError("a file of tensors is cut short");
    const [Kind] = TYPES[BY_CODE[dtype]];
    return { dtype: BY_CODE[dtype], shape, data: new Kind(bytes.slice(start + first, start + end).buffer) };
  };
  return new Map(Object.entries(header).map(([name, said]) => [name, read(said)]));
}

/** A safetensors file of such tensors. */
export function writeSafetensors(tensors, metadata = {}) {
  const header = { __metadata__: metadata };
  let end = 0;
  for (const [name, { dtype, shape, data }] of tensors) {
    header[name] = { dtype: TYPES[dtype][1], shape, data_offsets: [end, (end += data.byteLength)] };
  }
  let text = JSON.stringify(header);
  text = new TextEncoder().encode(text.padEnd(text.length + ((8 - (new TextEncoder().encode(text).length % 8)) % 8)));
  const bytes = new Uint8Array(8 + text.length + end);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(text, 8);
  let offset = 8 + text.length;
  for (const { data } of tensors.values()) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), offset);
    offset += data.byteLength;
  }
  return bytes;
}

/** bfloat16 as fp32, which has 16 more bits behind. */
function widened(data) {
  return new Float32Array(Uint32Array.from(data, (bits) => bits << 16).buffer);
}

function narrowed(data) {
  return Uint16Array.from(new Uint32Array(data.buffer, data.byteOffset, data.length), (bits) => bits >>> 16);
}

// -- the step --------------------------------------------------------------------------------------------

/**
 * An exported step with its state. `step` counts the runs of the training so far; `place` is what its models are for. What is
 * called before something else is done comes behind it.
 */
export class TrainingStep {
  #turn = Promise.resolve();

  /**
   * Open the step that `read` gives the files of. `ort`: the onnxruntime module. `options`: of its sessions. A folder has
   * a step for each of its places: that of the first of executionProviders is taken, without these the first. `place`:
   * the step for another place. `onDevice`: keep the state on the device between steps (WebGPU in browsers).
   * `checkpoint`: where to read the state from instead.
   */
  static async open(read, { ort, options = {}, place, onDevice = false, checkpoint = read }) {
    const manifest = await parsed(read, "manifest.json");
    if (manifest.format !== FORMAT || manifest.version !== VERSION) {
      const found = `${manifest.format} version ${manifest.version}`;
      throw new StepError(`manifest.json is of ${found}; this program reads ${FORMAT} version ${VERSION}`);
    }
    const first = options.executionProviders?.[0];
    const wanted = place ?? { wasm: "cpu" }[first] ?? first?.name ?? first ?? manifest.places[0].place;
    const chosen = manifest.places.find((each) => each.place === wanted);
    if (!chosen) {
      const found = manifest.places.map((each) => each.place).join(", ");
      throw new StepError(`this folder has a step for ${found}, not for ${wanted}; export one for that place too`);
    }
    if (wanted !== "cpu") options = { executionProviders: [wanted], ...options };
    const step = new TrainingStep();
    const content = new Map();
    Object.assign(step, { manifest, place: wanted, models: chosen.models });
    Object.assign(step, { ort, state: new Map(), sessions: {}, step: 0, served: new Map() });
    for (const [name, said] of Object.entries({ ...manifest.files, ...chosen.files })) {
      content.set(name, await checked(read, name, said));
    }
    for (const [name, model] of Object.entries(step.models)) {
      const more = { extra: { session: { disable_quant_qdq: "1" } } }; // what is fake-quantised trains as it is
      if (model.data) more.externalData = [{ path: model.data, data: content.get(model.data) }];
      if (onDevice) {
        const stays = Object.values(model.updates).map((tensor) => [tensor, "gpu-buffer"]);
        more.preferredOutputLocation = Object.fromEntries(stays);
      }
      step.sessions[name] = await ort.InferenceSession.create(content.get(model.file), { ...more, ...options });
    }
    const { file, data } = manifest.serving ?? {};
    for (const name of [file, data]) if (name) step.served.set(name, content.get(name));
    await step.load(checkpoint);
    return step;
  }

  /** Take the state of a checkpoint: an exported step, or what `checkpoint()` or amp.save_checkpoint wrote. */
  load(read) {
    return this.#inTurn(() => this.#load(read));
  }

  async #load(read) {
    const meta = await parsed(read, "meta.json");
    if (meta.program?.fingerprint !== this.manifest.program.fingerprint) {
      throw new StepError(`the checkpoint is one of another program, '${meta.program?.name}'`);
    }
    const held = readSafetensors(await checked(read, meta.file.name, meta.file));
    const state = new Map();
    for (const said of this.manifest.states) {
      const found = held.get(said.name);
      expectTensor(found, said, `state '${said.name}' of the checkpoint`);
      const data = said.carried === said.dtype ? found.data : widened(found.data);
      state.set(said.name, new this.ort.Tensor(said.carried, data, said.shape));
    }
    this.#replace(state);
    this.step = meta.step ?? 0;
  }

  /** One step on a batch: typed arrays, { data, shape } or tensors, by the names of feeds. Gives what train.onnx fetches, by name. */
  train(feeds) {
    return this.#inTurn(async () => {
      const { steps, counter } = this.manifest.window;
      const count = counter === null ? 1 : (await this.state.get(counter).getData())[0] + 1;
      const fetched = await this.#run(count === steps ? "train" : "accumulate", feeds);
      this.step += 1;
      return fetched;
    });
  }

  /** The loss and the outputs of a batch, in evaluation. */
  evaluate(feeds) {
    return this.run("eval", feeds);
  }

  /** The outputs of a batch. */
  infer(feeds) {
    return this.run("infer", feeds);
  }

  /** The loss scale now; null where gradients are not scaled. */
  lossScale() {
    const said = this.manifest.loss_scale;
    return this.#inTurn(async () => said && (await this.state.get(said.state).getData())[0]);
  }

  /** Run a model of the folder; the state that it updates is replaced. */
  run(name, feeds) {
    return this.#inTurn(() => this.#run(name, feeds));
  }

  /** A step begins with the state that the one before it left: do one thing after the other. */
  #inTurn(work) {
    const done = this.#turn.then(work);
    this.#turn = done.catch(() => {});
    return done;
  }

  async #run(name, feeds) {
    const { Tensor } = this.ort;
    const model = this.models[name];
    const inputs = {};
    for (const given of Object.keys(feeds)) {
      if (!model.feeds.some((feed) => feed.name === given)) {
        throw new StepError(`${model.file} has no feed '${given}'; it has ${model.feeds.map((feed) => feed.name).join(", ")}`);
      }
    }
    for (const feed of model.feeds) {
      const given = feeds[feed.name];
      const { data, dims, shape = dims } = given?.data ? given : { data: given, shape: feed.shape };
      const size = feed.shape.reduce((a, b) => a * b, 1);
      const [Kind] = TYPES[feed.dtype];
      if (!(data instanceof Kind || (feed.dtype === "float16" && isFloat16Array(data))) || data.length !== size || `${shape}` !== `${feed.shape}`) {
        const shaped = given?.data ? ` [${shape}]` : "";
        const found = data == null ? "missing" : `a ${data.constructor.name} of ${data.length}${shaped}`;
        const wanted = `a ${Kind.name} of ${size} (${feed.dtype} [${feed.shape}])`;
        throw new StepError(`feed '${feed.name}' of ${model.file} is ${found}; expected ${wanted}`);
      }
      inputs[feed.input] = new Tensor(feed.dtype, data, feed.shape);
    }
    for (const input of model.zeros) inputs[input] = new Tensor("float32", new Float32Array(1), []);
    for (const [state, input] of Object.entries(model.states)) inputs[input] = this.state.get(state);
    const made = await this.sessions[name].run(inputs);
    const updates = Object.entries(model.updates).map(([state, output]) => [state, made[output]]);
    this.#replace(new Map([...this.state, ...updates]));
    return Object.fromEntries(model.fetches.map((fetch) => [fetch.name, made[fetch.output].data]));
  }

  /** A checkpoint of the state: file name -> bytes, which amp.load_checkpoint reads from a folder. */
  checkpoint(runner = "amp_step.mjs") {
    return this.#inTurn(() => this.#checkpoint(runner));
  }

  async #checkpoint(runner) {
    const tensors = new Map();
    for (const { name, dtype, carried, shape } of this.manifest.states) {
      const data = await this.state.get(name).getData();
      tensors.set(name, { dtype, shape, data: dtype === carried ? data : narrowed(data) });
    }
    const { metadata, meta } = this.manifest.checkpoint;
    const bytes = writeSafetensors(tensors, metadata);
    const known = { step: this.step, bytes: bytes.length, sha256: await sha256(bytes), runner };
    const text = meta.replace(/\$\{(\w+)\}/g, (mark, name) => known[name] ?? mark);
    const checksum = await sha256(new TextEncoder().encode(text));
    const said = `${text.slice(0, -1)},"checksum":"${checksum}"}`;
    return new Map([["state.safetensors", bytes], ["meta.json", new TextEncoder().encode(said)]]);
  }

  /** The model with the weights of the state now: file name -> bytes. One ONNX file, unless it takes more than 2 GB. */
  model() {
    return this.#inTurn(() => this.#model());
  }

  async #model() {
    if (!this.manifest.serving) throw new StepError("this step has no model to serve without amp_transpiler");
    const made = new Map([...this.served].map(([name, bytes]) => [name, bytes.slice()]));
    const kinds = new Map(this.manifest.states.map((one) => [one.name, one]));
    for (const { state, file, offset } of this.manifest.serving.weights) {
      const { dtype, carried } = kinds.get(state);
      const found = await this.state.get(state).getData();
      const data = dtype === carried ? found : narrowed(found);
      made.get(file).set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), offset);
    }
    return made;
  }

  /** Write a checkpoint, or `model()`, as a new folder, in Node; it appears whole. */
  async save(path, made) {
    const { mkdir, rename, rm, writeFile } = await import("node:fs/promises");
    made ??= await this.checkpoint();
    await mkdir(`${path}.part`, { recursive: true }); // one may be left by a run that was killed
    try {
      for (const [name, bytes] of made) await writeFile(`${path}.part/${name}`, bytes);
      await rename(`${path}.part`, path);
    } catch (error) {
      await rm(`${path}.part`, { recursive: true });
      throw error;
    }
  }

  /** Let sessions and state go. */
  close() {
    return this.#inTurn(async () => {
      this.#replace(new Map());
      for (const session of Object.values(this.sessions)) await session.release();
    });
  }

  #replace(state) {
    const kept = new Set(state.values());
    for (const tensor of this.state.values()) if (tensor.location === "gpu-buffer" && !kept.has(tensor)) tensor.dispose();
    this.state = state;
  }
}

/** Newer engines have this array; others take the bits. */
function isFloat16Array(data) {
  return typeof Float16Array !== "undefined" && data instanceof Float16Array;
}

function expectTensor(found, said, what) {
  const wanted = `${said.dtype} [${said.shape}]`;
  const kind = found ? `${found.dtype} [${found.shape}]` : "missing";
  if (kind !== wanted) throw new StepError(`${what} is ${kind}; expected ${wanted}`);
}
