"""What is fed and brought to size by numbers of its own: fp32 from the input to the score, and back in the forecast."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.own_scores import keep_own_scores
from amp_transpiler.passes.view.flow import Flow
from tests.helpers.constraints_of import run_faithful
from tests.helpers.sessions import session

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
WEIGHTS = (
    "float[4,4] w = {0.1, 3, 7, -9, 0.2, 5, 1, 2, -3, 0.4, 1, 1, 2, 0.5, 0.1, -1}, float eps = {0.00001}, "
    "float[4] one = {1, 1, 1, 1}, float[4] zero = {0, 0, 0, 0}"
)
FORECAST = """m = ReduceMean<axes = [1]>(x)  d = Sub(x, m)  q = Mul(d, d)  v = ReduceMean<axes = [1]>(q)  e = Add(v, eps)
  s = Sqrt(e)  z = Div(d, s)  g = Mul(z, one)  h = MatMul(g, w)  b = Mul(h, s)  y = Add(b, m)"""
CASES = {
    "a forecast of what was normalised": (FORECAST, {"m", "d", "q", "v", "e", "s", "z", "b", "y"}),
    "a share of the largest": ("a = Abs(x)  m = ReduceMax<axes = [1]>(a)  z = Div(x, m)  y = MatMul(z, w)", set()),
    "a place between the least and the largest": (
        """l = ReduceMin<axes = [1]>(x)  m = ReduceMax<axes = [1]>(x)  d = Sub(x, l)  r = Sub(m, l)  z = Div(d, r)
          y = MatMul(z, w)""",
        {"l", "m", "d", "r", "z"},
    ),
    "a norm, as layers have it": ("z = LayerNormalization(x, one, zero)  y = MatMul(z, w)", set()),
    "a norm written out, beside which it is read": (
        "q = Mul(x, x)  v = ReduceMean<axes = [1]>(q)  s = Sqrt(v)  z = Div(x, s)  h = MatMul(z, w)  y = Add(x, h)",
        set(),
    ),
    "what a layer computes": (
        "h = MatMul(x, w)  m = ReduceMean<axes = [1]>(h)  d = Sub(h, m)  y = MatMul(d, w)",
        set(),
    ),
    "a mean alone": ("m = ReduceMean<axes = [1]>(x)  s = Sigmoid(m)  y = Mul(x, s)", set()),
}


def model(name: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + f"m (float[N,4] x) => (float[N,K] y) <{WEIGHTS}> {{ {CASES[name][0]} }}")


@pytest.mark.parametrize("name", CASES)
def test_what_makes_scores_and_what_makes_forecasts_of_them(name: str) -> None:
    program, constraints = amp.Program.from_onnx(model(name)), Constraints()
    keep_own_scores(program, Flow(program), constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == CASES[name][1]


@pytest.mark.parametrize("size", [40000.0, 2e6])
@pytest.mark.parametrize("name", [name for name, (_, kept) in CASES.items() if kept])
def test_they_are_right_at_any_size(name: str, size: float) -> None:
    """float16 had NaN beyond 65504, and was off at 40000."""
    x = (size * (1 + 0.002 * np.random.default_rng(0).normal(size=(64, 4)))).astype(np.float32)
    (wanted,), (got,) = session(model(name)).run(None, {"x": x}), run_faithful(amp.convert(model(name)), {"x": x})
    moved = wanted - (x.mean(1, keepdims=True) if name.startswith("a forecast") else 0)
    assert np.linalg.norm(got - wanted) < 2e-3 * np.linalg.norm(moved)
