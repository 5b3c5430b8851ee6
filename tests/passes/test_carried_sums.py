"""Sums that a Loop or Scan carries stay fp32: a count of 3,000 rounds, a moving average; states that forget do not."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.program import Program
from tests.helpers.constraints_of import run_faithful
from tests.helpers.golden import program

ROUNDS = 3000
NEXT = {
    "added": "so = Add(s, one)",
    "less what is taken": "n = Neg(one)  so = Sub(s, n)",
    "moved and bounded": "t = Reshape(s, scalar)  a = Add(one, t)  b = Max(a, zero)  so = Identity(b)",
    "where it counts": "a = Add(s, one)  k = Not(ci)  so = Where(k, s, a)",
    "in a branch": "so = If (ci) <then_branch = t () => (float v) { v = Add(s, one) }, else_branch = e () => (float w) { w = Identity(s) }>",
}


def loop(body: str) -> Program:
    return program(f"""main (float x, int64 n) => (float y, float[K] z)
    <bool c = {{1}}, float one = {{1.0}}, float zero = {{0.0}}, int64[0] scalar = {{}}> {{
      y, z = Loop (n, c, x) <body = b (int64 i, bool ci, float s) => (bool co, float so, float sc)
        {{ {body}  f = Cast<to = 1>(i)  sc = Mul(f, so)  co = Identity(ci) }}> }}""")


@pytest.mark.parametrize("mode", ["pure", "mixed", "auto"])
@pytest.mark.parametrize("body", NEXT.values(), ids=NEXT)
def test_a_count_is_exact_and_what_is_computed_with_it_finite(body: str, mode: str) -> None:
    done = amp.convert(loop(body).to_onnx(), mode=mode)
    y, z = run_faithful(done, {"x": np.array(0, np.float32), "n": np.array(ROUNDS)})
    assert y == ROUNDS
    assert np.array_equal(z, np.arange(ROUNDS) * np.arange(1, ROUNDS + 1, dtype=np.float32))
    assert "fp32: adds to what 's' carries from round to round" in {op.reason for op in done.walk()}


def scan(body: str, rounds: str = "T") -> Program:
    weights = ", ".join(str(round(0.3 * np.sin(i), 3)) for i in range(64))
    return program(f"""main (float[8] h, float[{rounds},8] x) => (float[8] y, float[{rounds},8] z)
    <float keep = {{0.999}}, float take = {{0.001}}, float one = {{1}}, float[8,8] w = {{{weights}}}> {{
      y, z = Scan <num_scan_inputs = 1, body = b (float[8] s, float[8] r) => (float[8] so, float[8] sc)
        {{ {body}  sc = Relu(so) }}> (h, x) }}""")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_moving_average_moves(dtype: str) -> None:
    x = np.random.default_rng(0).uniform(1, 3, (2000, 8)).astype(np.float32)
    done = amp.convert(scan("a = Mul(keep, s)  b = Mul(r, take)  so = Add(a, b)").to_onnx(), mode="pure", dtype=dtype)
    expected = np.zeros(8)
    for row in x.astype(np.float64):
        expected = 0.999 * expected + 0.001 * row
    got = run_faithful(done, {"h": np.zeros(8, np.float32), "x": x})[0]
    assert np.allclose(got, expected, rtol=2e-3 if dtype == "float16" else 2e-2)


def kinds(body: str) -> dict[str, set[str]]:
    """The precisions of the operators inside, by type."""
    found: dict[str, set[str]] = {}
    for op in amp.convert(scan(body, "4").to_onnx(), mode="pure", white_list=["Relu"]).walk():
        if op.program.parent is not None and op.type not in ("Cast", "Constant"):
            found.setdefault(op.type, set()).add(op.precision)
    return found


def test_a_state_that_data_gate_is_free() -> None:
    """The cell of an LSTM that is written out."""
    body = """m = MatMul(r, w)  g = Sigmoid(m)  t = Tanh(m)  a = Mul(g, s)  i = Mul(g, t)  so = Add(a, i)"""
    assert all(precision == {"float16"} for precision in kinds(body).values())


def test_a_state_that_is_computed_anew_is_free() -> None:
    assert all(
        precision == {"float16"} for precision in kinds("m = MatMul(s, w)  a = Add(m, r)  so = Tanh(a)").values()
    )


def test_only_the_sum_of_a_residual_is_fp32() -> None:
    found = kinds("m = MatMul(s, w)  t = Tanh(m)  so = Add(s, t)")
    assert found["Add"] == {"float32"} and found["MatMul"] == found["Tanh"] == {"float16"}
