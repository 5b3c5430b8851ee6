"""Running sums stay fp32 where their differences or phases are told, and nowhere else."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.running_sums import keep_running_sums
from amp_transpiler.passes.view.flow import Flow
from tests.helpers.converting import faithful
from tests.helpers.sessions import session

HEAD = '<ir_version: 10, opset_import: ["" : 22]>\n'
NUMBERS = "<int64 axis = {0}, int64[1] last = {299}, float rate = {0.01}, float turn = {6.2831853}, float[8,8] w>"

CASES = {
    "decays between two places": (
        "d0 = Softplus(x)  d = Neg(d0)  c = CumSum(d, axis)  e = Gather(c, last)  b = Sub(e, c)  y = Exp(b)",
        {"c", "e", "b"},
    ),
    "a phase": (
        "p = MatMul(x, w)  f = Mul(p, rate)  c = CumSum(f, axis)  a = Mul(c, turn)  y = Sin(a)",
        {"f", "c", "a", "y"},
    ),
    "a phase within its turn": (
        "f = Mul(x, rate)  c = CumSum(f, axis)  i = Floor(c)  m = Sub(c, i)  a = Mul(m, turn)  y = Sin(a)",
        {"f", "c", "i", "m"},
    ),
    "a sum that is read as it is": ("c = CumSum(x, axis)  y = Exp(c)", set()),
    "sums of two tensors": ("b = Neg(x)  c = CumSum(x, axis)  d = CumSum(b, axis)  y = Sub(c, d)", set()),
}


def program_of(body: str) -> amp.Program:
    text = f"{HEAD} m (float[300,8] x) => (float[M,8] y) {NUMBERS.replace(', float[8,8] w', '')} {{ {body} }}"
    if "w)" in body:
        text = text.replace("> {", ", float[8,8] w = {" + ", ".join(["0.1"] * 64) + "}> {")
    return amp.Program.from_onnx(onnx.parser.parse_model(text))


@pytest.mark.parametrize("name", CASES)
def test_what_tells_of_sums(name: str) -> None:
    body, expected = CASES[name]
    constraints = Constraints()
    keep_running_sums(Flow(program_of(body)), constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == expected


@pytest.mark.parametrize("name", ["decays between two places", "a phase within its turn"])
def test_in_bfloat16(name: str) -> None:
    """A decay of next to nothing was 1, and sines were 0.2 off."""
    model = program_of(CASES[name][0]).to_onnx()
    x = np.random.default_rng(0).uniform(1, 9, (300, 8)).astype(np.float32)
    (wanted,) = session(model).run(None, {"x": x})
    (got,) = faithful(amp.convert(model, dtype="bfloat16"), {"x": x})
    assert np.abs(got - wanted).max() < 0.03
