"""What stands in for rows that are NaN is chosen by one number of each row."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.nan_rows import ask_rows
from tests.helpers.slopes import slope

HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[batch, 3, 37] x) => (float[batch, 3, 37] y) '
HEAD += "<float none = {0}, float[37] other = {" + ", ".join(["1"] * 37) + "}> "
GUARDED = "{ p = Softmax(x)  n = IsNaN(p)  y = Where(n, none, p) }"
OTHERS = {
    "another axis": GUARDED.replace("Softmax", "Softmax <axis = 1> "),
    "no softmax": GUARDED.replace("Softmax", "Sqrt"),
    "of something else": "{ p = Softmax(x)  n = IsNaN(p)  y = Where(n, none, other) }",
    "chosen from": "{ p = Softmax(x)  n = IsNaN(p)  m = Not(n)  y = Where(m, p, none) }",
    "read by others": "{ p = Softmax(x)  n = IsNaN(p)  k = Cast <to = 1> (n)  w = Where(n, none, p)  y = Add(w, k) }",
}
rng = np.random.default_rng(0)
X = rng.normal(size=(8, 3, 37)).astype(np.float32)
X[rng.random(X.shape) < 0.5] = -np.inf
X[0, 1], X[1, 0], X[2, 2, 5], X[3, 1, 36], X[4, 2, 0], X[5, 0, 7] = -np.inf, np.inf, np.nan, np.nan, np.inf, np.inf
X[6, 1], X[6, 1, 3] = -np.inf, np.nan


def program(body: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + body))


@pytest.mark.parametrize("axis", ["", " <axis = 2> "])
def test_one_number_tells_of_the_row(axis: str) -> None:
    """Of rows that are forbidden altogether, and of such as hold NaN or infinity, wherever."""
    body = GUARDED.replace("Softmax", f"Softmax{axis}")
    expected = slope(program(body), X)
    found = program(body)
    assert ask_rows(found) == ["1 times a softmax is asked for NaN by one number of a row"]
    (asked,) = (op.output(0) for op in found.operators if op.type == "IsNaN")
    assert asked is not None and asked.shape is not None and asked.shape[1:] == (3, 1)
    assert not np.isnan(expected[0]).any() and (expected[0] == 0).all(-1).sum() >= 4
    for value, right in zip(slope(found, X), expected, strict=True):
        np.testing.assert_array_equal(value, right)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name: str) -> None:
    found = program(OTHERS[name])
    before = [op.type for op in found.operators]
    assert not ask_rows(found) and [op.type for op in found.operators] == before


def test_an_answer_that_is_fetched_stays_whole() -> None:
    head = HEAD.replace("y)", "y, bool[batch, 3, 37] n)")
    found = amp.Program.from_onnx(onnx.parser.parse_model(head + GUARDED))
    assert not ask_rows(found)


def test_it_runs_twice_and_finds_nothing() -> None:
    found = program(GUARDED)
    assert ask_rows(found) and not ask_rows(found)
