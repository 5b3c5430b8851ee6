"""What a detector finds nothing in measures nothing: probabilities near 0 are compared as probabilities."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.converting import faithful, filled
from tests.helpers.sessions import session

HEAD = '<ir_version: 8, opset_import: ["" : 17]> m (float[N,64] x) => (float[N,8] y) '
HEAD += "<float[64,8] w, float[8] far = {-16, -16, -16, -16, -16, -16, -16, -16}, "
HEAD += "float[8] on = {0, -16, -16, -16, 0, 0, 0, 0}> "
PRODUCT = "{ m = MatMul(x, w) t = Add(m, BIAS) "
NOISE = {"x": 0.02 * np.random.default_rng(0).standard_normal((4, 64), np.float32)}


def converted(body: str, bias: str = "far") -> tuple[onnx.ModelProto, amp.ConvertedProgram, float]:
    model = filled(HEAD + PRODUCT.replace("BIAS", bias) + body + " }")
    program = amp.convert(model, check=True, calibration=NOISE)
    assert program.conversion.verdict is not None
    return model, program, program.conversion.verdict.errors["y"]


@pytest.mark.parametrize(
    "end", ["y = Sigmoid(t)", "s = Sigmoid(t) y = Identity(s)", "s = Sigmoid(t) y = Concat<axis=0>(s, s)"]
)
def test_chances_of_nothing(end: str) -> None:
    assert converted(end)[2] < 1e-5


def test_chances_that_are_there_are_compared_as_other_numbers() -> None:
    model, program, error = converted("y = Sigmoid(t)", "on")
    (wanted,), (got,) = session(model).run(None, NOISE), faithful(program, NOISE)
    assert np.linalg.norm(wanted) > 0.5
    np.testing.assert_allclose(error, np.linalg.norm(got - wanted) / np.linalg.norm(wanted), rtol=1e-3)


@pytest.mark.parametrize("end", ["y = Softmax(t)", "e = Exp(t) y = Neg(e)", "s = Sigmoid(t) y = Concat<axis=0>(s, t)"])
def test_other_small_numbers_are_compared_as_they_are(end: str) -> None:
    assert converted(end)[2] > 1e-5


@pytest.mark.parametrize("place", ["cpu", "webgpu"])
def test_a_model_that_is_checked_is_judged_alike(place: str) -> None:
    for end, near in (("y = Sigmoid(t)", True), ("e = Exp(t) y = Neg(e)", False)):
        found = amp.check_model(converted(end)[1].to_onnx(), place, data=NOISE, tolerance=1e-4)
        assert found.ok == near and (found.outputs["y"] < 1e-5) == near, str(found)
