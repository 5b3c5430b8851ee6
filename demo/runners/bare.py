"""python bare.py FOLDER BATCHES STEPS TO [FROM [PLACE]]: trains with an exported step, without amp_transpiler."""

import hashlib
import json
import re
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  numpy's bfloat16
import numpy as np
from onnxruntime import InferenceSession, SessionOptions
from safetensors.numpy import load_file, save


def expect(found, wanted, what):
    found == wanted or sys.exit(f"error: {what} is {found}; expected {wanted}")


def read(path, how=lambda path: json.loads(path.read_bytes())):
    try:
        return how(path)
    except Exception as error:
        sys.exit(f"error: '{path}' cannot be read: {error}")


def fitting(array, one, what):
    kind = "missing" if array is None else f"{array.dtype.name} {list(array.shape)}"
    expect(kind, f"{one['dtype']} {one['shape']}", f"{what} '{one['name']}'")
    return array


def run(name, feeds):
    model, zero = at["models"][name], np.zeros((), np.float32)
    inputs = {one["input"]: fitting(feeds.get(one["name"]), one, "feed") for one in model["feeds"]}
    inputs |= {tensor: state[name] for name, tensor in model["states"].items()} | dict.fromkeys(model["zeros"], zero)
    tensors = [*(one["output"] for one in model["fetches"]), *model["updates"].values()]
    made = dict(zip(tensors, sessions[name].run(tensors, inputs), strict=True))
    state.update((name, made[tensor]) for name, tensor in model["updates"].items())
    return {one["name"]: made[one["output"]] for one in model["fetches"]}


sys.excepthook = lambda kind, error, trace: print(f"error: {kind.__name__}: {error}", file=sys.stderr)
given = sys.argv[1:] if len(sys.argv) > 4 else sys.exit(__doc__)
folder, batches, _, to, start = map(Path, (given + given[:1])[:5])
re.fullmatch("[0-9]+", given[2]) or sys.exit(f"error: STEPS is '{given[2]}'; expected a whole number")
expect(to.exists(), False, f"whether there is a '{to}' already")
to.parent.is_dir() or sys.exit(f"error: there is no folder '{to.parent}'")
said, meta = read(folder / "manifest.json"), read(start / "meta.json")
expect((said["format"], said["version"]), ("amp_transpiler.training_step", 1), f"what '{folder}' holds")
expect(meta["program"], said["program"], f"the program of checkpoint '{start}'")
place, file = (given[5:] or [said["places"][0]["place"]])[0], start / meta["file"]["name"]
at = next((one for one in said["places"] if one["place"] == place), None)
expect(at is not None, True, f"whether '{folder}' has a step for {place}")
for path, one in ({folder / n: s for n, s in (said["files"] | at["files"]).items()} | {file: meta["file"]}).items():
    expect(hashlib.sha256(path.read_bytes()).hexdigest(), one["sha256"], f"the SHA-256 of '{path}'")
options = SessionOptions()
options.add_session_config_entry("session.disable_quant_qdq", "1")  # what is fake-quantised trains as it is
files = {name: folder / model["file"] for name, model in at["models"].items()}
sessions = {n: InferenceSession(path, options, providers=[at["provider"]]) for n, path in files.items()}
expect({session.get_providers()[0] for session in sessions.values()}, {at["provider"]}, f"what runs a step for {place}")
held, data = read(file, load_file), read(batches, load_file)
kinds, window, done = said["states"], said["window"], meta["step"] or 0
state = {one["name"]: fitting(held.get(one["name"]), one, "state").astype(one["carried"]) for one in kinds}
lengths = {array.shape[:1] for array in data.values()}
expect(len(lengths) < 2, True, f"whether feeds in '{batches}' are of one length")
expect(lengths.isdisjoint({(), (0,)}), True, f"whether there are batches in '{batches}'")
for step in range(done, end := done + int(given[2])):
    feeds = {name: array[step % len(array)] for name, array in data.items()}
    found = run("train" if state.get(window["counter"], 0) + 1 == window["steps"] else "accumulate", feeds)
    print(f"step {step + 1}", *(f"{name} {value.item():.9g}" for name, value in found.items()), flush=True)
content = save({one["name"]: state[one["name"]].astype(one["dtype"]) for one in kinds}, said["checkpoint"]["metadata"])
known = {"step": end, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "runner": "bare.py"}
text = re.sub(r"\$\{(\w+)\}", lambda mark: str(known.get(mark[1], mark[0])), said["checkpoint"]["meta"])
part = Path(f"{to}.part")  # until it is whole
part.mkdir(exist_ok=True)
(part / "state.safetensors").write_bytes(content)
(part / "meta.json").write_text(f'{text[:-1]},"checksum":"{hashlib.sha256(text.encode()).hexdigest()}"}}')
part.rename(to)
