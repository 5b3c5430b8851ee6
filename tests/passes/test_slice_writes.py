"""Assignments to slices are Concats and sums: the same numbers and slopes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.slice_writes import write_slices
from tests.helpers.slopes import assert_slope, assert_stays, slope

HEAD = '<ir_version: 8, opset_import: ["" : 18]> g (float[2, 3, 5] x) => (float[{shape}] y) '
HEAD += "<int64[2, 1] low = {{0, 1}}, int64[3, 1] high = {{2, 3, 4}}, int64[3, 1] behind = {{-3, -2, -1}}, int64[3, 1] middle = {{1, 2, 3}}, "
HEAD += "int64[3, 1] beyond = {{3, 4, 5}}, int64[2, 1] turned = {{1, 0}}, int64[2, 1] apart = {{0, 2}}, int64[2, 1] last = {{1, 2}}, int64[3] whole = {{2, 3, 5}}, int64[3] rows = {{5, 3, 2}}, "
HEAD += "int64[2] sizes = {{2, 3}}, float two = {{2}}, int64[1] i1 = {{1}}, int64[1] i2 = {{2}}, int64[1] i3 = {{3}}, int64[1] i5 = {{5}}, "
HEAD += "int64[1] most = {{9223372036854775807}}, int64[2, 2, 2] corner = {{1, 1, 1, 2, 0, 1, 0, 2}}, "
HEAD += "int64[2, 2, 2] block = {{0, 1, 0, 2, 1, 1, 1, 2}}, int64[2, 3, 2, 3] places = {{{places}}}> {{ "
HEAD += "a, b0 = Split <axis = 2> (x, sizes)  b = Mul(b0, two)  "
#: x[:, :, 1:3], as TorchScript names each element of it.
PLACES = np.moveaxis(np.indices((2, 3, 2)), 0, -1) + [0, 0, 1]
#: As torch.onnx writes ``k[..., :2] = a`` and ``k[..., 2:] = b``.
EMPTY = "z = ConstantOfShape(whole)  e = Transpose <perm = [2, 1, 0]> (z)  "
TURNED = "at = Transpose <perm = [2, 1, 0]> (a)  bt = Transpose <perm = [2, 1, 0]> (b)  "
BOTH = EMPTY + TURNED
#: And how it writes ``q[:, 1:, 2:] += c``: each axis in the other, and the whole once more over itself.
AGAIN = """q = Tanh(x)  q1 = Slice(q, i1, most, i1)  q12 = Slice(q1, i2, most, i2)  c = Mul(q12, two)  n = Add(q12, c)
  nt = Transpose <perm = [2, 1, 0]> (n)  q1t = Transpose <perm = [2, 1, 0]> (q1)  s1 = ScatterND(q1t, high, nt)
  s1t = Transpose <perm = [1, 2, 0]> (s1)  qt = Transpose <perm = [1, 0, 2]> (q)  s2 = ScatterND(qt, last, s1t)
  p = Transpose <perm = [1, 0, 2]> (s2)
  p1 = Slice(p, i1, most, i1)  p12 = Slice(p1, i2, i5, i2)
  p12t = Transpose <perm = [2, 1, 0]> (p12)  p1t = Transpose <perm = [2, 1, 0]> (p1)  s3 = ScatterND(p1t, high, p12t)
  s3t = Transpose <perm = [1, 2, 0]> (s3)  pt = Transpose <perm = [1, 0, 2]> (p)  s4 = ScatterND(pt, last, s3t)
  y = Transpose <perm = [1, 0, 2]> (s4)"""
#: And ``for t in range(3): o[:, t] = tanh(x[:, t]) + o[:, t - 1]``.
TURNS = """o = ConstantOfShape(whole)
  x0 = Gather <axis = 1> (x, t0)  h0 = Tanh(x0)  u0 = Unsqueeze(h0, i1)  w0 = ScatterElements <axis = 1> (o, row0, u0)
  x1 = Gather <axis = 1> (x, t1)  h1 = Tanh(x1)  l0 = Gather <axis = 1> (w0, t0)  a1 = Add(h1, l0)  u1 = Unsqueeze(a1, i1)
  w1 = ScatterElements <axis = -2> (w0, row1, u1)
  x2 = Gather <axis = 1> (x, t2)  h2 = Tanh(x2)  l1 = Gather <axis = 1> (w1, t1)  a2 = Add(h2, l1)  u2 = Unsqueeze(a2, i1)
  y = ScatterElements <axis = 1> (w1, row2, u2)"""
WHOLE = {"Concat": 1}
#: What is left of each: ScatterND counts for nothing, Split and Mul are those of the head.
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "and turned back": (
        BOTH + "p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
        WHOLE,
    ),
    "behind": (
        BOTH + "p = ScatterND(e, low, at)  q = ScatterND(p, behind, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
        WHOLE,
    ),
    "in another order": (
        BOTH + "p = ScatterND(e, high, bt)  q = ScatterND(p, low, at)  y = Transpose <perm = [2, 1, 0]> (q)",
        WHOLE,
    ),
    "and turned elsewhere": (
        BOTH + "p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  y = Transpose <perm = [2, 0, 1]> (q)",
        {"Concat": 1, "Transpose": 1},
    ),
    "and read as it is": (
        BOTH + "p = ScatterND(e, low, at)  y = ScatterND(p, high, bt)",
        {"Concat": 1, "Transpose": 1},
    ),
    "turned between": (
        BOTH
        + """p = ScatterND(e, low, at)  r = Transpose <perm = [1, 2, 0]> (p)  f = Transpose <perm = [2, 0, 1]> (r)  q = ScatterND(f, high, bt)
    y = Transpose <perm = [2, 1, 0]> (q)""",
        WHOLE,
    ),
    "turned three times between": (
        BOTH
        + """p = ScatterND(e, low, at)  r = Transpose <perm = [1, 2, 0]> (p)  f = Transpose <perm = [1, 2, 0]> (r)  h = Transpose <perm = [1, 2, 0]> (f)
    q = ScatterND(h, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)""",
        WHOLE,
    ),
    "read twice": (
        BOTH
        + "p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  n = Neg(q)  m = Mul(q, n)  y = Transpose <perm = [2, 1, 0]> (m)",
        {"Concat": 1, "Transpose": 2, "Neg": 1, "Mul": 1},
    ),
    "turned in two ways": (
        EMPTY
        + """at = Transpose <perm = [2, 1, 0]> (a)  b1 = Transpose <perm = [0, 2, 1]> (b)  bt = Transpose <perm = [1, 2, 0]> (b1)
    p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)""",
        WHOLE,
    ),
    "half filled and read": (
        BOTH
        + "p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  s = Add(p, q)  y = Transpose <perm = [2, 1, 0]> (s)",
        {"Concat": 2, "Slice": 1, "ConstantOfShape": 1, "Transpose": 3, "Add": 1},
    ),
    "with rows left": (
        BOTH + "q = ScatterND(e, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
        {"Concat": 1, "Slice": 1, "ConstantOfShape": 1, "Transpose": 1},  # of a, which nothing reads
    ),
    "with rows left on both sides": (
        "xt = Transpose <perm = [2, 1, 0]> (x)  bt = Transpose <perm = [2, 1, 0]> (b)  q = ScatterND(xt, middle, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
        {"Concat": 1, "Slice": 2},
    ),
    "with rows twice": (
        BOTH + "p = ScatterND(e, low, at)  q = ScatterND(p, middle, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
        {"Concat": 1, "Slice": 2, "ConstantOfShape": 1},
    ),
    "and pieces read": (
        BOTH
        + """p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  r = Transpose <perm = [2, 1, 0]> (q)
        r1 = Slice(r, i2, i5, i2)  r2 = Slice(r, i3, i5, i2)  s = ReduceSum <keepdims = 1> (r2, i2)  t = Mul(r1, s)  u = ReduceMax <keepdims = 1> (t, i2)  y = Add(r, u)""",
        {"Concat": 1, "Slice": 1, "ReduceSum": 1, "Mul": 1, "ReduceMax": 1, "Add": 1},
    ),
    "and added to, along two axes": (AGAIN, {"Tanh": 1, "Slice": 2, "Mul": 1, "Add": 1, "Pad": 1}),
    "and added to, by one more reader": (
        AGAIN.replace(
            "y = Transpose <perm = [1, 0, 2]> (s4)",
            "v = Transpose <perm = [1, 0, 2]> (s4)  k = ReduceSum(n)  y = Mul(v, k)",
        ),
        {"Tanh": 1, "Slice": 2, "Mul": 2, "Add": 2, "Pad": 1, "ReduceSum": 1},
    ),
    "and added to by one number for a row": (
        AGAIN.replace("c = Mul(q12, two)", "c = ReduceSum(q12, i2)"),
        {"Tanh": 1, "Slice": 4, "ReduceSum": 1, "Add": 1, "Concat": 2},
    ),
    "and multiplied": (
        AGAIN.replace("n = Add(q12, c)", "n = Mul(q12, c)"),
        {"Tanh": 1, "Slice": 4, "Mul": 2, "Concat": 2},
    ),
    "and taken from": (
        AGAIN.replace("n = Add(q12, c)", "n = Sub(q12, c)"),
        {"Tanh": 1, "Slice": 4, "Mul": 1, "Sub": 1, "Concat": 2},
    ),
    "element by element": ("at = Sin(a)  y = ScatterND(x, places, at)", {"Concat": 1, "Slice": 2, "Sin": 1}),
    "rows along two axes": (
        "c = Slice(x, i1, i3, i1)  ct = Sin(c)  y = ScatterND(x, block, ct)",
        {"Concat": 1, "Slice": 2, "Sin": 1},
    ),
    "turn by turn": (
        TURNS,
        {"ConstantOfShape": 0, "Gather": 3, "Tanh": 3, "Unsqueeze": 3, "Squeeze": 2, "Add": 2, "Concat": 1},
    ),
    "some turns": (
        TURNS.replace(
            "y = ScatterElements <axis = 1> (w1, row2, u2)", "m = ReduceMax <keepdims = 1> (u2, i1)  y = Add(w1, m)"
        ),
        {
            "ConstantOfShape": 1,
            "Slice": 1,
            "Gather": 3,
            "Tanh": 3,
            "Unsqueeze": 3,
            "Squeeze": 2,
            "Add": 3,
            "Concat": 1,
            "ReduceMax": 1,
        },
    ),
    "twice the same": (
        "t = Tanh(x)  q = Slice(t, i1, i3, i2)  c = Mul(q, two)  n = Add(q, c)  w = ScatterND(t, places, n)  y = ScatterND(w, places, n)",
        {"Tanh": 1, "Slice": 1, "Mul": 1, "Add": 1, "Pad": 1},
    ),
    "the whole, by its own": ("t = Tanh(x)  y = ScatterND(t, all, x)", {"Identity": 1}),
}
HEAD_ONLY = {"Split": 1, "Mul": 1}
STAYS = {
    "not in order": BOTH + "q = ScatterND(e, turned, at)  y = Transpose <perm = [2, 1, 0]> (q)",
    "with rows between": BOTH + "q = ScatterND(e, apart, at)  y = Transpose <perm = [2, 1, 0]> (q)",
    "places that are not a block": "c = Slice(x, i1, i3, i1)  y = ScatterND(x, corner, c)",
    "places that there are not": BOTH + "q = ScatterND(e, beyond, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
    "turns of each example": "h = ReduceMax <keepdims = 1> (x, i1)  y = ScatterElements <axis = 1> (x, mixed, h)",
    "turns of the first example": "h = Slice(x, i1, i2, i1)  g = Slice(h, i1, i2, begin)  y = ScatterElements <axis = 1> (x, first, g)",
    "turns that there are not": "h = ReduceMax <keepdims = 1> (x, i1)  y = ScatterElements <axis = 1> (x, row3, h)",
    "turns that are added": """h = ReduceMax <keepdims = 1> (x, i1)  y = ScatterElements <axis = 1, reduction = "add"> (x, row1, h)""",
    "and added": BOTH + """q = ScatterND <reduction = "add"> (e, low, at)  y = Transpose <perm = [2, 1, 0]> (q)""",
    "places that are computed": BOTH
    + "m = ReduceSum <keepdims = 0> (x)  k = Mul(m, m)  n = Cast <to = 7> (k)  zero = Sub(n, n)  l = Add(low, zero)  q = ScatterND(e, l, at)  y = Transpose <perm = [2, 1, 0]> (q)",
}
SHAPES = {"and turned elsewhere": "5, 2, 3", "and read as it is": "5, 3, 2"}
X = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)


def program(name: str) -> amp.Program:
    body = CASES[name][0] if name in CASES else STAYS[name]
    head = HEAD.format(shape=SHAPES.get(name, "2, 3, 5"), places=", ".join(map(str, PLACES.ravel())))
    turns = [[f"{t}"] * 10 for t in (0, 1, -1, 3)]
    more = [f"int64[2, 1, 5] row{t} = {{{', '.join(row)}}}" for t, row in enumerate(turns)]
    more += [
        f"int64[2, 1, 5] mixed = {{{', '.join(turns[0][:5] + turns[1][:5])}}}",
        "int64[1, 1, 5] first = {1, 1, 1, 1, 1}",
    ]
    more += [*(f"int64 t{t} = {{{t}}}" for t in range(3)), "int64[1] begin = {0}"]
    head = head.replace("float two", f"{', '.join(more)}, float two").replace(
        "float two", "int64[2, 1] all = {0, 1}, float two"
    )
    return amp.Program.from_onnx(onnx.parser.parse_model(f"{head} {body} }}"))


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_slopes_are_the_same(name: str) -> None:
    body, left = CASES[name]
    expected = slope(program(name), X)
    found = program(name)
    count = body.count("ScatterND") + body.count("ScatterElements")
    assert write_slices(found) == [f"{count} assignments to slices are joined with what they leave, or added to it"]
    found.verify()
    kinds = Counter(op.type for op in found.operators)
    assert kinds - Counter(HEAD_ONLY) == Counter(left) - (Counter(HEAD_ONLY) - kinds)
    assert_slope(found, X, expected)


@pytest.mark.parametrize("name", STAYS)
def test_what_is_only_like_it_stays(name: str) -> None:
    assert_stays(program(name), write_slices)
