"""Inputs and outputs that become 16 bit are read as they are by what takes any type: nothing is widened for its shape."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from tests.helpers.converting import filled
from tests.helpers.sessions import session

#: A cache that grows, whose sizes before and after are asked for, and which positions are not empty.
GROWN = """k = Concat<axis = 1>(past, x) t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(x, t) p = Softmax(s)
  y = MatMul(p, k) before = Shape(past) after = Shape(k) total = Add(before, after) seen = Cast<to = 9>(past)"""
INSIDE = """float[N,P,4] past, float[N,S,4] x"""
GIVEN = """float[N,S,4] y, float[N,T,4] k, int64[3] total, bool[N,P,4] seen"""
TEXTS = {
    "here": f"m ({INSIDE}) => ({GIVEN}) {{ {GROWN} }}",
    "in a branch": f"""m (bool c, {INSIDE}) => ({GIVEN}) {{ y, k, total, seen = If(c)
      <then_branch = t () => ({GIVEN}) {{ {GROWN} }}, else_branch = e () => (float[N,S,4] y2, float[N,P,4] k2,
       int64[3] total2, bool[N,P,4] seen2)
       {{ y2 = Neg(x) k2 = Neg(past) total2 = Shape(past) seen2 = Cast<to = 9>(past) }}> }}""",
    "behind a branch": f"""m (bool c, {INSIDE}) => (int64[3] total, {GIVEN.replace(", int64[3] total", "")})
      {{ {GROWN.replace("total = Add(before, after)", "")} total = If(c)
      <then_branch = t () => (int64[3] a) {{ q = Shape(k) a = Add(q, after) }},
       else_branch = e () => (int64[3] b) {{ r = Shape(past) b = Add(r, before) }}> }}""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_cache_is_not_widened_for_its_shape(name: str) -> None:
    model = filled(TEXTS[name])
    program = amp.convert(model, keep_io=False)
    program.verify()
    assert [op.label for op in program.walk() if op.full_type == "Cast" and op.inserted] == []
    assert {v.dtype for v in program.variables if v.name in ("past", "x", "y", "k")} == {"float16"}
    past, x = np.ones((1, 3, 4), np.float16), np.ones((1, 2, 4), np.float16)
    past[0, 0, 0] = 0
    for choice in (True, False):
        feed = {"c": np.array(choice), "past": past, "x": x}
        found, wanted = (
            ort.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(
                ["y", "k", "total", "seen"],
                {i.name: feed[i.name].astype(t) for i in each.graph.input for t in [bool if i.name == "c" else kind]},
            )
            for each, kind in ((program.to_onnx(), np.float16), (model, np.float32))
        )
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-3)


def test_what_computes_in_float32_is_given_float32() -> None:
    text = f"m ({INSIDE}) => ({GIVEN}, float[N,P,4] e) {{ {GROWN} e = Exp(past) }}"
    program = amp.convert(filled(text), keep_io=["e"], black_list=["Exp"])
    assert [op.outputs[0].name for op in program.operators if op.inserted] == ["past.cast_fp32"]
    assert [op.type for op, _ in program.var("past.cast_fp32").readers] == ["Exp"]


def test_a_tensor_that_is_an_output_twice_becomes_16_bit_in_both_places() -> None:
    model = filled("m (float[2,4] x) => (float[2,4] y, float[2,4] y) { y = Relu(x) }")
    made = amp.convert(model, keep_io=False).to_onnx()
    assert [output.name for output in made.graph.output] == ["y", "y"]
    x = np.linspace(-1, 1, 8, dtype=np.float16).reshape(2, 4)
    (y,) = session(made).run(["y"], {"x": x})
    np.testing.assert_array_equal(y, np.maximum(x, 0))


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("pure", "(float[2,16] x, int64[4,2] at) => (float[4] y) { s = Softmax(x)  y = GatherND(s, at) }"),
        (
            "pure",
            "(float[2,16] x) => (float[2,16,2] y) <int64[1] a = {2}> { t = Unsqueeze(x, a)  y = DFT<axis = 1>(t) }",
        ),
        ("mixed", "(float[8] x) => (int8[8] y) <float s = {0.01}, int8 z = {0}> { y = QuantizeLinear(x, s, z) }"),
    ],
)
def test_a_second_conversion_changes_nothing(mode: str, text: str) -> None:
    """Nor a reason, nor the opset: inputs and outputs in 16 bit are near what reads and makes them from the start."""
    once = amp.convert(filled(f"m {text}"), mode=mode, keep_io=False).to_onnx()
    assert amp.convert(once, mode=mode, keep_io=False).to_onnx() == once
