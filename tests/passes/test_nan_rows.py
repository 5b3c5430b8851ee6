"""What exports put in the place of NaN rows of a softmax: gone where none can be, asked of one number where some may."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.nan_rows import free_nan_rows
from tests.helpers.slopes import slope

ASKED, FREED = (
    "1 times a softmax is asked for NaN by one number of a row",
    "1 times NaN of attention's scores is no longer taken for a row that is masked",
)
HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[batch, 3, 37] x) => (float[batch, 3, 37] y) '
HEAD += "<float none = {0}, float lowest = {-3.4e38}, float half = {0.5}, float all = {INF}, "
HEAD += "float[37] other = {" + ", ".join(["1"] * 37) + "}, float[37, 37] w = {"
HEAD += ", ".join(f"{value:.3f}" for value in np.random.default_rng(1).normal(size=37 * 37)) + "}> "
GUARDED = "{ p = Softmax(x)  n = IsNaN(p)  y = Where(n, none, p) }"
SCORES = "{ m = MatMul(x, w)  "
GUARD = "p = Softmax(a)  n = IsNaN(p)  y = Where(n, none, p) }"
OTHERS = {
    "another axis": GUARDED.replace("Softmax", "Softmax <axis = 1> "),
    "no softmax": GUARDED.replace("Softmax", "Sqrt"),
    "of something else": "{ p = Softmax(x)  n = IsNaN(p)  y = Where(n, none, other) }",
    "for something of many numbers": "{ p = Softmax(x)  n = IsNaN(p)  y = Where(n, other, p) }",
    "chosen from": "{ p = Softmax(x)  n = IsNaN(p)  m = Not(n)  y = Where(m, p, none) }",
    "read by others": "{ p = Softmax(x)  n = IsNaN(p)  k = Cast <to = 1> (n)  v = Where(n, none, p)  y = Add(v, k) }",
}
FINITE = {
    "scores alone": SCORES + "a = Mul(m, half)  " + GUARD,
    "a mask of the lowest number": SCORES + "c = Greater(x, none)  b = Where(c, none, lowest)  a = Add(m, b)  " + GUARD,
    "constants": SCORES + "b = Identity(other)  a = Add(b, m)  " + GUARD,
}
INFINITE = {
    "a mask of infinity": FINITE["a mask of the lowest number"].replace("lowest", "all"),
    "fed": "{ a = Mul(x, half)  " + GUARD,
    "selected scores": SCORES + "c = Greater(x, none)  a = Where(c, m, all)  " + GUARD,
}
rng = np.random.default_rng(0)
X = rng.normal(size=(8, 3, 37)).astype(np.float32)
ENDS = X.copy()
ENDS[rng.random(X.shape) < 0.5] = -np.inf
ENDS[0, 1], ENDS[1, 0], ENDS[2, 2, 5], ENDS[3, 1, 36], ENDS[4, 2, 0] = -np.inf, np.inf, np.nan, np.nan, np.inf
ENDS[6, 1], ENDS[6, 1, 3] = -np.inf, np.nan


def program(body: str, head: str = HEAD) -> amp.Program:
    model = onnx.parser.parse_model(head.replace("{INF}", "{2}") + body)
    for tensor in model.graph.initializer:
        if tensor.name == "all":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(-np.inf), "all"))
    return amp.Program.from_onnx(model)


@pytest.mark.parametrize("axis", ["", " <axis = 2> "])
def test_one_number_tells_of_the_row(axis: str) -> None:
    """Of rows that are forbidden altogether, and of such as hold NaN or infinity, wherever."""
    body = GUARDED.replace("Softmax", f"Softmax{axis}")
    expected = slope(program(body), ENDS)
    found = program(body)
    assert free_nan_rows(found) == [ASKED]
    (asked,) = (op.output(0) for op in found.operators if op.type == "IsNaN")
    assert asked is not None and asked.shape is not None and asked.shape[1:] == (3, 1)
    assert not np.isnan(expected[0]).any() and (expected[0] == 0).all(-1).sum() >= 4
    for value, right in zip(slope(found, ENDS), expected, strict=True):
        np.testing.assert_array_equal(value, right)


@pytest.mark.parametrize("name", FINITE)
def test_where_no_row_can_be_nan_nothing_is_selected(name: str) -> None:
    """And NaN of the scores is seen."""
    x = np.concatenate([X, -np.abs(X)])  # of the last rows every place is masked
    expected = slope(program(FINITE[name]), x)
    found = program(FINITE[name])
    assert free_nan_rows(found) == [FREED] and not free_nan_rows(found)
    assert "IsNaN" not in {op.type for op in found.operators}
    for value, right in zip(slope(found, x), expected, strict=True):
        np.testing.assert_array_equal(value, right)
    x[0, 0, 0] = np.nan
    assert not np.isnan(slope(program(FINITE[name]), x)[0]).any()
    found = program(FINITE[name])
    free_nan_rows(found)
    assert np.isnan(slope(found, x)[0][0, 0]).all()


@pytest.mark.parametrize("name", INFINITE)
def test_where_infinities_mask_rows_are_asked(name: str) -> None:
    x = np.concatenate([X, -np.abs(X)])
    expected = slope(program(INFINITE[name]), x)
    found = program(INFINITE[name])
    assert free_nan_rows(found) == [ASKED]
    for value, right in zip(slope(found, x), expected, strict=True):
        np.testing.assert_array_equal(value, right)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name: str) -> None:
    found = program(OTHERS[name])
    before = [op.type for op in found.operators]
    assert not free_nan_rows(found) and [op.type for op in found.operators] == before


def test_an_answer_that_is_fetched_stays_whole() -> None:
    assert not free_nan_rows(program(GUARDED, HEAD.replace("y)", "y, bool[batch, 3, 37] n)")))
