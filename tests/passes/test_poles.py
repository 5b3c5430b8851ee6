"""Bounds that 16 bit would round onto a pole: what lies between stays fp32, and the results are those of float64."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.program import Program
from tests.helpers.constraints_of import run_faithful
from tests.helpers.golden import program, run

X = np.linspace(-0.2, 1.2, 257).astype(np.float32)


def model(body: str, eps: float, opset: int = 17) -> Program:
    return program(
        f"""main (float[257] x) => (float[257] y)
    <float lo = {{{eps:.9f}}}, float hi = {{{1 - eps:.9f}}}, float one = {{1}}, float two = {{2}}, float zero = {{0}},
     float minus = {{-0.5}}, int64[1] two_ = {{255}}, int64[1] three_ = {{257}}, int64[2] parts = {{257, 2}}> {{ {body} }}""",
        opset,
    )


def logit(x: np.ndarray, eps: float) -> np.ndarray:
    c = np.clip(x, eps, 1 - eps)
    return np.log(c / (1 - c))


def inverse_sigmoid(x: np.ndarray, eps: float) -> np.ndarray:
    c = np.clip(x, 0, 1)
    return np.log(np.maximum(c, eps) / np.maximum(1 - c, eps))


POLES = {
    "logit": ("c = Clip(x, lo, hi)  d = Sub(one, c)  q = Div(c, d)  y = Log(q)", logit),
    "logit by comparisons": (
        """a = Less(x, hi)  b = Where(a, x, hi)  k = Less(b, lo)  c = Where(k, lo, b)
        d = Sub(one, c)  q = Div(c, d)  y = Log(q)""",
        logit,
    ),
    "cross-entropy": (
        "a = Max(x, lo)  c = Min(hi, a)  n = Neg(c)  d = Add(n, one)  y = Log(d)",
        lambda x, eps: np.log(1 - np.clip(x, eps, 1 - eps)),
    ),
    "a part of it": (
        """s = Slice(x, two_, three_)  j = Concat<axis = 0>(x, s)  c = Clip(j, lo, hi)  u, v = Split<axis = 0>(c, parts)
        d = Sub(one, v)  l = Log(d)  e = Sub(one, u)  g = Log(e)  k = ReduceMin(l)  z = Mul(k, zero)  y = Add(g, z)""",
        lambda x, eps: np.log(1 - np.clip(x, eps, 1 - eps)),
    ),
    "one over": (
        "c = Clip(x, lo, hi)  d = Sub(one, c)  r = Reciprocal(d)  y = Log(r)",
        lambda x, eps: -np.log(1 - np.clip(x, eps, 1 - eps)),
    ),
    "a negative power": (
        "c = Clip(x, lo, hi)  d = Sub(one, c)  p = Pow(d, minus)  y = Log(p)",
        lambda x, eps: -np.log(1 - np.clip(x, eps, 1 - eps)) / 2,
    ),
    "a hyperbolic angle": (
        "c = Clip(x, zero, hi)  y = Atanh(c)",
        lambda x, eps: np.arctanh(np.clip(x, 0, 1 - eps)),
    ),
    "of twice as much": (
        "c = Clip(x, lo, hi)  m = Mul(c, two)  s = Sub(m, one)  y = Atanh(s)",
        lambda x, eps: np.arctanh(2 * np.clip(x, eps, 1 - eps) - 1),
    ),
    "an angle and its sine": (
        "c = Clip(x, zero, hi)  a = Acos(c)  s = Sin(a)  y = Div(a, s)",
        lambda x, eps: np.arccos(np.clip(x, 0, 1 - eps)) / np.sin(np.arccos(np.clip(x, 0, 1 - eps))),
    ),
    "inverse sigmoid": (
        "c = Clip(x, zero, one)  a = Clip(c, lo)  d = Sub(one, c)  b = Clip(d, lo)  q = Div(a, b)  y = Log(q)",
        inverse_sigmoid,
    ),
}


FAR = np.linspace(-16, 16, 257).astype(np.float32)
FUNCTIONS = {
    "log sigmoid": "s = Sigmoid(x)  y = Log(s)",
    "of the other side": "s = Sigmoid(x)  d = Sub(one, s)  y = Log(d)",
    "softmax": """r = Reshape(x, rows)  n = Neg(r)  c = Concat<axis = 1>(r, n)  s = Softmax<axis = 1>(c)  l = Log(s)
        u, v = Split<axis = 1, num_outputs = 2>(l)  k = Sub(u, v)  y = Reshape(k, back)""",
    "inside of a branch": """s = Sigmoid(x)  n = Neg(s)  d = Add(n, one)  y = If (yes) <then_branch = t () => (float[257] t) { t = Log(d) },
        else_branch = e () => (float[257] e) { e = Identity(x) }>""",
    "out of a branch": """d = If (yes) <then_branch = t () => (float[257] t) { s = Sigmoid(x)  t = Sub(one, s) },
        else_branch = e () => (float[257] e) { e = Identity(x) }>  y = Log(d)""",
    "in each row": """r = Reshape(x, rows)  s = Sigmoid(r)  d = Sub(one, s)
        o = Scan <num_scan_inputs = 1, body = b (float[1] i) => (float[1] l) { l = Log(i) }> (d)  y = Reshape(o, back)""",
}


@pytest.mark.parametrize("pattern", FUNCTIONS)
def test_a_function_that_comes_near_a_pole_does_not_meet_it(pattern: str) -> None:
    """Nor does it lose more beside it than float32 does."""
    written = program(
        f"""main (float[257] x) => (float[257] y)
        <float one = {{1}}, int64[2] rows = {{257, 1}}, int64[1] back = {{-1}}, bool yes = {{1}}> {{ {FUNCTIONS[pattern]} }}""",
        18,
    )
    expected, done = run(written, {"x": FAR})[0], amp.convert(written.to_onnx(), mode="pure")
    assert any(
        re.match("fp32: comes near [01], which it reaches in fp16: a pole of Log", o.reason) for o in done.walk()
    )
    got = run_faithful(done, {"x": FAR})[0]
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("eps", [1e-4, 1e-5])
@pytest.mark.parametrize("pattern", POLES)
def test_what_a_bound_keeps_from_a_pole_stays_finite(pattern: str, eps: float) -> None:
    body, formula = POLES[pattern]
    expected = formula(X.astype(np.float64), eps)
    done = amp.convert(model(body, eps).to_onnx(), mode="pure")
    got = run_faithful(done, {"x": X})[0]
    assert np.isfinite(expected).all() and np.isfinite(got).all()
    bounded = (np.float32(eps) > X) | (np.float32(1 - eps) < X)
    assert np.allclose(got[bounded], expected[bounded], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("type_", "function"),
    [
        *[
            (name, getattr(np, name.lower()))
            for name in ("Log", "Reciprocal", "Sqrt", "Exp", "Sin", "Tan", "Tanh", "Cosh")
        ],
        *[(f"A{name}", getattr(np, f"arc{name}")) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")],
    ],
)
def test_poles_are_where_the_slope_has_no_end(type_: str, function: np.ufunc) -> None:
    with np.errstate(all="ignore"):
        slopes = {
            pole: max(
                np.nan_to_num(abs(np.diff(function(pole + side * np.array([1e-6, 2e-6])))[0]) / 1e-6)
                for side in (-1, 1)
            )
            for pole in (-1.0, 0.0, 1.0)
        }
    assert tuple(pole for pole, slope in slopes.items() if slope > 100) == traits_of(type_).poles


def test_bfloat16_rounds_sooner_and_the_reason_and_the_note_say_it() -> None:
    done = amp.convert(model(POLES["cross-entropy"][0], 0.001).to_onnx(), mode="pure", dtype="bfloat16")
    assert np.isfinite(run_faithful(done, {"x": X})[0]).all()
    why = "fp32: a bound of 0.999 is 1 in bf16, a pole of Log -> y"
    assert {op.reason for op in done.operators if op.type in ("Neg", "Add", "Log")} == {why}
    assert [(note.name, note.action) for note in done.conversion.constants] == [("hi", "what reads it stays fp32")]


def test_bounds_that_are_attributes() -> None:
    body = "c = Clip<min = 0.0001, max = 0.9999>(x)  d = Sub(one, c)  y = Log(d)"
    done = amp.convert(model(body, 1e-4, 10).to_onnx(), mode="pure")
    expected = np.log(1 - np.clip(X.astype(np.float64), 1e-4, 0.9999))
    assert np.allclose(run_faithful(done, {"x": X})[0][[0, -1]], expected[[0, -1]], rtol=4e-3, atol=2e-4)


@pytest.mark.parametrize(
    "body",
    [
        "c = Clip(x, zero, hi)  y = Sub(one, c)",  # nothing has a pole
        "c = Clip(x, lo, hi)  d = Sub(two, c)  y = Log(d)",  # none is near
        "c = Clip(x, lo, hi)  d = Sub(one, x)  e = Add(c, d)  y = Log(e)",  # what is added moves it
        "c = Clip(x, zero, one)  d = Sub(one, c)  y = Sqrt(d)",  # the model itself goes there
    ],
)
def test_what_meets_no_pole_is_free(body: str) -> None:
    done = amp.convert(model(body, 1e-4).to_onnx(), mode="pure", input_ranges={"x": (0, 1)})  # it fits a logarithm
    assert {op.precision for op in done.operators if op.type not in ("Cast", "Constant")} == {"float16"}


def test_a_quotient_of_what_is_bounded() -> None:
    """0.5 over 0.00001 is within float16, 1 over it is not."""
    for top, kept in ((0.5, False), (1.0, True)):
        body = f"t = Constant<value_float = {top}>()  a = Clip(x, zero, t)  b = Clip(x, lo)  q = Div(a, b)  y = Tanh(q)"
        done = amp.convert(model(body, 1e-5).to_onnx(), mode="pure")
        why = next(op.reason for op in done.operators if op.type == "Div")
        assert ("a quotient by 'b', which may be 1e-05, leaves fp16" in why) is kept, why
    assert math.isfinite(float(np.float16(0.5 / 1e-5)))


def test_a_share_of_a_sum_or_a_norm_is_no_such_quotient() -> None:
    for whole in ("s = ReduceMax(a)", "n = Neg(a)  m = Abs(n)  s = ReduceMax<keepdims = 1>(m)"):
        done = amp.convert(model(f"a = Clip(x, zero, one)  {whole}  b = Clip(s, lo)  y = Div(a, b)", 1e-5).to_onnx())
        assert next(op.precision for op in done.operators if op.type == "Div") == "float16"
