"""Rotary positions that exporters wrote out are one operator in training, and written out in what is saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.fuse_rotary import fuse_rotations
from amp_transpiler.passes.canonicalize.opset import convert_opset
from tests.helpers.saved_models import trained_and_saved
from tests.helpers.slopes import assert_slope, assert_stays, slope

BATCH, HEADS, PLACES, SIZE = 2, 3, 5, 8
ANGLES = (np.arange(PLACES)[:, None] / 10000 ** (np.arange(0, SIZE, 2) / SIZE)).astype(np.float32)
HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[{shape}] x) => (float[{shape}] y) '
HEAD += "<float[{table}] f = {{{angles}}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] last = {{-1}}, "
HEAD += "int64 first = {{0}}, int64 second = {{1}}, int64[1] begin = {{0}}, int64[1] end = {{9223372036854775807}}, "
HEAD += "int64[4] twice = {{1, 1, 1, 2}}, int64[3] table = {{0, 0, 8}}, "
HEAD += "int64[5] paired = {{0, 0, 0, 4, 2}}, int64[2] ones = {{1, 1}}, int64[4] whole = {{0, 0, 0, 8}}, "
HEAD += "float scale = {{1.1}}, float minus = {{-1}}, int64[2] halves = {{4, 4}}, int64[2] uneven = {{3, 5}}> "
TABLES = "{ d = Concat <axis = -1> (f, f)  c0 = Cos(d)  s0 = Sin(d)  c = Unsqueeze(c0, one)  s = Unsqueeze(s0, one)  "
TURN = "a, b = Split <axis = -1> (x, halves)  n = Neg(b)  t = Concat <axis = -1> (n, a)  "
TURN += "p = Mul(x, c)  q = Mul(t, s)  y = Add(p, q) }"
PARTS = "a, b = Split <axis = -1> (x, halves)  p = Mul(a, c)  q = Mul(b, s)  r = Sub(p, q)  "
PARTS += "t = Mul(a, s)  u = Mul(b, c)  i = Add(t, u)  y = Concat <axis = -1> (r, i) }"
#: Even and odd numbers turned against each other, cut out by slices or as columns of a view of pairs.
PAIR_TABLES = TABLES.replace(
    "d = Concat <axis = -1> (f, f)", "e = Unsqueeze(f, last)  g = Expand(e, twice)  d = Reshape(g, table)"
)
EVEN_ODD = "a = Slice(x, begin, end, last, two)  b = Slice(x, one, end, last, two)  "
COLUMNS = "v = Reshape(x, paired)  a = Gather <axis = -1> (v, first)  b = Gather <axis = 4> (v, second)  "
SPLIT = "v = Reshape(x, paired)  h, l = Split <axis = -1> (v, ones)  a = Squeeze(h, last)  b = Squeeze(l, last)  "
STACK = "nu = Unsqueeze(n, last)  au = Unsqueeze(a, last)  st = Concat <axis = -1> (nu, au)  t = Reshape(st, whole)  "
PAIR_TURN = "n = Neg(b)  " + STACK + "p = Mul(x, c)  q = Mul(t, s)  y = Add(p, q) }"
PAIR_PARTS = "p = Mul(a, c)  q = Mul(b, s)  r = Sub(p, q)  t = Mul(a, s)  u = Mul(b, c)  i = Add(t, u)  "
PAIR_PARTS += (
    "ru = Unsqueeze(r, last)  iu = Unsqueeze(i, last)  st = Concat <axis = -1> (ru, iu)  y = Reshape(st, whole) }"
)
HALF_TABLES = TABLES.replace("d = Concat <axis = -1> (f, f)", "d = Identity(f)")
ROTATIONS = {
    "as transformers writes it": TABLES + TURN,
    "in another order": TABLES + TURN.replace("x, c", "c, x").replace("t, s", "s, t").replace("p, q", "q, p"),
    "with scaled tables": TABLES.replace("c0 = Cos(d)", "c1 = Cos(d)  c0 = Mul(c1, scale)") + TURN,
    "whose halves are kept apart": TABLES
    + TURN.replace("y =", "m =").replace("}", " k = Concat <axis = 3> (b, a)  y = Mul(m, k) }"),
    "as Paddle writes it": TABLES + TURN.replace("Neg(b)", "Mul(b, minus)"),
    "half by half": HALF_TABLES + PARTS,
    "of neighbours": PAIR_TABLES + EVEN_ODD + PAIR_TURN,
    "of neighbours, tiled": PAIR_TABLES.replace("Expand", "Tile") + EVEN_ODD + PAIR_TURN,
    "of neighbours, stacked": PAIR_TABLES.replace("Expand(e, twice)", "Concat <axis = -1> (e, e)")
    + COLUMNS
    + PAIR_TURN,
    "of neighbours, split": PAIR_TABLES + SPLIT + PAIR_TURN,
    "of neighbours, one by one": HALF_TABLES + COLUMNS + PAIR_PARTS,
    "of neighbours, one by one, the other way round": HALF_TABLES + EVEN_ODD + PAIR_PARTS.replace("(t, u)", "(u, t)"),
    "of neighbours, put behind each other, as DeepSeek does": HALF_TABLES + EVEN_ODD + PARTS[PARTS.index("p =") :],
    "half by half, the other way round": HALF_TABLES + PARTS.replace("(t, u)", "(u, t)").replace("a, c", "c, a"),
}
OTHERS = {
    "of which the tables' halves differ": TABLES.replace("(f, f)", "(f, g)").replace("{ d", "{ g = Neg(f)  d") + TURN,
    "by another factor than -1": TABLES + TURN.replace("Neg(b)", "Mul(b, scale)"),
    "the other half turned": TABLES + TURN.replace("Neg(b)", "Neg(a)").replace("(n, a)", "(n, b)"),
    "that turns nothing": TABLES + TURN.replace("(n, a)", "(a, n)"),
    "of halves that are none": TABLES + TURN.replace("halves", "uneven"),
    "of another tensor": TABLES + "z = Exp(x)  " + TURN.replace("Mul(x, c)", "Mul(z, c)"),
    "of which a part is read": TABLES + TURN.replace("y =", "m =").replace("}", " y = Mul(m, t) }"),
    "backwards, half by half": HALF_TABLES + PARTS.replace("Sub(p, q)", "Add(p, q)").replace("Add(t, u)", "Sub(u, t)"),
    "half by half, with the tables changed": HALF_TABLES + PARTS.replace("t = Mul(a, s)", "t = Mul(a, c)"),
    "of neighbours, by tables of halves": TABLES + EVEN_ODD + PAIR_TURN,
    "of halves, by tables of neighbours": PAIR_TABLES + TURN,
    "of halves, put into each other": HALF_TABLES + PARTS[: PARTS.index("p =")] + PAIR_PARTS,
    "of the wrong neighbours": PAIR_TABLES + EVEN_ODD.replace("one, end", "begin, end") + PAIR_TURN,
    "of neighbours that are not turned": PAIR_TABLES + EVEN_ODD + PAIR_TURN.replace("(nu, au)", "(au, nu)"),
    "half by half, in another order": HALF_TABLES + PARTS.replace("(r, i)", "(i, r)"),
}


def head(examples: int = 1, heads_last: bool = False) -> str:
    batch = "batch" if examples == 1 else BATCH
    shape = (batch, PLACES, HEADS, SIZE) if heads_last else (batch, HEADS, PLACES, SIZE)
    angles = np.stack([ANGLES + 0.3 * i for i in range(examples)])
    numbers = ", ".join(f"{a:.6f}" for a in angles.reshape(-1))
    table = f"{examples}, {PLACES}, {SIZE // 2}"
    return HEAD.format(shape=", ".join(map(str, shape)), table=table, angles=numbers)


def program(body: str, examples: int = 1, heads_last: bool = False) -> amp.Program:
    body = body.replace("Unsqueeze(c0, one)  s = Unsqueeze(s0, one)", "Unsqueeze(c0, two)  s = Unsqueeze(s0, two)") if heads_last else body  # fmt: skip
    return amp.Program.from_onnx(onnx.parser.parse_model(head(examples, heads_last) + body))


def data(heads_last: bool = False) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(BATCH, HEADS, PLACES, SIZE)).astype(np.float32)
    return x.transpose(0, 2, 1, 3).copy() if heads_last else x


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("examples", [1, BATCH])
@pytest.mark.parametrize("name", ROTATIONS)
def test_it_is_one_operator(name: str, examples: int, heads_last: bool) -> None:
    """Angles of all examples, or of each; heads before the positions, or behind them; and it can be written out."""
    x = data(heads_last)
    expected = slope(program(ROTATIONS[name], examples, heads_last), x)
    found = program(ROTATIONS[name], examples, heads_last)
    assert fuse_rotations(found) == ["1 rotations by position that were written out are one operator each"]
    assert [op.type for op in found.operators].count("RotaryEmbedding") == 1
    assert_slope(found, x, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert_stays(program(OTHERS[name]), fuse_rotations)


def test_tables_of_numbers_are_no_weights_behind_copies() -> None:
    """As Paddle writes it: tables of two dimensions in the file, an Identity behind each product."""
    both = np.concatenate([ANGLES, ANGLES], -1)
    c, s = (", ".join(f"{value:.6f}" for value in table.reshape(-1)) for table in (np.cos(both), np.sin(both)))
    text = head().replace(
        "<float[1",
        f"<float[{PLACES}, {SIZE}] c = {{{c}}}, float[{PLACES}, {SIZE}] s = {{{s}}}, "
        f"float[{SIZE}] w = {{{', '.join(['2'] * SIZE)}}}, float[1",
        1,
    )
    turn = TURN.replace(
        "y = Add(p, q)", "pc = Identity(p)  qc = Identity(q)  z = Add(pc, qc)  zc = Identity(z)  y = Mul(zc, w)"
    )
    turn = turn.replace("Mul(x, c)", "Mul(x, k)").replace("p = ", "k = Identity(c)  p = ", 1)
    main = amp.Program.from_onnx(onnx.parser.parse_model(text + "{ " + turn))
    assert {"c", "s"}.isdisjoint(v.name for v in main.parameters)
    expected = slope(main.clone(), data())
    amp.prepare_training(main)
    assert [op.type for op in main.operators].count("RotaryEmbedding") == 1
    assert_slope(main, data(), expected)


def test_trained_angles_stay_written_out() -> None:
    found = program(ROTATIONS["as transformers writes it"])
    found.var("f").persistable = found.var("f").trainable = True
    assert not fuse_rotations(found)


def test_what_onnx_has_is_found() -> None:
    """RotaryEmbedding of opset 23, which is decomposed."""
    body = "{ c = Cos(f)  s = Sin(f)  k = RotaryEmbedding(x, c, s)  y = Neg(k) }"
    text = head(BATCH).replace(": 20]", ": 23]") + body
    main = amp.Program.from_onnx(onnx.parser.parse_model(text))
    convert_opset(main)
    assert fuse_rotations(main)
    (y, _), c, s = slope(main, data()), *(np.stack([t(ANGLES), t(ANGLES + 0.3)])[:, None] for t in (np.cos, np.sin))
    a, b = np.split(data(), 2, -1)
    np.testing.assert_allclose(y, -np.concatenate([a * c - b * s, a * s + b * c], -1), atol=1e-5)


@pytest.mark.parametrize("name", ["as transformers writes it", "of neighbours"])
@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_it_is_trained_and_saved_written_out(mode: str, name: str, tmp_path: Path) -> None:
    """The saved model has operators of ONNX alone, and gives what the trained program gives."""
    numbers = ", ".join(f"{value:.3f}" for value in np.random.default_rng(1).normal(size=SIZE * SIZE))
    body = ROTATIONS[name].replace("y = Add(p, q)", "r = Add(p, q)  y = MatMul(r, w)")
    text = head().replace("<float[1", f"<float[{SIZE}, {SIZE}] w = {{{numbers}}}, float[1", 1)
    main = amp.Program.from_onnx(onnx.parser.parse_model(text + body))
    assert any("rotations" in note for note in amp.prepare_training(main).notes)
    trained_and_saved(main, data(), mode, tmp_path)
