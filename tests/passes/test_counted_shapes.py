"""What open sizes count as follows from that of the inputs, through strides, names that compute and nested graphs."""

from __future__ import annotations

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.view.counted_shapes import counted, counted_shapes
from amp_transpiler.passes.view.typing import programs

STRIDES = "m (float[N,1,H,W] x, float[1,1,3,3] k) => (float[A,B,C,D] y) { y = Conv<strides=[2,2]>(x, k) }"
CACHE = """m (float[past] x, float[1] z, float["past + 1"] s) => (float[B] y)
    { a = Concat<axis=0>(x, z) y = Add(a, s) }"""
BRANCH = """m (bool c, float[N,H] x) => (float[A,B] o)
    { o = If(c) <then_branch = t () => (float[A,B] y) { y = Concat<axis=1>(x, x) },
    else_branch = e () => (float[A,B] u) { u = Concat<axis=0>(x, x) }> }"""
MISFIT = "m (float[N] x, float[3] z) => (float[N] v) { y = Concat<axis=0>(x, x) v = Add(y, z) }"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (STRIDES, {"y": (128, 1, 63, 63)}),
        (CACHE, {"a": (129,), "y": (129,)}),
        (BRANCH, {"y": (128, 256), "u": (256, 128)}),
        (MISFIT, {"y": (128,), "v": (3,)}),
        ("m (float[2,3] x) => (float[2,3] y) { y = Neg(x) }", {"y": (2, 3)}),
    ],
)
def test_open_sizes(text: str, expected: dict[str, tuple[int, ...]]) -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}'))
    shape_of = counted_shapes(program)
    variables = {v.name: v for each in programs(program) for v in each.variables}
    assert {name: counted(shape_of(variables[name])) for name in expected} == expected
