"""Slices and picked elements that make up a tensor are one Split; others stay as they are."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.whole_splits import split_wholes
from tests.helpers.slopes import assert_slope, assert_stays, slope

HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[batch, 3, 6] x) => (float[a, b, c] y) '
HEAD += "<int64[1] none = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] all = {9223372036854775807}, "
HEAD += (
    "int64[1] last = {-1}, int64[1] back = {-2}, int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {-1}, int64[1] i3 = {1}> "
)
THIRDS = "a = Slice(x, none, one, one)  b = Slice(x, one, two, one, one)  c = Slice(x, two, all, one, one)  "
WHOLES = {
    "thirds": "{" + THIRDS + "p = Mul(a, b)  y = Sub(p, c) }",
    "in another order": "{ c = Slice(x, two, all, one)  a = Slice(x, none, one, one)  b = Slice(x, one, two, one)"
    "  p = Mul(a, b)  y = Sub(p, c) }",
    "of several sizes, from the end": "{ a = Slice(x, none, back, last)  b = Slice(x, back, all, two)  s = ReduceSum(a, last)"
    "  y = Mul(s, b) }",
    "picked": "{ a = Gather <axis = 1> (x, i0)  b = Gather <axis = 1> (x, i1)  c = Gather <axis = -2> (x, i2)"
    "  p = Mul(a, b)  q = Sub(p, c)  y = Unsqueeze(q, one) }",
    "picked and sliced": "{ a = Slice(x, none, one, one)  b = Gather <axis = 1> (x, i3)  c = Gather <axis = 1> (x, i2)"
    "  p = Mul(a, b)  q = Unsqueeze(c, one)  y = Sub(p, q) }",
    "read whole too": "{" + THIRDS + "p = Mul(a, b)  q = Sub(p, c)  y = Mul(q, x) }",
}
OTHERS = {
    "a piece is missing": "{ a = Slice(x, none, one, one)  c = Slice(x, two, all, one)  y = Sub(a, c) }",
    "they overlap": "{ a = Slice(x, none, two, one)  c = Slice(x, one, all, one)  y = Sub(a, c) }",
    "one twice": "{" + THIRDS + "d = Slice(x, none, one, one)  p = Mul(a, b)  q = Sub(p, c)  y = Add(q, d) }",
    "along two axes": "{ a = Slice(x, none, one, one)  b = Slice(x, one, all, two)  p = ReduceSum(b, two)  y = Sub(a, p) }",
    "every other": "{ a = Slice(x, none, all, two, two)  b = Slice(x, one, all, two, two)  y = Sub(a, b) }",
    "of an open size": "{ a = Slice(x, none, one, none)  b = Slice(x, one, all, none)  y = Sub(b, a) }",
    "of sizes": "{ s = Shape(x)  d = Gather(s, i0)  e = Gather(s, i1)  f = Gather(s, i2)  p = Mul(d, e)  q = Mul(p, f)"
    "  r = CastLike(q, x)  y = Mul(x, r) }",
    "the whole": "{ a = Slice(x, none, all, one)  y = Neg(a) }",
}


def program(body: str) -> amp.Program:
    model = onnx.parser.parse_model(HEAD + body)
    for number, node in enumerate(model.graph.node):
        node.name = f"node {number}"
    return amp.Program.from_onnx(model)


@pytest.mark.parametrize("name", WHOLES)
def test_it_is_one_split(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    expected = slope(program(WHOLES[name]), x)
    found = program(WHOLES[name])
    assert split_wholes(found) == ["1 tensors that were cut into all their pieces are split at once"]
    kinds = [op.type for op in found.operators]
    assert kinds.count("Split") == 1 and not {"Slice", "Gather"} & set(kinds)
    assert not split_wholes(found)
    assert_slope(found, x, expected, 1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name: str) -> None:
    assert_stays(program(OTHERS[name]), split_wholes)


def test_an_imported_model_is_trained_with_the_split() -> None:
    weight = ", ".join(["0.1"] * 36)
    body = "{ z = MatMul(x, w)  a = Slice(z, none, one, one)  c = Slice(z, one, all, one)  p = ReduceSum(c, one)  y = Sub(a, p) }"
    head = HEAD.replace("<int64[1] none", f"<float[6, 6] w = {{{weight}}}, int64[1] none")
    found = amp.Program.from_onnx(onnx.parser.parse_model(head + body))
    assert any("split at once" in note for note in amp.prepare_training(found).notes)


AGAIN = "{ a, b, c = Split <axis = 1> (x, ones)  d, e, f = Split <axis = 1> (x, ones)  "
TWICE = {
    "each for a piece": AGAIN + "p = Mul(a, e)  y = Sub(p, c) }",
    "by other constants": AGAIN.replace("(x, ones)  d", "(x, units)  d") + "p = Mul(a, e)  y = Sub(p, f) }",
    "into equal parts": AGAIN.replace("axis = 1> (x, ones)", "axis = 1, num_outputs = 3> (x)") + "y = Mul(d, b) }",
}
APART = {
    "along another axis": AGAIN.replace("axis = 1> (x, ones)  d", "axis = 2> (x, pairs)  d") + "p = Sub(b, d)  "
    "q = ReduceSum(p, two)  y = Mul(q, a) }",
    "of another tensor": AGAIN.replace("d, e, f = Split <axis = 1> (x", "n = Neg(x)  d, e, f = Split <axis = 1> (n")
    + "p = Mul(a, e)  y = Sub(p, c) }",
    "into other pieces": AGAIN.replace("axis = 1> (x, ones)  d, e, f", "axis = 2> (x, pairs)  d, e, f").replace(
        "axis = 1> (x, ones)", "axis = 2> (x, uneven)"
    )
    + "p = Mul(b, e)  y = Sub(p, f) }",
    "one of which is an output": AGAIN.replace("d, e, f", "d, e, y") + "p = Mul(a, b) }",
}
SIZES = (
    "<int64[3] ones = {1, 1, 1}, int64[3] units = {1, 1, 1}, int64[3] pairs = {2, 2, 2}, int64[3] uneven = {1, 2, 3}, "
)


def split_twice(body: str) -> amp.Program:
    return amp.Program.from_onnx(
        onnx.parser.parse_model(HEAD.replace("<int64[1] none", f"{SIZES}int64[1] none") + body)
    )


@pytest.mark.parametrize("name", TWICE)
def test_what_is_split_twice_is_split_once(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    expected = slope(split_twice(TWICE[name]), x)
    found = split_twice(TWICE[name])
    assert len(split_wholes(found)) == 1 and not split_wholes(found)
    assert [op.type for op in found.operators].count("Split") == 1
    assert all(v.readers or v.name in "abcy" for v in found.variables if v.producer is not None)
    assert_slope(found, x, expected, 1e-6)


@pytest.mark.parametrize("name", APART)
def test_splits_that_differ_stay(name: str) -> None:
    assert_stays(split_twice(APART[name]), split_wholes)
