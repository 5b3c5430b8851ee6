"""Where elements of one tensor are compared with each other, none of them is rounded on the way there alone."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.numerics.comparisons import keep_comparisons, keep_equalities
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.flow import Flow

HEAD = '<ir_version: 10, opset_import: ["" : 22]>\n'
AROUND = "kernel_shape=[3,3], pads=[1,1,1,1]"


def kept(program: amp.Program) -> set[str]:
    """The first results of the operators that are kept fp32."""
    constraints = Constraints()
    keep_comparisons(Flow(program), constraints)
    return {getattr(op.outputs[0], "name", "") for op in constraints.operators}


CASES = {
    "peaks": (
        f"""m (float[1,1,9,9] x) => (bool[1,1,9,9] y)
        {{ r = Relu(x)  s = Sigmoid(r)  m = MaxPool<{AROUND}>(s)  y = Equal(s, m) }}""",
        {"m", "y"},
    ),
    "elements that are moved": (
        """m (float[1,1,8,8] x) => (bool[1,1,4,4] y) <int64[4] from = {0, 0, 0, 0}, int64[4] to = {1, 1, 8, 8},
        int64[4] axes = {0, 1, 2, 3}, int64[4] steps = {1, 1, 2, 2}>
        { s = Exp(x)  a = Slice(s, from, to, axes, steps)  t = Neg(s)  n = Neg(t)
          m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(n)  y = GreaterOrEqual(a, m) }""",
        {"a", "t", "n", "m", "y"},
    ),
    "what is no number": ("m (float[4] x) => (bool[4] y) { e = Exp(x)  y = Equal(e, e) }", set()),
    "a threshold": (
        "m (float[4] x) => (bool[4] y) <float least = {0.1}> { r = Max(x, least)  y = Greater(r, least) }",
        set(),
    ),
    "two tensors": ("m (float[4] x, float[4] z) => (bool[4] y) { a = Relu(x)  b = Relu(z)  y = Less(a, b) }", set()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_compared(name: str) -> None:
    text, expected = CASES[name]
    assert kept(amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text))) == expected


def test_a_converted_program_compares_the_same() -> None:
    text, expected = CASES["peaks"]
    assert kept(amp.convert(onnx.parser.parse_model(HEAD + text), numeric_guards=False)) == expected


@pytest.mark.parametrize("black", [[], ["MaxPool"]])
def test_places_of_maxima_that_are_found_by_comparing(black: list[str]) -> None:
    """WebGPU has no kernel for them. onnxruntime on the CPU leaves out one of the roundings, and found none."""
    text = """m (float[1,2,8,8] x) => (float[1,2,4,4] top, int64[1,2,4,4] at)
    { top, at = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) }"""
    model = onnx.parser.parse_model(HEAD + text)
    feeds = {"x": np.random.default_rng(0).normal(size=(1, 2, 8, 8)).astype(np.float32)}
    exact = onnxruntime.InferenceSession(model.SerializeToString()).run(["at"], feeds)[0]
    converted = amp.convert(model, place="webgpu", black_list=black).to_onnx()
    session = onnxruntime.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["at"], feeds)[0], exact)
    np.testing.assert_array_equal(onnx.reference.ReferenceEvaluator(converted).run(["at"], feeds)[0], exact)


KINDS = "float[4] kinds = {1, 4001, 4003, 2049}, float missing = {-9999}, float none = {-2}, float lowest = {-3.4e38}"
EQUALITIES = {
    "kinds": ("m (float[9,1] x) => (bool[9,4] y) { y = Equal(x, kinds) }", {"y"}),
    "what is missing": (
        "m (float[9,2] x) => (float[2,9] z) { t = Transpose(x)  y = Equal(missing, t)  z = Where(y, none, t) }",
        {"t", "y"},
    ),
    "a number that float16 holds": ("m (float[9,1] x) => (bool[9,1] y) { y = Equal(x, none) }", set()),
    "a mask": ("m (float[9,1] x) => (bool[9,1] y) { y = Equal(x, lowest) }", set()),
    "what is greater": ("m (float[9,1] x) => (bool[9,1] y) { y = Greater(x, missing) }", set()),
}


@pytest.mark.parametrize("name", EQUALITIES)
def test_what_is_equal_to_a_number_that_float16_rounds(name: str) -> None:
    text, expected = EQUALITIES[name]
    program = amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text.replace(" {", f" <{KINDS}> {{", 1)))
    constraints = Constraints()
    keep_equalities(Flow(program), "float16", constraints)
    assert {getattr(op.outputs[0], "name", "") for op in constraints.operators} == expected


@pytest.mark.parametrize("mode", ["pure", "mixed", "auto"])
def test_kinds_are_told_apart_in_a_converted_file(mode: str) -> None:
    text = f"""m (float[N,1] x) => (float[N,2] y) <{KINDS}, float[4,2] w = {{1, 2, 3, 4, 5, 6, 7, 8}}>
      {{ e = Equal(x, kinds)  f = Cast<to = 1>(e)  y = MatMul(f, w) }}"""
    model = onnx.parser.parse_model(HEAD + text)
    x = np.array([[4000], [4001], [4003], [2048], [2049], [1]], np.float32)
    converted = amp.convert(model, mode=mode)
    for made in (converted.to_onnx(), converted.lower(amp.CPUPlace()).model):
        run = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run
        np.testing.assert_array_equal(run(None, {"x": x})[0], [[0, 0], [3, 4], [5, 6], [0, 0], [7, 8], [1, 2]])
