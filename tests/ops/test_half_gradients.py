"""Gradients of whole small nets in 16 bit lose at most twice what torch's own autograd in that type loses."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.program import Program
from tests.corpora.half_nets import BRAIN, NETS, ROWS, WIDTH, arrays_of
from tests.helpers.node_by_node import node_by_node
from tests.helpers.where import RECORDED

DATA = RECORDED / "half_nets_torch.npz"


def program_of(name: str, dtype: str) -> tuple[Program, list[str]]:
    """The net with the loss sum(y * cotangent), its gradients appended; the names of what has a gradient."""
    shapes, body, _ = NETS[name]
    leaves = ["x", *(f"w{i}" for i in range(len(shapes)))]
    dims = [f"{ROWS}, {WIDTH}", *(", ".join(map(str, shape)) for shape in shapes)]
    inputs = ", ".join(f"{dtype}[{d}] {leaf}" for leaf, d in zip([*leaves, "g"], [*dims, dims[0]], strict=True))
    text = f'<ir_version: 10, opset_import: ["" : 21]> net ({inputs}) => ({dtype} loss) {{\n{body}\n'
    text += "weighed = Mul(y, g)\nloss = ReduceSum <keepdims = 0> (weighed)\n}"
    program = Program.from_onnx(onnx.parser.parse_model(text.replace("to = 10", f"to = {ONNX_TYPES[dtype]}")))
    for leaf in leaves:
        program.var(leaf).stop_gradient = False
    amp.append_backward(program.var("loss"), parameter_list=leaves)
    return program, leaves


def gradients(name: str, dtype: str, place: str) -> list[np.ndarray]:
    """By the lowering for a place; that for CUDA is walked node by node, so that each node rounds what it stores."""
    program, leaves = program_of(name, dtype)
    arrays = [a.astype(np.dtype(dtype)) for a in arrays_of(name)]
    feeds = dict(zip(["x", "g", *leaves[1:]], arrays, strict=True))
    wanted = [program.var(f"{leaf}@GRAD") for leaf in leaves]
    if place == "cpu":
        found: list[np.ndarray] = amp.Executor(threads=1).run(program, feed=feeds, fetch_list=wanted)
        return found
    lowered = lower(program, place, {n: a.shape for n, a in feeds.items()}, wanted)
    known = node_by_node(lowered.model, feeds | {s: np.zeros((), np.float32) for s in lowered.scalars})
    return [known[port.tensor] for port in lowered.fetches]


def median_loss(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """The median relative distance of all elements of all gradients."""
    ratios = [np.abs(a.astype(np.float64) - t) / np.abs(t) for a, t in zip(found, truth, strict=True)]
    return float(np.median(np.concatenate([r.ravel() for r in ratios])))


CASES = [(name, "float16", place) for place in ("cpu", "cuda") for name in NETS]
CASES += [(name, "bfloat16", "cpu") for name in BRAIN]  # a node alone has no bfloat16 arithmetic there


@pytest.mark.parametrize(("name", "dtype", "place"), CASES)
def test_no_worse_than_twice_torch(name: str, dtype: str, place: str) -> None:
    recorded = np.load(DATA)
    count = len(NETS[name][0]) + 1
    truth, theirs = ([recorded[f"{name}/{key} {i}"] for i in range(count)] for key in (f"{dtype} true", dtype))
    ours, limit = median_loss(gradients(name, dtype, place), truth), 2 * median_loss(theirs, truth)
    assert ours <= limit


@pytest.mark.parametrize("axes", ["1", "2, 1"])
@pytest.mark.parametrize(("dtype", "ulp"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_slopes_of_log_sum_exp_add_up_to_one(dtype: str, ulp: float, axes: str) -> None:
    """To what the roundings of few large ones leave: exp(x - y) would be off by as much as y was rounded, times y."""
    shape = "4,50" if axes == "1" else "4,5,10"
    made = Program.from_onnx(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        net ({dtype}[{shape}] x) => ({dtype} s) <int64[{axes.count(",") + 1}] last = {{{axes}}}>
        {{ y = ReduceLogSumExp <keepdims = 0> (x, last)  s = ReduceSum <keepdims = 0> (y) }}""")
    )
    made.var("x").stop_gradient = False
    ((_, slope),) = amp.append_backward(made.var("s"), parameter_list=["x"])
    x = (np.random.default_rng(0).normal(size=(4, 50)) * 12 + 100).astype(np.dtype(dtype))
    x = x.reshape([int(size) for size in shape.split(",")])
    (found,) = amp.Executor(threads=1).run(made, feed={"x": x}, fetch_list=[slope])
    np.testing.assert_allclose(found.astype(np.float64).reshape(4, -1).sum(-1), 1, atol=ulp)


@pytest.mark.parametrize(("dtype", "ulp"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
@pytest.mark.parametrize("axis", [0, 1])
def test_slopes_of_log_softmax_are_probabilities(dtype: str, ulp: float, axis: int) -> None:
    """Of which each is rounded by itself: exp(y) would be off by as much as y was rounded, which is about -6 here."""
    made = Program.from_onnx(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        net ({dtype}[400,400] x, {dtype}[400,400] g) => ({dtype} s)
        {{ y = LogSoftmax <axis = {axis}> (x)  w = Mul(y, g)  s = ReduceSum <keepdims = 0> (w) }}""")
    )
    made.var("x").stop_gradient = False
    ((_, slope),) = amp.append_backward(made.var("s"), parameter_list=["x"])
    x = np.random.default_rng(0).uniform(-1, 1, size=(400, 400)).astype(np.dtype(dtype))
    feed = {"x": x, "g": np.eye(400).astype(np.dtype(dtype))}
    (found,) = amp.Executor(threads=1).run(made, feed=feed, fetch_list=[slope])
    power = np.exp(x.astype(np.float64))
    others = ~np.eye(400, dtype=bool)
    wanted = (power / power.sum(axis, keepdims=True))[others]
    assert np.median(np.abs(-found.astype(np.float64)[others] - wanted) / wanted) < ulp / 2
