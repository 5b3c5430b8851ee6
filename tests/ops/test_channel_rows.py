"""What lies in rows, one for each channel, on GPU places: the same numbers, and hardly any copies."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops import conv
from amp_transpiler.ops.window import Window
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.program import Program
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.rules import as_model, tensor_info
from tests.helpers.sessions import run

RNG = np.random.default_rng(3)
#: Everything that stays in rows once a batch normalisation has made them, and what does not.
BODY = """
    c0 = Conv <pads = [1, 1, 1, 1]> (x, w0)
    n0, m0, v0 = BatchNormalization <training_mode = 1> (c0, s0, b0, zero, one)
    a0 = Relu(n0)
    p0 = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (a0)
    c1 = Conv(p0, w1)
    n1, m1, v1 = BatchNormalization <training_mode = 1> (c1, s0, b0, zero, one)
    mean = GlobalAveragePool(n1)
    gate = Sigmoid(mean)
    gated = Mul(n1, gate)
    sum = Add(gated, p0)
    wide = PRelu(sum, slope)
    low = Constant <value_float = -0.7> ()
    cut = Clip(wide, low)
    c2 = Conv <strides = [2, 2]> (cut, w2)
    n2, m2, v2 = BatchNormalization <training_mode = 1> (c2, s0, b0, zero, one)
    h = HardSwish(n2)
    all = Sum(h, n2, c2)
    both = Concat <axis = 1> (all, n2)
    y = Conv(both, w3, b3)
    back = AveragePool <kernel_shape = [2, 2]> (y)
    weighed = Mul(back, g)
    loss = ReduceSum <keepdims = 0> (weighed)
"""
SHAPES: dict[str, tuple[int, ...]] = {
    "w0": (8, 6, 3, 3),
    "s0": (8,),
    "b0": (8,),
    "zero": (8,),
    "one": (8,),
    "w1": (8, 8, 1, 1),
    "b3": (5,),
    "slope": (8, 1, 1),
    "w2": (8, 8, 1, 1),
    "w3": (5, 16, 1, 1),
}
LEAVES = ["x", "w0", "s0", "b0", "w1", "slope", "w2", "w3", "b3"]


def _program(size: int, dtype: str) -> tuple[Program, dict[str, tuple[int, ...]]]:
    """The net with gradients of all that it reads, for images of this size."""
    after = (size // 2 - 1) // 2 if size % 4 == 0 else (size // 2) // 2
    shapes = {"x": (3, 6, size, size), "g": (3, 5, after, after), **SHAPES}
    inputs = ", ".join(f"{dtype}[{', '.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = f'<ir_version: 10, opset_import: ["" : 21]> net ({inputs}) => ({dtype} loss) {{{BODY}}}'
    program = Program.from_onnx(onnx.parser.parse_model(text))
    for leaf in LEAVES:
        program.var(leaf).stop_gradient = False
    amp.append_backward(program.var("loss"), parameter_list=LEAVES)
    return program, shapes


def _results(
    program: Program, place: str, feeds: dict[str, Any], leaves: Sequence[str] = LEAVES
) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    wanted = [program.var(name) for name in ("loss", *(f"{leaf}@GRAD" for leaf in leaves))]
    lowered = lower(program, place, {name: value.shape for name, value in feeds.items()}, wanted)
    given = feeds | {name: np.zeros((), np.float32) for name in lowered.scalars}
    return lowered.model, run(lowered.model, {info.name: given[info.name] for info in lowered.model.graph.input})


@pytest.mark.parametrize(("size", "copies"), [(8, 7), (10, 9)])  # strides that leave nothing unread, and that do
def test_the_gradients_are_those_of_images(size: int, copies: int) -> None:
    """Copied are the convolution's image, twice, its result, and their gradients; and what meets ``g``, an input."""
    program, shapes = _program(size, "float")
    feeds = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    feeds |= {"zero": np.zeros(8, np.float32), "one": np.ones(8, np.float32)}
    _, expected = _results(program, "cpu", feeds)
    model, found = _results(program, "cuda", feeds)
    for name, a, b in zip(["loss", *LEAVES], found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * np.abs(b).max(), err_msg=name)
    assert set(without_cuda_kernel(model)) <= {"Constant(T=float)"}  # folded when a session is made
    assert [node.op_type for node in model.graph.node].count("Transpose") == copies


@pytest.mark.parametrize("window", ["pads = [1, 0, 2, 1]", "pads = [2, 2, 2, 2], strides = [2, 2]"])
def test_a_kernel_of_one_position_reads_zeros_around_what_lies_in_rows(window: str) -> None:
    """Its weight gradient read rows without them, and the step did not run."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[2, 3, 5, 6] x, float[3] s, float[3] b, float[4, 3, 1, 1] w) => (float loss) {{
            n, m, v = BatchNormalization <training_mode = 1> (x, s, b, b, s)
            y = Conv <{window}> (n, w)
            z = Mul(y, y)
            loss = ReduceSum <keepdims = 0> (z) }}"""
    program = Program.from_onnx(onnx.parser.parse_model(text))
    for leaf in ("s", "w"):
        program.var(leaf).stop_gradient = False
    amp.append_backward(program.var("loss"), parameter_list=["s", "w"])
    feeds = {v.name: RNG.uniform(0.5, 2, v.shape).astype(np.float32) for v in program.inputs}
    for found, expected in zip(
        *(_results(program, place, feeds, ("s", "w"))[1] for place in ("cuda", "cpu")), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lead", "target", "strides", "form"),
    [
        ((4, 2), (6, 4), (2, 2), "MatMul"),
        ((8, 1), (7, 7), (2, 3), "MatMul"),
        ((2, 4), (3, 5), (1, 2), "MatMul"),
        ((8, 2), (6,), (3,), "MatMul"),
        ((8, 1), (2, 3, 5), (1, 2, 2), "MatMul"),
        ((8, 1), (2, 3, 5), (2, 2, 2), "Where"),
        ((3, 1), (7, 7), (2, 2), "Where"),  # 21 lines are no multiple of 8
        ((8, 1), (2, 300), (2, 2), "Where"),
    ],
    ids=str,
)
def test_zeros_between_numbers_of_16_bit(
    lead: tuple[int, int], target: tuple[int, ...], strides: tuple[int, ...], form: str
) -> None:
    once = (1,) * len(target)
    source = tuple(t * s for t, s in zip(target, strides, strict=True))
    e = Emitter("cuda")
    e.reserve(["rows"])
    rows = RNG.normal(size=(lead[0], lead[1] * prod(target))).astype(np.float16)
    window = Window(once, strides, once, (0,) * len(target), source, target)
    made = conv._set_apart(e, Value("rows", "float16", rows.shape), None, lead, window)
    assert [node.op_type for node in e.nodes if node.op_type != "Reshape"] == [form]
    expected = np.zeros((*lead, *source), np.float16)
    expected[(..., *(slice(None, None, s) for s in strides))] = rows.reshape(*lead, *target)
    infos = [tensor_info(v.name, "float16", v.shape or ()) for v in (Value("rows", "float16", rows.shape), made)]
    graph = onnx.helper.make_graph(e.nodes, "apart", infos[:1], infos[1:], list(e.initializers.values()))
    np.testing.assert_array_equal(run(as_model(graph), {"rows": rows})[0], expected.reshape(lead[0], -1))
