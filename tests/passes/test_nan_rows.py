"""What exports put in the place of NaN rows of a softmax: gone where none can be, of masked rows elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.nan_rows import free_nan_rows
from tests.helpers.slopes import slope

MASKED, FREED = (
    "1 times a softmax is told before which of its rows are masked",
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


def forward(found: amp.Program, x: np.ndarray) -> list[np.ndarray]:
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(found.startup, scope=scope)
    return executor.run(found, {"x": x}, list(found.outputs), scope)


def right_slope(x: np.ndarray) -> list[np.ndarray]:
    """Of sum(y * y), where y is a softmax, 0 in rows of -inf, as of PyTorch's attention: float64."""
    none = (x == -np.inf).all(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        y = np.exp(np.where(none, 0, x) - np.where(none, 0, x.max(-1, keepdims=True)), dtype=np.float64)
        y = np.where(none, 0, y / y.sum(-1, keepdims=True))
        return [y, y * (2 * y - (2 * y * y).sum(-1, keepdims=True))]


@pytest.mark.parametrize("axis", ["", " <axis = 2> "])
def test_rows_of_which_every_place_is_masked_are_0_and_have_no_slope(axis: str) -> None:
    """Those that hold NaN or infinity, wherever, are seen."""
    found = program(GUARDED.replace("Softmax", f"Softmax{axis}"))
    assert free_nan_rows(found) == [MASKED] and not free_nan_rows(found)
    expected = right_slope(ENDS)
    assert (expected[0] == 0).all(-1).sum() == 1 and np.isnan(expected[1]).all(-1).sum() == 5
    for value, right in zip(slope(found, ENDS), expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)


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
def test_where_infinities_mask_a_row_may_be_masked_whole(name: str) -> None:
    x = np.concatenate([X, -np.abs(X)])
    (expected,) = forward(program(INFINITE[name]), x)
    found = program(INFINITE[name])
    assert free_nan_rows(found) == [MASKED]
    value, gradient = slope(found, x)
    np.testing.assert_array_equal(value, expected)
    assert np.isfinite(gradient).all() and ((expected == 0).all(-1).sum() > 8) == (name != "fed")


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_masks_of_infinity_train(mode: str) -> None:
    """One mask of two layers is asked once; what no place may look at has no part in the gradient of the weights."""
    body = (
        "{ c = Greater(x, none)  b = Where(c, none, all)  m = MatMul(x, w)  a = Add(m, b)  p = Softmax(a)  n = IsNaN(p)"
    )
    body += "  h = Where(n, none, p)  v = MatMul(h, w)  s = Add(b, v)  q = Softmax(s)  k = IsNaN(q)  y = Where(k, none, q) }"
    main = program(body)
    notes = amp.prepare_training(main).notes
    assert any("2 times a softmax is told" in note for note in notes)
    assert [op.type for op in main.operators].count("ReduceMin") == 1
    with amp.program_guard(main, main.startup):
        loss = F.sum(main.outputs[0] * main.outputs[0])
        optimizer: Any = amp.optimizer.SGD(0.1, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False)
        optimizer.minimize(loss)
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(main.startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    x = np.concatenate([X, -np.abs(X)])
    losses = [executor.run(main, {"x": x}, [loss], scope)[0] for _ in range(3)]
    assert np.isfinite(losses).all() and losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name: str) -> None:
    found = program(OTHERS[name])
    before = [op.type for op in found.operators]
    assert not free_nan_rows(found) and [op.type for op in found.operators] == before


def test_an_answer_that_is_fetched_stays_whole() -> None:
    assert not free_nan_rows(program(GUARDED, HEAD.replace("y)", "y, bool[batch, 3, 37] n)")))
