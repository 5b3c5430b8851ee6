"""Models that draw random numbers: a model and its conversion draw the same where they are compared."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.calibration.measure import outputs_of
from tests.helpers.converting import filled

_W = "float[32,32] w"
DRAWING = {
    "noise": f"m (float[8,32] x) => (float[8,32] y) <{_W}> {{ h = MatMul(x, w) n = RandomNormalLike(h) y = Add(h, n) }}",
    "a draw that is an output": (
        f"m (float[8,32] x) => (float[8,32] y, float[8,32] n) <{_W}>"
        " { h = MatMul(x, w) n = RandomUniformLike(h) b = Bernoulli(n) k = Mul(h, b)"
        " z = RandomNormal<shape = [8, 32]>() y = Add(k, z) }"
    ),
    "a Dropout that is told to draw": (
        f"m (float[8,32] x, bool still) => (float[8,32] y) <{_W}, float r = {{0.5}}>"
        " { h = MatMul(x, w) t = Not(still) d, k = Dropout(h, r, t) y = Relu(d) }"
    ),
    "a Dropout in training mode": (
        f"m (float[8,32] x) => (float[8,32] y) <{_W}, float r = {{0.5}}, bool t = {{1}}>"
        " { h = MatMul(x, w) d, k = Dropout(h, r, t) y = Relu(d) }"
    ),
    "noise in a loop": (
        f"m (float[8,32] x) => (float[8,32] y) <{_W}, int64 n = {{3}}, bool c = {{1}}>"
        " { y = Loop(n, c, x) <body = b (int64 i, bool ci, float[8,32] s) => (bool co, float[8,32] t)"
        " { co = Identity(ci) h = MatMul(s, w) r = RandomNormalLike(h) t = Add(h, r) }> }"
    ),
}


@pytest.mark.parametrize("keep_io", [True, False], ids=["float32 outside", "16 bit outside"])
@pytest.mark.parametrize("mode", ["pure", "auto"])
@pytest.mark.parametrize("name", DRAWING)
def test_draws_are_no_difference(name: str, mode: str, keep_io: bool) -> None:
    converted = amp.convert(filled(DRAWING[name]), mode=mode, keep_io=keep_io, check=True)
    verdict = converted.conversion.verdict
    assert verdict is not None and verdict.met and 0 < verdict.worst[1] < 2e-3
    (product,) = (op for op in converted.walk() if op.type == "MatMul")
    assert product.output(0).dtype == "float16"


def test_draws_differ_from_one_operator_to_the_next() -> None:
    text = "m (float[8,32] x) => (float[8,32] y) { a = RandomNormalLike(x) b = RandomNormalLike(x) y = Sub(a, b) }"
    (made,) = outputs_of(amp.Program.from_onnx(filled(text)), [{"x": np.zeros((8, 32), np.float32)}])
    assert made[0].std() > 1
