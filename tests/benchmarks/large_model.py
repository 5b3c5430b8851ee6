"""Convert a model beyond 2 GB and measure the peak memory: large_model.py [--layers 9] [--width 8352] [--folder FOLDER].

The model is a chain of matrix products whose float32 weights lie in an external data file. The conversion runs in a
process of its own; its peak is to stay below the largest tensor times 1.2, plus 500 MB.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper


def build(folder: Path, layers: int, width: int) -> Path:
    """Write the model, a chunk of weights at a time; its path."""
    rng = np.random.default_rng(0)
    size = 4 * width * width
    nodes, weights = [], []
    with (folder / "weights.bin").open("wb") as stream:
        for layer in range(layers):
            tensor = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[width, width])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "weights.bin"), ("offset", str(layer * size)), ("length", str(size))):
                tensor.external_data.add(key=key, value=value)
            weights.append(tensor)
            for start in range(0, width, 256):
                rows = min(256, width - start)
                stream.write((rng.standard_normal((rows, width), np.float32) / np.float32(width**0.5)).tobytes())
            nodes.append(helper.make_node("MatMul", [f"t{layer}" if layer else "x", f"w{layer}"], [f"t{layer + 1}"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name in ("x", f"t{layers}")]
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def child(source: str, target: str) -> None:
    """Convert, and print the seconds and the peak memory in MB."""
    import amp_transpiler as amp

    start = time.perf_counter()
    amp.convert(source).to_onnx(target)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{time.perf_counter() - start:.1f} {peak:.0f}")


def main() -> int:
    """Build, convert, print the verdict; 1 where memory went beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--width", type=int, default=8352, help="a weight takes 4 x width x width bytes")
    parser.add_argument("--folder", default=None, help="where to put the files (default: a temporary folder)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        source = build(folder, options.layers, options.width)
        command = [sys.executable, __file__, "--child", str(source), str(folder / "half.onnx")]
        here = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=here)
        seconds, peak = map(float, done.stdout.split())
        written = sum(path.stat().st_size for path in folder.glob("half.onnx*"))
    tensor = 4 * options.width**2 / 1e6
    limit = 1.2 * tensor * 1e6 / 2**20 + 500
    print(
        f"{options.layers} weights of {tensor:.0f} MB, {options.layers * tensor / 1e3:.2f} GB: {seconds:.1f} s, "
        f"{written / 1e9:.2f} GB written, peak {peak:.0f} MiB, limit {limit:.0f} MiB"
    )
    return int(peak > limit)


if __name__ == "__main__":
    sys.exit(main())
