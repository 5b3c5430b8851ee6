"""Angles of what is fed are computed in fp32, and those that a layer makes may be 16 bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed
from amp_transpiler.passes.numerics.fed_angles import keep_angles, keep_fed_logarithms
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.view.flow import Flow
from tests.helpers.constraints_of import run_faithful
from tests.helpers.sessions import session

HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'
WEIGHTS = "float[2,3] w = {0.1, 3, 7, -9, 0.2, 5}, float[4] f = {1, 0.1, 0.01, 0.001}, float[8,2] l = {" + (
    ", ".join(["0.1"] * 16)
    + "}, float turn = {6.2831853}, float day = {24}, float two = {2}, float fourth = {0.25}, int64[1] one = {1}"
)

CASES = {
    "time steps": (
        "m (float[N] t) => (float[N,4] y) { u = Unsqueeze(t, one)  a = Mul(u, f)  s = Sin(a)  c = Cos(a)  y = Add(s, c) }",
        {"u", "a", "s", "c"},
    ),
    "coordinates and directions": (
        "m (float[N,2] x) => (float[N,3] y) { p = MatMul(x, w)  a = Mul(p, turn)  s = Sin(a)  y = Relu(s) }",
        {"p", "a", "s"},
    ),
    "integers times frequencies, as an equation": (
        """m (int64[N] t) => (float[N,4] y)
        { u = Cast<to=1>(t)  a = Einsum<equation="i,j->ij">(u, f)  s = Sin(a)  y = Relu(s) }""",
        {"u", "a", "s"},
    ),
    "the hour of a day": (
        "m (float[N] t) => (float[N] y) { h = Mod<fmod=1>(t, day)  y = Relu(h) }",
        {"h"},
    ),
    "what is left of whole turns": (
        "m (float[N] t) => (float[N] y) { a = Div(t, day)  b = Floor(a)  p = Sub(a, b)  y = Relu(p) }",
        {"a", "b", "p"},
    ),
    "what is left of what a layer makes": (
        "m (float[N,2] x) => (float[N,2] y) { a = Softmax(x)  b = Floor(a)  y = Sub(a, b) }",
        set(),
    ),
    "an angle that a layer makes": (
        "m (float[N,8] x) => (float[N,2] y) { p = MatMul(x, l)  a = Mul(p, turn)  y = Sin(a) }",
        set(),
    ),
    "a sine of a sine": (
        "m (float[N] t) => (float[N] y) { s = Sin(t)  y = Sin(s) }",
        {"s"},
    ),
    "an angle that the program holds": (
        "m (float[2,3] x) => (float[2,3] y) { s = Sin(w)  y = Mul(x, s) }",
        {"s"},
    ),
    "no angle": ("m (float[N] t) => (float[N] y) { y = Mul(t, turn) }", set()),
}


def program_of(text: str) -> amp.Program:
    graph = text.replace(" {", f" <{WEIGHTS}> {{", 1)
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + graph))


@pytest.mark.parametrize("name", CASES)
def test_what_computes_angles(name: str) -> None:
    text, expected = CASES[name]
    program, constraints = program_of(text), Constraints()
    keep_angles(Fed(program, Flow(program)), Ranges(program), constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == expected


def test_half_a_turn_may_be_16_bit() -> None:
    program, constraints = program_of(CASES["time steps"][0]), Constraints()
    keep_angles(Fed(program, Flow(program)), Ranges(program, {"t": (-3.0, 3.0)}), constraints)
    assert not constraints.operators


@pytest.mark.parametrize("mode", ["pure", "mixed", "auto"])
@pytest.mark.parametrize("name", list(CASES)[:5])
def test_sines_and_remainders_of_many_turns_keep_their_phase(name: str, mode: str) -> None:
    program = program_of(CASES[name][0])
    fed = program.inputs[0]
    values = np.random.default_rng(0).uniform(0, 1000, (50, 2)[: len(fed.shape or ())]).astype(fed.dtype)
    exact = session(program.to_onnx()).run(None, {fed.name: values})[0]
    found = run_faithful(amp.convert(program.to_onnx(), mode=mode), {fed.name: values})[0]
    assert np.linalg.norm(found - exact) < 1e-3 * np.linalg.norm(exact)


def test_a_training_in_16_bit_keeps_angles() -> None:
    text, expected = CASES["coordinates and directions"]
    program = program_of(text)
    amp.cast_model_to_fp16(program, use_fp16_guard=False, numeric_guards=True)
    kept = {op.outputs[0].name for op in program.operators if op.precision == "float32" and op.outputs[0]}
    assert kept >= expected


LOGARITHMS = {
    "of an income": (
        "m (float[N,8] x) => (float[N,2] y) { m = Mul(x, turn)  g = Log(m)  y = MatMul(g, l) }",
        {"m", "g"},
    ),
    "a root": ("m (float[N,8] x) => (float[N,2] y) { m = Abs(x)  g = Sqrt(m)  y = MatMul(g, l) }", {"m", "g"}),
    "a fourth root": ("m (float[N,8] x) => (float[N,2] y) { g = Pow(x, fourth)  y = MatMul(g, l) }", {"g"}),
    "a power": ("m (float[N,8] x) => (float[N,2] y) { g = Pow(x, two)  y = MatMul(g, l) }", set()),
    "an area's logarithm": ("m (float[N,8] x) => (float[N,2] y) { g = Asinh(x)  y = MatMul(g, l) }", {"g"}),
    "of what a layer computes": ("m (float[N,8] x) => (float[N,2] y) { p = MatMul(x, l)  y = Log(p) }", set()),
    "of what is bounded": ("m (float[N,2] x) => (float[N,2] y) { s = Sigmoid(x)  y = Log(s) }", set()),
}


@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_of_what_is_fed(name: str) -> None:
    text, expected = LOGARITHMS[name]
    program, constraints = program_of(text), Constraints()
    keep_fed_logarithms(Fed(program, Flow(program)), Ranges(program), constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == expected


@pytest.mark.parametrize("kind", ["Log", "Sqrt"])
def test_a_fed_number_beyond_float16_has_a_logarithm_and_a_root(kind: str) -> None:
    model = onnx.parser.parse_model(
        HEAD + f"m (float[2,8] x) => (float[2,2] y) <{WEIGHTS}> {{ g = {kind}(x)  y = MatMul(g, l) }}"
    )
    x = np.geomspace(1e-9, 1e9, 16, dtype=np.float32).reshape(2, 8)
    (wanted,) = session(model).run(None, {"x": x})
    (got,) = run_faithful(amp.convert(model), {"x": x})
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=5e-3)
    within = amp.convert(model, input_ranges={"x": (1e-3, 1000.0)})
    assert next(op for op in within.operators if op.type == kind).precision == "float16"
