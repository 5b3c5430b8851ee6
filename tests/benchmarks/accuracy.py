"""Gradients in pure 16 bit beside torch's own: both against float64, on the same weights, feeds and loss scale.

    python -m tests.benchmarks.accuracy --torch-python PATH --exports FOLDER     # FOLDER: of tests.tools.export_models
    python -m tests.benchmarks.accuracy --torch-python PATH --models demo_mnist --types bfloat16

Weights and feeds are rounded to the 16-bit type first, so that what is compared is arithmetic alone. The truth is torch's
autograd in float64; torch's 16-bit side is that autograd with every weight and activation in the type (``model.half()``), its
loss in fp32. Ours is ``decorate(use_pure_fp16=True)`` with everything in 16 bit, run by the CPU lowering, which rounds
wherever a GPU stores; ``--walk`` runs the lowering for CUDA instead, node by node (float16 alone: no bfloat16 on CPU).

Of a parameter: ``l2``, the relative L2 distance from the truth, and ``median``, the median over its elements whose true
gradient is not 0 of the relative distance; parameters of less than 1,000 elements are taken together. A line gives, of
ours and of torch's: the median over all elements of all parameters, the ratio of the two; the median and the largest ratio of
the parameters' medians, and likewise of their l2; and the share of elements that are 0 in ours and not in torch's. The rule:
no ratio of medians above 2.

torch's CPU kernels of 16-bit products, convolutions, sums and norms add up in fp32 and round once (2.13 on AVX-512: 0 to
0.5 % of their results differ from the exact ones rounded), its elementwise kernels compute in fp32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.benchmarks import demo_nets
from tests.helpers.node_by_node import node_by_node
from tests.helpers.ports import fed

Arrays = Mapping[str, np.ndarray]

#: Of the exports; the demos' nets are "demo_..." (demo_nets.py).
EXPORTS = (
    "bert_l2_dyn",
    "resnet50_leg",
    "vit_small_dyn",
    "lstm_leg",
    "gpt2_dyn",
    "gru_leg",
    "mobilenetv3_dyn",
    "efficientnet_b0_leg",
    "llama_l3_leg",
    "whisper_tiny_enc_dyn",
)
LIMIT = 2.0
#: Elements of a parameter that is judged alone: a median of fewer is chance.
LEAST = 1000


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Floats to the nearest finite values of a 16-bit type, as float32; other arrays as they are."""
    if array.dtype.kind != "f":
        return array
    largest = float(ml_dtypes.finfo(dtype).max)  # a mask's fill value may be beyond
    return np.clip(array, -largest, largest).astype(np.dtype(dtype)).astype(np.float32)


def prepared(model: onnx.ModelProto, feeds: Arrays, dtype: str, seed: int, folder: Path) -> None:
    """Write model.onnx and feeds.npz, rounded, with a target for the first output where that is no loss."""
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = rounded(onnx.numpy_helper.to_array(tensor), dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, folder / "model.onnx")
    feeds = {name: rounded(array, dtype) for name, array in feeds.items()}
    program, scope, executor = amp.Program.from_onnx(model), amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    first = program.outputs[0]
    if first.shape != ():
        (out,) = executor.run(program, feed=dict(feeds), fetch_list=[first], scope=scope)
        size = np.sqrt(
            np.mean(np.square(out))
        )  # not the deviation: a small difference of large numbers is lost at once
        target = np.random.default_rng(seed).normal(size=out.shape) * size
        feeds["target"] = rounded(target.astype(np.float32), dtype)
    np.savez(folder / "feeds.npz", **feeds)


def torchs(python: str, folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """torch's gradients, unscaled in float64, and "loss" and "scale"."""
    worker, out = Path(__file__).with_name("torch_graph.py"), folder / f"{dtype}.npz"
    subprocess.run(
        [python, str(worker), "gradients", str(folder / "model.onnx"), str(folder / "feeds.npz"), str(out), dtype],
        check=True,
    )
    found = dict(np.load(out))
    out.unlink()
    return found


def ours(folder: Path, dtype: str, scale: float, walk: bool, fp32: list[str]) -> dict[str, np.ndarray]:
    """Our scaled gradients by name; operators of the types ``fp32`` stay in fp32."""
    feeds = dict(np.load(folder / "feeds.npz"))
    program = amp.Program.from_onnx(str(folder / "model.onnx"))
    loss = program.outputs[0]
    lists = amp.AutoMixedPrecisionLists(custom_black_list=fp32 or None, dtype=dtype)
    optimizer = amp.decorate(
        amp.optimizer.SGD(1.0, multi_precision=True),
        lists,
        init_loss_scaling=scale,
        use_dynamic_loss_scaling=False,
        use_pure_fp16=True,
        use_fp16_guard=False,
        dtype=dtype,
    )
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        if "target" in feeds:
            loss = F.mse_loss(loss, amp.data("target", loss.shape, "float32"))
        pairs = optimizer.backward(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    wanted = [grad for _, grad in pairs]
    if walk:
        lowered = lower(program, "cuda", {name: feeds[name].shape for name in feeds}, wanted)
        values = fed(lowered.states, lambda name: np.asarray(scope.find_var(name)))
        values |= {port.tensor: feeds[port.variable] for port in lowered.feeds}
        values |= {name: np.zeros((), np.float32) for name in lowered.scalars}
        known = node_by_node(lowered.model, values)
        found = [known[port.tensor] for port in lowered.fetches]
    else:
        found = executor.run(program, feed=feeds, fetch_list=wanted, scope=scope)
    return {f"d:{p.name}": np.asarray(g).astype(np.float32) for (p, _), g in zip(pairs, found, strict=True)}


@dataclass
class Parameter:
    """The distances of ours and of torch's gradients from the truth: of elements, and L2; over all seeds."""

    elements: tuple[list[np.ndarray], list[np.ndarray]] = field(default_factory=lambda: ([], []))
    l2: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    vanished: int = 0
    count: int = 0

    def add(self, mine: np.ndarray, theirs: np.ndarray, truth: np.ndarray) -> None:
        """Those of one seed."""
        some, size = truth != 0, np.linalg.norm(truth)
        for i, side in enumerate((mine, theirs)):
            self.elements[i].append(np.abs(side[some] - truth[some]) / np.abs(truth[some]))
            self.l2[i].append(float(np.linalg.norm(side - truth) / size))
        self.vanished += int(((mine == 0) & (theirs != 0)).sum())
        self.count += mine.size

    def medians(self) -> list[float]:
        """Of ours and of torch's elements."""
        return [float(np.median(np.concatenate(side))) for side in self.elements]

    def distances(self) -> list[float]:
        """Of ours and of torch's, the mean L2 over seeds."""
        return [float(np.mean(side)) for side in self.l2]


def gathered(parameters: dict[str, Parameter], mine: Arrays, theirs: Arrays, truth: Arrays, scale: float) -> None:
    """Add one seed's gradients; those whose truth is 0 (the bias of keys, one below a batch norm) are noise alone."""
    sizes = {name: float(np.linalg.norm(truth[name])) / truth[name].size ** 0.5 for name in mine}
    for name, array in mine.items():
        if sizes[name] > 1e-9 * max(sizes.values()):
            group = name if array.size >= LEAST else "small ones"
            parameters.setdefault(group, Parameter()).add(array, theirs[name], truth[name] * scale)


def row(parameters: dict[str, Parameter], verbose: bool) -> tuple[str, float]:
    """A row of the table, and the largest ratio of medians."""
    rows = []
    for name, each in parameters.items():
        (a, b), (c, d) = each.medians(), each.distances()
        rows.append((a / b, c / d, f"median {a:.2e} {b:.2e}  l2 {c:.2e} {d:.2e}  {each.count:9d} {name}"))
    rows.sort(reverse=True)
    for ratio, l2, text in rows if verbose else rows[:3]:
        print(f"    {ratio:5.2f} {l2:5.2f}  {text}", flush=True)
    mine, theirs = (
        float(np.median(np.concatenate([part for each in parameters.values() for part in each.elements[i]])))
        for i in (0, 1)
    )
    ratios, l2s = [r[0] for r in rows], [r[1] for r in rows]
    vanished = sum(each.vanished for each in parameters.values()) / sum(each.count for each in parameters.values())
    text = (
        f"{len(rows)} | {mine:.2e} | {theirs:.2e} | {mine / theirs:.2f} | {np.median(ratios):.2f}, {max(ratios):.2f} | "
    )
    return text + f"{np.median(l2s):.2f}, {max(l2s):.2f} | {vanished:.1e}", max(mine / theirs, *ratios)


def main() -> int:
    """Print a table; the exit code is 1 where a ratio is beyond the limit, or a gradient not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True, help="a python with torch and onnx")
    parser.add_argument("--exports", type=Path, help="folder of exported models")
    parser.add_argument("--models", nargs="+", help="default: every export there, and the demos' nets")
    parser.add_argument("--types", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--seeds", type=int, default=1, help="targets (exports), or weights and batches (demos)")
    parser.add_argument("--walk", action="store_true", help="run the lowering for CUDA node by node")
    parser.add_argument("--fp32", nargs="+", default=[], metavar="TYPE", help="operators to keep in fp32")
    parser.add_argument("--verbose", action="store_true", help="every parameter")
    options = parser.parse_args()
    names = options.models or [*(EXPORTS if options.exports else ()), *demo_nets.NETS]
    lines, failed = [], False
    for name in names:
        for dtype in options.types:
            parameters: dict[str, Parameter] = {}
            for seed in range(options.seeds):
                with tempfile.TemporaryDirectory() as folder_name:
                    folder = Path(folder_name)
                    if name in demo_nets.NETS:
                        model, feeds = demo_nets.NETS[name](seed)
                    else:
                        model = onnx.load(options.exports / f"{name}.onnx")
                        feeds = dict(np.load(options.exports / f"{name}.npz"))
                    prepared(model, feeds, dtype, seed, folder)
                    truth, theirs = (torchs(options.torch_python, folder, each) for each in ("float64", dtype))
                    mine = ours(folder, dtype, float(theirs["scale"]), options.walk, options.fp32)
                bad = [n for n, array in mine.items() if not np.isfinite(array).all()]
                if bad:
                    failed = True
                    print(f"{name}, {dtype}, seed {seed}: not finite: {', '.join(bad)}", flush=True)
                gathered(parameters, mine, theirs, truth, float(theirs["scale"]))
            text, worst = row(parameters, options.verbose)
            lines.append(f"| {name} | {dtype} | {theirs['scale']:g} | {text} |")
            print(lines[-1], flush=True)
            failed |= not worst <= LIMIT
    print(
        "| net | type | scale | gradients | ours | torch's | ratio | of medians | of l2 | vanished |", *lines, sep="\n"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
