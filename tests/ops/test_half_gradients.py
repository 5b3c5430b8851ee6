"""Gradients of whole small nets in float16 lose at most twice what torch's own float16 autograd loses."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.program import Program
from tests.corpora.half_nets import NETS, ROWS, WIDTH, arrays_of
from tests.helpers.node_by_node import node_by_node
from tests.helpers.sessions import run
from tests.helpers.where import RECORDED

DATA = RECORDED / "half_nets_torch.npz"


def program_of(name: str) -> tuple[Program, list[str]]:
    """The net with the loss sum(y * cotangent), its gradients appended; the names of what has a gradient."""
    shapes, body, _ = NETS[name]
    leaves = ["x", *(f"w{i}" for i in range(len(shapes)))]
    dims = [f"{ROWS}, {WIDTH}", *(", ".join(map(str, shape)) for shape in shapes)]
    inputs = ", ".join(f"float16[{d}] {leaf}" for leaf, d in zip([*leaves, "g"], [*dims, dims[0]], strict=True))
    text = f'<ir_version: 10, opset_import: ["" : 21]> net ({inputs}) => (float16 loss) {{\n{body}\n'
    text += "weighed = Mul(y, g)\nloss = ReduceSum <keepdims = 0> (weighed)\n}"
    program = Program.from_onnx(onnx.parser.parse_model(text))
    for leaf in leaves:
        program.var(leaf).stop_gradient = False
    amp.append_backward(program.var("loss"), parameter_list=leaves)
    return program, leaves


@functools.cache
def gradients(name: str, place: str) -> list[np.ndarray]:
    """By the lowering for a place; that for CUDA is walked node by node, so that each node rounds what it stores."""
    program, leaves = program_of(name)
    arrays = arrays_of(name)
    feeds = dict(zip(["x", "g", *leaves[1:]], arrays, strict=True))
    wanted = [program.var(f"{leaf}@GRAD") for leaf in leaves]
    lowered = lower(program, place, {n: a.shape for n, a in feeds.items()}, wanted)
    values = feeds | {s: np.zeros((), np.float32) for s in lowered.scalars}
    if place == "cuda":
        known = node_by_node(lowered.model, values)
        return [known[port.tensor] for port in lowered.fetches]
    return run(lowered.model, {i.name: values[i.name] for i in lowered.model.graph.input})


def median_loss(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """The median relative distance of all elements of all gradients."""
    ratios = [np.abs(a.astype(np.float64) - t) / np.abs(t) for a, t in zip(found, truth, strict=True)]
    return float(np.median(np.concatenate([r.ravel() for r in ratios])))


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NETS)
def test_no_worse_than_twice_torch(name: str, place: str) -> None:
    recorded = np.load(DATA)
    count = len(NETS[name][0]) + 1
    truth, half = ([recorded[f"{name}/{key}{i}"] for i in range(count)] for key in ("true", "half"))
    ours, theirs = median_loss(gradients(name, place), truth), median_loss(half, truth)
    print(f"RATIO {name:14s} {place} {ours:.2e} {theirs:.2e} {ours / theirs:.2f}")
    assert ours <= 2 * theirs
