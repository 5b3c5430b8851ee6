"""Norms that people write out, along any axes and in many forms, are one operator: the same numbers and slopes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.converting import behind_weights, off

#: A norm of the channels of images by hand, as SAM and ConvNeXt have it, and numbers that the cases below put in.
CHANNELS = """<ir_version: 8, opset_import: ["" : 18]>
net (float[2,6,3,5] x) => (float[2,6,3,5] y)
  <float[6,1,1] g = {0.5, 1.0, 1.5, 2.0, 0.7, 0.9}, float[1,6,1,1] b = {0.1, 0.2, 0.3, -0.1, -0.2, -0.3}, float[6] h = {3, 1, 2, 2, 3, 1},
   float eps = {1e-6}, float one = {1}, float n = {6}, float less = {5}, float inverse = {0.16666667},
   int64[1] axis = {1}, int64[4] sizes = {2, 1, 3, 5}, int64[2] behind = {1, 2}>
{
  m = ReduceMean(x, axis)
  d = Sub(x, m)
  s = Mul(d, d)
  v = ReduceMean(s, axis)
  ve = Add(v, eps)
  r = Sqrt(ve)
  q = Div(d, r)
  qg = Mul(q, g)
  y = Add(qg, b)
}"""
MOVED = ["LayerNormalization", "Transpose", "Transpose"]


def trained(model: onnx.ModelProto, prepare: bool, feed: np.ndarray) -> tuple[list[str], dict[str, np.ndarray]]:
    """The operators of a program, and its outputs and gradients by name."""
    program = amp.Program.from_onnx(model)
    if prepare:
        amp.prepare_training(program)
    else:
        for name in ("g", "b", "h"):
            if program.has_var(name):
                program.var(name).persistable = program.var(name).trainable = True
    program.verify()
    kinds = sorted(op.type for op in program.operators if op.type != "Reshape")
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0] * F.sin(program.outputs[0]))
        pairs = amp.append_backward(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    names = [weight.name for weight, _ in pairs]
    found = executor.run(program, feed={"x": feed}, fetch_list=["y", *(g for _, g in pairs)], scope=scope)
    return kinds, dict(zip(["y", *names], (np.asarray(v) for v in found), strict=True))


@pytest.mark.parametrize(
    "change, kinds",
    [
        (("", ""), MOVED),
        (("Mul(d, d)", "Pow(d, two)"), MOVED),
        (("Mul(q, g)", "Mul(g, q)"), MOVED),
        (("r = Sqrt(ve)\n  q = Div(d, r)", "r = Sqrt(ve)  i = Reciprocal(r)\n  q = Mul(i, d)"), MOVED),
        (("r = Sqrt(ve)\n  q = Div(d, r)", "r = Sqrt(ve)  i = Div(one, r)\n  q = Mul(d, i)"), MOVED),
        (("q = Div(d, r)\n  qg = Mul(q, g)", "dg = Mul(g, d)\n  qg = Div(dg, r)"), MOVED),
        (("Add(v, eps)", "Add(eps, v)"), MOVED),
        # no bias, no scale, neither, a bias beyond a product, a scale of images
        (("y = Add(qg, b)", "y = Relu(qg)"), [*MOVED[:1], "Relu", *MOVED[1:]]),
        (("qg = Mul(q, g)\n  y = Add(qg, b)", "y = Add(q, b)"), MOVED),
        (("qg = Mul(q, g)\n  y = Add(qg, b)", "qs = Sin(q)  y = Add(qs, b)"), ["Add", *MOVED[:1], "Sin", *MOVED[1:]]),
        (("Mul(q, g)", "Mul(q, q)"), ["Add", *MOVED[:1], "Mul", *MOVED[1:]]),
        (("Mul(q, g)", "Mul(q, x)"), ["Add", *MOVED[:1], "Mul", *MOVED[1:]]),
        (("Mul(q, g)", "Mul(q, n)"), ["Add", *MOVED[:1], "Mul", *MOVED[1:]]),
        (
            ("float[6,1,1] g = {0.5, 1.0, 1.5, 2.0, 0.7, 0.9}", "float[5] g = {0.5, 1.0, 1.5, 2.0, 0.7}"),
            ["Add", *MOVED[:1], "Mul", *MOVED[1:]],
        ),
        # weights that get their dimensions of 1 in the graph
        (("qg = Mul(q, g)", "gg = Unsqueeze(h, behind)  qg = Mul(q, gg)"), MOVED),
        # reductions without the dimension, a mean as a sum, one taken twice, a variance by one less
        (("v = ReduceMean(s, axis)", "v3 = ReduceMean <keepdims = 0> (s, axis)  v = Reshape(v3, sizes)"), MOVED),
        (("v = ReduceMean(s, axis)", "v3 = ReduceMean <keepdims = 0> (s, axis)  v = Unsqueeze(v3, axis)"), MOVED),
        (("m = ReduceMean(x, axis)", "m6 = ReduceSum(x, axis)  m = Div(m6, n)"), MOVED),
        (("m = ReduceMean(x, axis)", "m6 = ReduceSum(x, axis)  m = Mul(m6, inverse)"), MOVED),
        (("m = ReduceMean(x, axis)", "m6 = ReduceSum(x, axis)  m = Mul(inverse, m6)"), MOVED),
        (("s = Mul(d, d)", "m2 = ReduceMean(x, axis)  d2 = Sub(x, m2)  s = Mul(d2, d2)"), MOVED),
        (
            ("v = ReduceMean(s, axis)", "v1 = ReduceMean(s, axis)  v6 = Mul(v1, n)  v = Div(v6, less)"),
            [*MOVED[:1], "Mul", *MOVED[1:]],
        ),
        # along two axes, along the last ones
        (("{1}, int64[4] sizes", "{3}, int64[4] sizes"), ["Add", "LayerNormalization", "Mul"]),
        (("int64[1] axis = {1}", "int64[2] axis = {1, 2}"), ["Add", *MOVED[:1], "Mul", *MOVED[1:]]),
        (("int64[1] axis = {1}", "int64[2] axis = {-1, -2}"), ["Add", "LayerNormalization", "Mul"]),
    ],
)
def test_norms_along_any_axes_by_hand(change: tuple[str, str], kinds: list[str]) -> None:
    """One operator, with the values and gradients of what was written, in fp32, and those of fp32 in float16."""
    assert change[0] in CHANNELS
    text = CHANNELS.replace(*change).replace("float one", "float two = {2}, float one")
    model = onnx.parser.parse_model(text)
    feed = np.random.default_rng(0).normal(3, 4, (2, 6, 3, 5)).astype(np.float32)
    (_, wanted), (found_kinds, found) = (trained(model, prepare, feed) for prepare in (False, True))
    assert found_kinds == sorted(kinds)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    behind, weights = behind_weights(model)
    converted = amp.convert(behind)
    assert "LayerNormalization" in {op.type for op in converted.operators}
    left = [op for op in converted.operators if op.type in ("ReduceMean", "Sqrt", "Reshape")]
    assert not left and sum(op.type == "Cast" for op in converted.operators) == 2
    session = ort.InferenceSession(converted.to_onnx().SerializeToString(), providers=["CPUExecutionProvider"])
    assert off(session.run(["y"], {"fed": feed / weights})[0], wanted["y"]) < 4e-3


@pytest.mark.parametrize(
    "change",
    [
        ("int64[1] axis = {1}", "int64[2] axis = {1, 3}"),
        ("v = ReduceMean(s, axis)", "v = ReduceMean(s, other)"),
        ("v = ReduceMean(s, axis)", "v1 = ReduceMean(s, axis)  v = Mul(v1, minus)"),
        ("v = ReduceMean(s, axis)", "v1 = ReduceMean(s, axis)  v = Mul(v1, x)"),
        ("m = ReduceMean(x, axis)", "m6 = ReduceSum(x, axis)  m = Div(m6, less)"),
        ("s = Mul(d, d)", "m2 = ReduceMean(x, other)  d2 = Sub(x, m2)  s = Mul(d2, d2)"),
        ("s = Mul(d, d)", "s = Mul(x, x)"),
        ("q = Div(d, r)", "q = Div(x, r)"),
        ("q = Div(d, r)", "q = Div(r, d)"),
        ("q = Div(d, r)", "i = Div(n, r)  q = Mul(d, i)"),
        ("Sqrt(ve)", "Exp(ve)"),
        ("Add(v, eps)", "Add(v, x)"),
    ],
)
def test_what_is_no_norm_along_an_axis_stays(change: tuple[str, str]) -> None:
    assert change[0] in CHANNELS
    text = CHANNELS.replace(*change).replace("float one", "int64[1] other = {2}, float minus = {-1}, float one")
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    amp.prepare_training(program)
    assert "LayerNormalization" not in {op.type for op in program.operators}


@pytest.mark.parametrize("name", ["m", "d", "s", "v", "ve", "r", "q", "qg"])
def test_a_variable_inside_that_is_named_keeps_a_norm_written_out(name: str) -> None:
    converted = amp.convert(onnx.parser.parse_model(CHANNELS), black_varnames=[name])
    assert "LayerNormalization" not in {op.type for op in converted.operators}


def test_a_model_has_the_same_names_however_many_were_converted_before() -> None:
    first, second = (amp.convert(onnx.parser.parse_model(CHANNELS)).to_onnx() for _ in range(2))
    assert first == second
