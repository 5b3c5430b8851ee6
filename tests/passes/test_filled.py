"""Tensors that are filled piece by piece are one Concat: the same numbers and slopes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.filled import join_pieces
from tests.helpers.slopes import assert_slope, assert_stays, slope

HEAD = '<ir_version: 8, opset_import: ["" : 18]> g (float[2, 3, 5] x) => (float[{shape}] y) '
HEAD += "<int64[2, 1] low = {{0, 1}}, int64[3, 1] high = {{2, 3, 4}}, int64[3, 1] middle = {{1, 2, 3}}, int64[2, 1] turned = {{1, 0}}, "
HEAD += "int64[3] whole = {{2, 3, 5}}, int64[3] rows = {{5, 3, 2}}, int64[2] sizes = {{2, 3}}, float two = {{2}}> {{ "
HEAD += "a, b0 = Split <axis = 2> (x, sizes)  b = Mul(b0, two)  "
#: As torch.onnx writes ``k[..., :2] = a`` and ``k[..., 2:] = b``.
EMPTY = "z = ConstantOfShape(whole)  e = Transpose <perm = [2, 1, 0]> (z)  "
TURNED = "at = Transpose <perm = [2, 1, 0]> (a)  bt = Transpose <perm = [2, 1, 0]> (b)  "
FILLED = {
    "and turned back": EMPTY
    + TURNED
    + "p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
    "in another order": EMPTY
    + TURNED
    + "p = ScatterND(e, high, bt)  q = ScatterND(p, low, at)  y = Transpose <perm = [2, 1, 0]> (q)",
    "and turned elsewhere": EMPTY
    + TURNED
    + "p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  y = Transpose <perm = [2, 0, 1]> (q)",
    "and read as it is": EMPTY + TURNED + "p = ScatterND(e, low, at)  y = ScatterND(p, high, bt)",
    "turned between": EMPTY
    + TURNED
    + """p = ScatterND(e, low, at)  r = Transpose <perm = [1, 2, 0]> (p)  f = Transpose <perm = [2, 0, 1]> (r)  q = ScatterND(f, high, bt)
    y = Transpose <perm = [2, 1, 0]> (q)""",
    "read twice": EMPTY
    + TURNED
    + "p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  n = Neg(q)  m = Mul(q, n)  y = Transpose <perm = [2, 1, 0]> (m)",
    "turned in two ways": EMPTY
    + """at = Transpose <perm = [2, 1, 0]> (a)  b1 = Transpose <perm = [0, 2, 1]> (b)  bt = Transpose <perm = [1, 2, 0]> (b1)
    p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)""",
}
STAYS = {
    "with rows left": EMPTY + TURNED + "q = ScatterND(e, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
    "with rows twice": EMPTY
    + TURNED
    + "p = ScatterND(e, low, at)  q = ScatterND(p, middle, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
    "not in order": EMPTY
    + TURNED
    + "p = ScatterND(e, turned, at)  q = ScatterND(p, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)",
    "and added": EMPTY
    + TURNED
    + """p = ScatterND <reduction = "add"> (e, low, at)  q = ScatterND(p, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)""",
    "turned three times between": EMPTY
    + TURNED
    + """p = ScatterND(e, low, at)  r = Transpose <perm = [1, 2, 0]> (p)  f = Transpose <perm = [1, 2, 0]> (r)  h = Transpose <perm = [1, 2, 0]> (f)
    q = ScatterND(h, high, bt)  y = Transpose <perm = [2, 1, 0]> (q)""",
    "half filled and read": EMPTY
    + TURNED
    + "p = ScatterND(e, low, at)  q = ScatterND(p, high, bt)  s = Add(p, q)  y = Transpose <perm = [2, 1, 0]> (s)",
}
SHAPES = {"and turned elsewhere": "5, 2, 3", "and read as it is": "5, 3, 2"}
X = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)


def program(name: str) -> amp.Program:
    text = HEAD.format(shape=SHAPES.get(name, "2, 3, 5")) + {**FILLED, **STAYS}[name] + " }"
    return amp.Program.from_onnx(onnx.parser.parse_model(text))


@pytest.mark.parametrize("name", FILLED)
def test_it_is_one_concat(name: str) -> None:
    expected = slope(program(name), X)
    found = program(name)
    assert join_pieces(found) == ["1 tensors that were filled piece by piece are put together at once"]
    kinds = [op.type for op in found.operators]
    assert kinds.count("Concat") == 1 and "ScatterND" not in kinds and "ConstantOfShape" not in kinds
    assert_slope(found, X, expected)


@pytest.mark.parametrize("name", STAYS)
def test_what_is_only_like_it_stays(name: str) -> None:
    assert_stays(program(name), join_pieces)
