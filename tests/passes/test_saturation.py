"""Cubes on the way to a tanh leave float16 where the tanh is 1, and cost no digit: no fp32 for them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.constraints_of import convert, gather, kept, run_faithful, without_parameters
from tests.helpers.golden import program, run

CONSTANTS = """float two = {2}, float three = {3}, float half = {0.5}, float one = {1}, float c = {0.044715},
    float r = {0.7978846}, float cr = {0.035677408}, float big = {1000}, float tiny = {1e-7}, float huge = {1e21}, float less = {-0.044715}"""
TAIL = "g = Add(t, one)  h = Mul(half, x)  y = Mul(h, g)"
GELUS = {
    "a power": "p = Pow(x, three)  q = Mul(c, p)  s = Add(x, q)  a = Mul(r, s)  t = Tanh(a)",
    "products": "q = Mul(x, x)  p = Mul(q, x)  s = Mul(p, c)  u = Add(x, s)  a = Mul(u, r)  t = Tanh(a)",
    "a factor": "q = Mul(x, x)  s = Mul(q, c)  u = Add(s, one)  v = Mul(x, u)  a = Mul(v, r)  t = Tanh(a)",
    "coefficients": "q = Pow(x, two)  s = Mul(q, cr)  u = Add(s, r)  a = Mul(x, u)  t = Tanh(a)",
    "a nested factor": "d = Mul(c, x)  e = Mul(d, x)  f = Add(one, e)  u = Mul(r, x)  a = Mul(u, f)  t = Tanh(a)",
}
X = np.float32([0, -0.0, 1e-4, 0.5, -0.5, 2, -3, 5.75, -6, 40, -41, 255, -257, 1000, -1000, 3e4, -6e4])


def net(text: str) -> str:
    return f"main (float[17] x) => (float[17] y) <{CONSTANTS}> {{ {text} }}"


@pytest.mark.parametrize("form", GELUS)
def test_a_gelu_that_is_written_out_with_tanh_is_16_bit(form: str) -> None:
    p = without_parameters(program(net(f"{GELUS[form]}  {TAIL}")))
    expected, constraints = run(p, {"x": X})[0], gather(p)
    assert kept(p, constraints) == {}
    got = run_faithful(convert(p, constraints), {"x": X})[0]
    # 1 plus the tanh has the digits of 1: as many are left below 0 as of a GELU with Erf
    assert np.isfinite(got).all() and np.allclose(got, expected, rtol=2e-3, atol=2e-3)
    assert np.array_equal(got[np.abs(X) >= 40], np.float16(expected[np.abs(X) >= 40]))


@pytest.mark.parametrize(
    ("form", "first"),
    {
        "p = Pow(x, three)  q = Mul(less, p)  s = Add(x, q)  y = Tanh(s)": "p",  # infinities of either sign
        "p = Pow(x, three)  q = Mul(tiny, p)  y = Tanh(q)": "p",  # 0.007 of what is infinite
        "b = Mul(tiny, x)  p = Pow(b, three)  q = Mul(huge, p)  y = Tanh(q)": "p",  # the cube sinks to 0
        "b = Mul(big, x)  p = Pow(b, three)  q = Mul(tiny, p)  s = Mul(q, tiny)  y = Tanh(s)": "p",
        "p = Pow(x, three)  q = Mul(c, p)  s = Add(x, q)  y = Sin(s)": "p",
        "p = Pow(x, three)  q = Mul(c, p)  s = Add(p, q)  n = Neg(s)  y = Tanh(n)": "p",
        "p = Pow(x, three)  t = Tanh(p)  d = Div(p, big)  y = Add(t, d)": "p",  # and something else reads it
        "q = Mul(x, x)  p = Mul(q, x)  o = Sub(p, x)  y = Tanh(o)": "p",
    }.items(),
)
def test_what_may_be_less_than_the_tanh_of_infinity_stays_fp32(form: str, first: str) -> None:
    p = without_parameters(program(net(form)))
    expected, constraints = run(p, {"x": X})[0], gather(p)
    assert first in kept(p, constraints)
    got = run_faithful(convert(p, constraints), {"x": X})[0]
    assert np.allclose(got, expected, rtol=2e-3, atol=2e-3) or "Sin" in form
