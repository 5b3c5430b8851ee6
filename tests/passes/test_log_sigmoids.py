"""The logarithm of a sigmoid, as exporters write LogSigmoid, has a number and a slope where the sigmoid is 0."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.log_sigmoids import write_log_sigmoids
from tests.helpers.slopes import assert_slope, assert_stays, slope

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g (float[batch, 6] x) => (float[batch, 6] y) '
FORMS = {
    "alone": "{ s = Sigmoid(x)  y = Log(s) }",
    "of a sigmoid that is read elsewhere": "{ s = Sigmoid(x)  l = Log(s)  y = Mul(l, s) }",
}
X = np.float32([[-4, -2, -0.5, 0, 1, 3]])


def program(body: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + body))


@pytest.mark.parametrize("form", FORMS)
def test_it_gives_what_it_gave(form: str) -> None:
    expected = slope(program(FORMS[form]), X)
    found = program(FORMS[form])
    assert write_log_sigmoids(found) == ["1 logarithms of sigmoids are written with softplus"]
    assert_slope(found, X, expected)


def test_other_logarithms_stay() -> None:
    assert_stays(program("{ s = Tanh(x)  y = Log(s) }"), write_log_sigmoids)


def test_it_is_finite_where_the_sigmoid_is_zero() -> None:
    """y² has the slope 2 y (1 - sigmoid(x)), which is 2 x there."""
    far = np.float32([[-400, -300, -200, -100, -50, 400]])
    head = HEAD + f"<float[6, 6] w = {{{', '.join(str(i) for i in np.eye(6).ravel())}}}> "
    main = amp.Program.from_onnx(onnx.parser.parse_model(head + "{ k = MatMul(x, w)  s = Sigmoid(k)  y = Log(s) }"))
    assert "1 logarithms of sigmoids are written with softplus" in amp.prepare_training(main).notes
    value, gradient = slope(main, far)
    np.testing.assert_allclose(value, np.minimum(far, 0), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * np.minimum(far, 0), rtol=1e-6)
