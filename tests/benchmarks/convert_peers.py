"""Convert models beside onnxruntime's converter, onnxsim and onnxconverter-common, each in a process of its own.

    convert_peers.py --peers-python PYTHON [--models FILE...] [--nodes 1000 5000 ...] [--repeat 3]

PYTHON has onnxruntime, onnxconverter-common and onnxsim installed, in an environment of their own. A run reads the file,
converts to float16 with float32 inputs and outputs (onnxruntime's without shape inference), and writes the file; the runs
alternate, and medians of their processor time, which other work on the machine changes least, are printed with ratios to
ours. What a process loads once, packages and onnx's table of operators, is loaded before the clock starts. Casts and
16-bit operators are counted in what each wrote; ``x`` is a run that failed or took longer than --limit seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.helpers.where import ROOT

OURS = """
import sys, time, onnx
from amp_transpiler import convert
onnx.defs.has("Add")
start = time.process_time()
convert(sys.argv[1]).to_onnx(sys.argv[2])
print(time.process_time() - start)
"""
ONNXRUNTIME = """
import sys, time, onnx
from onnxruntime.transformers.float16 import convert_float_to_float16
onnx.defs.has("Add")
start = time.process_time()
model = convert_float_to_float16(onnx.load(sys.argv[1]), keep_io_types=True, disable_shape_infer=True)
onnx.save(model, sys.argv[2])
print(time.process_time() - start)
"""
COMMON = ONNXRUNTIME.replace("onnxruntime.transformers.float16", "onnxconverter_common.float16")
ONNXSIM = """
import sys, time, onnx, onnxsim
onnx.defs.has("Add")
start = time.process_time()
onnx.save(onnxsim.quantize_fp16(onnx.load(sys.argv[1])), sys.argv[2])
print(time.process_time() - start)
"""
CONVERTERS = {"ours": OURS, "onnxruntime": ONNXRUNTIME, "onnxsim": ONNXSIM, "common": COMMON}


def chain(nodes: int, width: int = 8) -> onnx.ModelProto:
    """A chain of transformer-like blocks, 25 operators each, with at least this many operators."""
    made: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 10, name))
        return name

    def op(type_: str, *inputs: str, **attributes: object) -> str:
        name = f"{type_}_{len(made)}"
        made.append(helper.make_node(type_, inputs, [name], name=f"node_{name}", **attributes))
        return name

    x, block = "x", 0
    while len(made) < nodes:
        p, block = f"b{block}.", block + 1
        centred = op("Sub", x, op("ReduceMean", x, axes=[-1]))
        deviation = op("Sqrt", op("Add", op("ReduceMean", op("Mul", centred, centred), axes=[-1]), weight(p + "eps")))
        y = op("Add", op("Mul", op("Div", centred, deviation), weight(p + "g", width)), weight(p + "b", width))
        q, k, v = (op("MatMul", y, weight(p + name, width, width)) for name in ("q", "k", "v"))
        scores = op("Mul", op("MatMul", q, op("Transpose", k, perm=[0, 2, 1])), weight(p + "scale"))
        x = op("Add", op("MatMul", op("MatMul", op("Softmax", scores, axis=-1), v), weight(p + "o", width, width)), x)
        hidden = op("Relu", op("MatMul", x, weight(p + "w1", width, 4 * width)))
        x = op("Tanh", op("Add", op("Max", op("MatMul", hidden, weight(p + "w2", 4 * width, width)), x), x))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4, width]) for name in ("x", x)]
    graph = helper.make_graph(made, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def convert(python: str, code: str, source: str, target: str, limit: float) -> float | None:
    """Seconds of one conversion; None where it failed."""
    here = {**os.environ, "PYTHONPATH": str(ROOT) if code is OURS else "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [python, "-c", code, source, target], env=here, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return None
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def counts(path: str) -> str:
    """Casts and 16-bit operators of a model file, nested graphs included."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    casts = halves = 0
    kinds = {i.name: i.type.tensor_type.elem_type for i in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        casts += node.op_type == "Cast"
        halves += node.op_type != "Cast" and any(kinds.get(name) == TensorProto.FLOAT16 for name in node.output)
    return f"{casts} casts, {halves} in fp16"


def compare(name: str, source: str, pythons: dict[str, str], repeat: int, limit: float, folder: str) -> None:
    """Print one line a converter."""
    times: dict[str, list[float]] = {key: [] for key in CONVERTERS}
    failed: set[str] = set()
    for _ in range(repeat):
        for key, code in CONVERTERS.items():
            if key not in failed:
                seconds = convert(pythons[key], code, source, f"{folder}/{key}.onnx", limit)
                failed.update({key} if seconds is None else ())
                times[key] += [] if seconds is None else [seconds]
    ours = statistics.median(times["ours"]) if times["ours"] else float("nan")
    for key, seconds in times.items():
        if key in failed or not seconds:
            print(f"{name:<24} {key:<12}        x", flush=True)
            continue
        middle = statistics.median(seconds)
        try:
            found = counts(f"{folder}/{key}.onnx")
        except Exception as error:  # the model that a peer wrote need not even be typed
            found = f"onnx cannot type what it wrote: {str(error).strip().splitlines()[0][:60]}"
        print(f"{name:<24} {key:<12} {middle:>7.2f} s  {middle / ours:>6.2f} x ours  {found}", flush=True)


def main() -> None:
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers-python", required=True, help="Python with onnxruntime, onnxconverter-common and onnxsim"
    )
    parser.add_argument("--models", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--nodes", nargs="*", type=int, default=[1000, 5000, 20000, 50000], metavar="N")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=float, default=100.0, metavar="SECONDS")
    options = parser.parse_args()
    pythons = dict.fromkeys(CONVERTERS, options.peers_python) | {"ours": sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            compare(Path(model).stem, model, pythons, options.repeat, options.limit, folder)
        for nodes in options.nodes:
            path = f"{folder}/chain.onnx"
            onnx.save(chain(nodes), path)
            compare(f"chain of {nodes}", path, pythons, options.repeat if nodes < 20000 else 1, options.limit, folder)


if __name__ == "__main__":
    main()
