"""A softmax that is written out is one operator in training."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.fuse_softmax import fuse_softmaxes
from tests.helpers.slopes import assert_slope, assert_stays, slope

HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[batch, 8] x) => (float[batch, 8] y) '
HEAD += "<int64[1] last = {-1}, int64[1] first = {0}, int64[2] column = {-1, 1}, int64[2] line = {1, -1}, "
HEAD += "int64[2] as_it_is = {1, 1}, int64[2] wide = {1, 8}> "
LARGEST = "m = ReduceMax <keepdims = 1> (x, last)  d = Sub(x, m)  "
SOFTMAXES = {
    "plain": "{ e = Exp(x)  s = ReduceSum <keepdims = 1> (e, last)  y = Div(e, s) }",
    "shifted": "{ " + LARGEST + "e = Exp(d)  s = ReduceSum <keepdims = 1> (e, last)  y = Div(e, s) }",
    "computed twice, and the axis put back, as of JAX": "{ "
    "m = ReduceMax <keepdims = 0> (x, last)  n = Reshape(m, column)  o = Expand(n, as_it_is)  d = Sub(x, o)  e = Exp(d) "
    "p = ReduceMax <keepdims = 0> (x, last)  q = Reshape(p, column)  d2 = Sub(x, q)  e2 = Exp(d2) "
    "s = ReduceSum <keepdims = 0> (e2, last)  t = Reshape(s, column)  u = Expand(t, wide)  y = Div(e, u) }",
    "along the first axis": "{ e = Exp(x)  s = ReduceSum <keepdims = 1> (e, first)  y = Div(e, s) }",
}
OTHERS = {
    "of another sum": "{ e = Exp(x)  n = Neg(x)  f = Exp(n)  s = ReduceSum <keepdims = 1> (f, last)  y = Div(e, s) }",
    "of the mean": "{ e = Exp(x)  s = ReduceMean <keepdims = 1> (e, last)  y = Div(e, s) }",
    "of the sum of all": "{ e = Exp(x)  s = ReduceSum <keepdims = 1> (e)  y = Div(e, s) }",
    "shifted in one place": "{ "
    + LARGEST
    + "e = Exp(d)  f = Exp(x)  s = ReduceSum <keepdims = 1> (f, last)  y = Div(e, s) }",
}
X = (np.random.default_rng(0).normal(size=(3, 8)) * 3).astype(np.float32)


def program(body: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + body))


@pytest.mark.parametrize("name", SOFTMAXES)
def test_it_is_one_operator(name: str) -> None:
    expected = slope(program(SOFTMAXES[name]), X)
    found = program(SOFTMAXES[name])
    assert fuse_softmaxes(found) == ["1 softmaxes that were written out are one operator each"]
    assert [op.type for op in found.operators] == ["Softmax"]
    (made,) = found.operators
    assert made.input(0) is found.inputs[0] and made.attrs["axis"] == (0 if "first" in name else 1)
    assert_slope(found, X, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert_stays(program(OTHERS[name]), fuse_softmaxes)


def test_a_sum_that_lies_along_another_axis_stays() -> None:
    """Of as many rows as columns, a sum of rows could stand in the place of columns."""
    text = (
        HEAD + "{ e = Exp(x)  s = ReduceSum <keepdims = 0> (e, last)  t = Reshape(s, line)  y = Div(e, t) }"
    ).replace("batch", "8")
    assert_stays(amp.Program.from_onnx(onnx.parser.parse_model(text)), fuse_softmaxes)


@pytest.mark.parametrize(("sizes", "made"), [("wide", "batch, 8"), ("before", "3, batch, 1")])
def test_numbers_that_are_repeated_for_the_quotient_stay(sizes: str, made: str) -> None:
    """The sum of one number, repeated along its axis or before all others, makes more than the softmax of it."""
    text = HEAD.replace("(float[batch, 8] x) => (float[batch, 8] y)", f"(float[batch, 1] x) => (float[{made}] y)")
    text = text.replace("int64[1] first", "int64[3] before = {3, 1, 1}, int64[1] first")
    text += f"{{ e = Exp(x)  s = ReduceSum <keepdims = 1> (e, last)  u = Expand(s, {sizes})  y = Div(e, u) }}"
    assert_stays(amp.Program.from_onnx(onnx.parser.parse_model(text)), fuse_softmaxes)
