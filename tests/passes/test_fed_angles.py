"""Angles of what is fed are computed in fp32, and those that a layer makes may be 16 bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed_angles import (
    keep_angles,
    keep_fed_differences,
    keep_fed_logarithms,
    keep_fed_scores,
)
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.view.flow import Flow
from tests.helpers.constraints_of import run_faithful
from tests.helpers.sessions import session

HEAD = '<ir_version: 10, opset_import: ["" : 20, "ai.onnx.ml" : 3]>\n'
WEIGHTS = "float[2,3] w = {0.1, 3, 7, -9, 0.2, 5}, float[4] f = {1, 0.1, 0.01, 0.001}, float[8,2] l = {" + (
    ", ".join(["0.1"] * 16) + "}, float turn = {6.2831853}, float day = {24}, int64[1] one = {1}"
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
    keep_angles(program, Flow(program), Ranges(program), constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == expected


def test_half_a_turn_may_be_16_bit() -> None:
    program, constraints = program_of(CASES["time steps"][0]), Constraints()
    keep_angles(program, Flow(program), Ranges(program, {"t": (-3.0, 3.0)}), constraints)
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
    "of what a layer computes": ("m (float[N,8] x) => (float[N,2] y) { p = MatMul(x, l)  y = Log(p) }", set()),
    "of what is bounded": ("m (float[N,2] x) => (float[N,2] y) { s = Sigmoid(x)  y = Log(s) }", set()),
}


@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_of_what_is_fed(name: str) -> None:
    text, expected = LOGARITHMS[name]
    program, constraints = program_of(text), Constraints()
    keep_fed_logarithms(program, Flow(program), Ranges(program), constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == expected


def test_a_fed_number_beyond_float16_has_a_logarithm() -> None:
    model = onnx.parser.parse_model(
        HEAD + f"m (float[2,8] x) => (float[2,2] y) <{WEIGHTS}> {{ g = Log(x)  y = MatMul(g, l) }}"
    )
    x = np.geomspace(1e-9, 1e9, 16, dtype=np.float32).reshape(2, 8)
    (wanted,) = session(model).run(None, {"x": x})
    (got,) = run_faithful(amp.convert(model), {"x": x})
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=5e-3)
    within = amp.convert(model, input_ranges={"x": (1e-3, 1000.0)})
    assert next(op for op in within.operators if op.type == "Log").precision == "float16"


MOMENTS = """float[2] mean = {1990, 5}, float[2] less = {-1990, -5}, float[2] deviation = {10, 2}, float[2] over = {0.1, 0.5},
  float[2] variance = {100, 4}, float[2] ones = {1, 1}, float[2,3] w = {0.1, 3, 7, -9, 0.2, 5},
  float[2] shift = {-199, -2.5}, float[2] moved = {199, 2.5}, float levels = {255}"""
SCORES = {
    "a difference over a deviation": ("d = Sub(x, mean)  z = Div(d, deviation)", {"d", "z"}),
    "a sum times a number": ("d = Add(x, less)  z = Mul(d, over)", {"d", "z"}),
    "a scale and a shift": ("s = Mul(x, over)  z = Add(s, shift)", {"s", "z"}),
    "a quotient less a number": ("s = Div(x, deviation)  z = Sub(s, moved)", {"s", "z"}),
    "a scaler, of what is computed": (
        "a = Abs(x)  z = ai.onnx.ml.Scaler<offset = [1990.0, 5.0], scale = [0.1, 0.5]>(a)",
        {"a", "z"},
    ),
    "shares that become levels": ("s = Mul(x, levels)  z = Add(s, shift)", set()),
    "a batch norm, of what is moved": (
        "u = Identity(x)  z = BatchNormalization(u, ones, mean, mean, variance)",
        {"u", "z"},
    ),
    "of what a layer computes": ("l = Softmax(x)  d = Sub(l, mean)  z = Div(d, deviation)", set()),
    "of what is near 0 beside its deviation": ("d = Sub(x, deviation)  z = Div(d, deviation)", set()),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SCORES)
def test_standard_scores_of_what_is_fed(name: str, dtype: str) -> None:
    text, expected = SCORES[name]
    model = onnx.parser.parse_model(
        HEAD + f"m (float[N,2] x) => (float[N,3] y) <{MOMENTS}> {{ {text}  y = MatMul(z, w) }}"
    )
    program, constraints = amp.Program.from_onnx(model), Constraints()
    keep_fed_scores(program, Flow(program), Ranges(program), dtype, constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == expected
    x = np.random.default_rng(0).normal([1990, 5], [10, 2], (64, 2)).astype(np.float32)
    (wanted,) = session(model).run(None, {"x": x})
    (got,) = run_faithful(amp.convert(model, mode="mixed", dtype=dtype), {"x": x})
    if expected:  # float16 was off by 0.02, bfloat16 by 0.2
        assert np.linalg.norm(got - wanted) < (1e-3 if dtype == "float16" else 1e-2) * np.linalg.norm(wanted)


SCALES = {
    "seconds in days": "z = Mul(x, days)",
    "quotients, of what is moved": "r = Reshape(x, shape)  z = Div(r, seconds)",
    "scores": "d = Sub(x, one)  z = Div(d, spreads)",
    "a batch norm": "z = BatchNormalization(x, ones, ones, ones, variances)",
    "levels of 12 bits": "z = Div(x, levels)",
}


@pytest.mark.parametrize("name", SCALES)
def test_what_is_scaled_down_was_large(name: str) -> None:
    """Which onnxruntime divided by an infinity in float16, or took for one."""
    numbers = """float days = {0.00001157}, float[2] seconds = {60000, 43200}, int64[2] shape = {-1, 2}, float one = {1},
      float[2] ones = {1, 1}, float[2] spreads = {40000, 30000}, float[2] variances = {9e8, 1.6e9}, float levels = {4095},
      float[2,3] w = {0.1, 3, 7, -9, 0.2, 5}"""
    model = onnx.parser.parse_model(
        HEAD + f"m (float[N,2] x) => (float[N,3] y) <{numbers}> {{ {SCALES[name]}  y = MatMul(z, w) }}"
    )
    fp32 = {op.type for op in amp.Program.from_onnx(model).operators} - {"MatMul"}
    found = {op.type: op.precision for op in amp.convert(model, mode="mixed").operators if not op.inserted}
    known = {op.type: op.precision for op in amp.convert(model, input_ranges={"x": (0.0, 100.0)}).operators}
    if name == "levels of 12 bits":
        assert found == {"Div": "float16", "MatMul": "float16"}
        return
    assert {kind for kind, precision in found.items() if precision == "float32"} == fp32
    assert known["MatMul"] == "float16" and "float32" not in {known[kind] for kind in fp32}
    x = np.random.default_rng(0).uniform(0, 86400, (64, 2)).astype(np.float32)
    (wanted,), (got,) = session(model).run(None, {"x": x}), run_faithful(amp.convert(model, mode="mixed"), {"x": x})
    assert np.linalg.norm(got - wanted) < 2e-3 * np.linalg.norm(wanted)


def test_what_is_added_to_such_an_input_is_as_large() -> None:
    """A forecast of pressures, which is the state and a change: it was infinite."""
    numbers = """float[2] mean = {101325, 50000}, float[2] spread = {1500, 3000},
      float[2,2] w = {0.5, -0.1, 0.3, 0.2}, int64[2] shape = {-1, 2}"""
    model = onnx.parser.parse_model(
        HEAD
        + f"""m (float[N,2] x) => (float[N,2] y) <{numbers}> {{
          d = Sub(x, mean)  s = Div(d, spread)  h = MatMul(s, w)  t = Tanh(h)  e = Mul(t, spread)
          moved = Reshape(x, shape)  y = Add(moved, e) }}"""
    )
    x = np.random.default_rng(0).normal([101325, 50000], [1500, 3000], (64, 2)).astype(np.float32)
    program, constraints = amp.Program.from_onnx(model), Constraints()
    keep_fed_scores(program, Flow(program), Ranges(program), "float16", constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == {"d", "s", "moved", "y"}
    (wanted,), (got,) = session(model).run(None, {"x": x}), run_faithful(amp.convert(model), {"x": x})
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


DAYS = "int64[1] first = {0}, int64[1] second = {1}, int64[1] last = {-1}, int64[1] end = {9}, int64[1] axes = {1}"
DIFFERENCES = {
    "two inputs": ("d = Sub(x, z)", {"d"}),
    "returns": (
        "a = Slice(x, second, end, axes)  b = Slice(x, first, last, axes)  q = Div(a, b)  d = Sub(q, one)",
        {"a", "b", "q", "d"},
    ),
    "logarithms of returns": ("q = Div(x, z)  d = Log(q)", {"q", "d"}),
    "a forecast beside the first day": (
        "l = Slice(x, first, second, axes)  f = Sub(x, l)  g = Sigmoid(f)  d = Add(g, l)",
        {"l", "f", "d"},
    ),
    "a quotient": ("d = Div(x, z)", set()),
    "two days": ("a = Slice(x, second, end, axes)  b = Slice(x, first, last, axes)  d = Sub(a, b)", {"a", "b", "d"}),
    "what a layer computes": ("a = Softmax(x)  d = Sub(a, z)", set()),
    "an input and a number": ("d = Sub(x, one)", set()),
    "nothing": ("d = Sub(x, x)", set()),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_of_what_is_fed(name: str) -> None:
    text, expected = DIFFERENCES[name]
    model = onnx.parser.parse_model(
        HEAD + f"m (float[N,9] x, float[N,9] z) => (float[N,K] y) <{DAYS}, float one = {{1}}> {{ {text}  y = Tanh(d) }}"
    )
    program, constraints = amp.Program.from_onnx(model), Constraints()
    keep_fed_differences(program, Flow(program), constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == expected
    rng = np.random.default_rng(0)
    feed = {"x": 100 + rng.random((9, 9), np.float32), "z": 100 + rng.random((9, 9), np.float32)}
    (wanted,), (got,) = session(model).run(None, feed), run_faithful(amp.convert(model), feed)
    if expected:  # float16 was off by 0.04
        assert np.linalg.norm(got - wanted) < 1e-3 * np.linalg.norm(wanted)
