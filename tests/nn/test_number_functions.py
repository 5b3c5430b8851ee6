"""Remainders, truth values, counts, orders and windows: what numpy and the formulas say, and slopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.nn import functional as F

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4)).astype(np.float32)
Y = (RNG.uniform(0.5, 2, (3, 4)) * np.sign(RNG.normal(size=(3, 4)))).astype(np.float32)
Z = RNG.normal(size=(3, 4)).astype(np.float32)
M, N = np.array([[-7, 7, 3], [8, -8, 0]]), np.array([[2, -2, 5], [3, 3, -4]])
ODD = np.array([1, np.inf, -np.inf, np.nan], np.float32)
SURE = np.array([[True, False], [True, True], [False, False]])
IMAGE = RNG.normal(size=(2, 3, 6, 5)).astype(np.float32)
P, LABEL = RNG.uniform(0, 1, (3, 4)).astype(np.float32), RNG.integers(0, 2, (3, 4)).astype(np.float32)
ORDER = np.sign(RNG.normal(size=(3, 4))).astype(np.float32)


def run(build: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """What the function gives for feeds of unknown sizes."""
    with amp.program_guard(amp.Program(), amp.Program()), amp.unique_name.guard():
        feeds = [amp.data(f"x{i}", [None] * array.ndim, str(array.dtype)) for i, array in enumerate(arrays)]
        (found,) = amp.Executor(threads=1).run(
            feed={f"x{i}": array for i, array in enumerate(arrays)}, fetch_list=[build(*feeds)]
        )
    return found


CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], Any]] = {
    "mod": (F.mod, (M, N), M % N),
    "mod of floats": (F.mod, (X, Y), X % Y),
    "mod, a number": (lambda x: x % 1.5, (X,), X % np.float32(1.5)),
    "a number, mod": (lambda x: 7 % x, (N,), 7 % N),
    "floor_divide": (F.floor_divide, (M, N), M // N),
    "floor_divide of floats": (lambda x, y: x // y, (X, Y), X // Y),
    "a number, floor_divide": (lambda x: 7 // x, (N,), 7 // N),
    "integers over integers": (lambda x, y: x / y, (M, N), (M / N).astype(np.float32)),
    "one over integers": (lambda x: 1 / x, (N,), (1 / N).astype(np.float32)),
    "==": (lambda x: x == 3, (M,), M == 3),
    "== a scalar of numpy": (lambda x: x == np.float32(X[0, 0]), (X,), X[0, 0] == X),
    "!=": (lambda x: x != 0, (M,), M != 0),
    "and, or, not": (lambda x, y: (x & ~y) | (y & ~x), (SURE, SURE[::-1].copy()), SURE ^ SURE[::-1]),
    "isfinite": (F.isfinite, (ODD,), np.isfinite(ODD)),
    "any": (F.any, (SURE,), SURE.any()),
    "any of rows": (lambda x: F.any(x, 1, keepdim=True), (SURE,), SURE.any(1, keepdims=True)),
    "all": (F.all, (SURE,), SURE.all()),
    "all of columns": (lambda x: x.all(0), (SURE,), SURE.all(0)),
    "equal_all": (F.equal_all, (M, M), np.array(True)),
    "equal_all, but one": (F.equal_all, (M, np.where(N == 5, M, M + (N == 3))), np.array(False)),
    "numel": (F.numel, (IMAGE,), np.array(180)),
    "linspace": (lambda x: F.linspace(-1, 2, 5) + x[0, 0] * 0, (X,), np.linspace(-1, 2, 5, dtype=np.float32)),
    "outer": (lambda x: F.outer(x[0], x[1]), (X,), np.outer(X[0], X[1])),
    "t": (F.t, (X,), X.T),
    "t of a vector": (F.t, (ODD,), ODD),
    "sequence_mask": (lambda x: F.sequence_mask(x, 9, "float32"), (abs(M),), (np.arange(9) < abs(M)[..., None]) * 1.0),
    "grid_sample": (
        lambda x: F.grid_sample(x, F.assign(np.stack(np.meshgrid(np.linspace(-1, 1, 5), np.linspace(-1, 1, 6)), -1)[None].repeat(2, 0).astype(np.float32))),
        (IMAGE,),
        IMAGE,
    ),
    "unfold": (
        lambda x: F.unfold(F.reshape(x, [2, 3, 6, 5]), [2, 3], paddings=[0, 1], strides=[2, 1]),
        (IMAGE,),
        sliding_window_view(np.pad(IMAGE, ((0, 0), (0, 0), (0, 0), (1, 1))), (2, 3), (2, 3))[:, :, ::2]
        .transpose(0, 1, 4, 5, 2, 3)
        .reshape(2, 18, -1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_numpys(name: str) -> None:
    build, arrays, expected = CASES[name]
    found = run(build, *arrays)
    assert found.shape == np.shape(expected) and found.dtype.kind == np.asarray(expected).dtype.kind
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_two_variables_are_one_or_not() -> None:
    with amp.program_guard(amp.Program(), amp.Program()):
        x, y = amp.data("x", [2]), amp.data("y", [2])
        assert x == x and x != y and [y, x].index(x) == 1 and {x: 1, y: 2}[y] == 2 and x != "x" and x is not None


def norm(d: np.ndarray, p: float) -> np.ndarray:
    return (abs(d + 1e-6) ** p).sum(-1) ** (1 / p)


def focal(logit: np.ndarray, label: np.ndarray) -> np.ndarray:
    p = 1 / (1 + np.exp(-logit))
    right = np.where(label == 1, p, 1 - p)
    return -np.where(label == 1, 0.25, 0.75) * (1 - right) ** 2 * np.log(right)


#: name -> the function, its formula in float64 (before a mean or a sum), what it is given, and which of that has a slope.
LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., np.ndarray], tuple[np.ndarray, ...]]] = {
    "log_loss": (
        lambda p, y: F.sum(F.log_loss(p, y)),
        lambda p, y: (-y * np.log(p + 1e-4) - (1 - y) * np.log(1 - p + 1e-4)).sum(),
        (P, LABEL),
    ),
    "margin_ranking_loss": (
        lambda x, y, order: F.margin_ranking_loss(x, y, order, 0.3),
        lambda x, y, order: np.maximum(0, 0.3 - order * (x - y)).mean(),
        (X, Y, ORDER),
    ),
    "triplet_margin_loss": (
        F.triplet_margin_loss,
        lambda x, y, z: np.maximum(0, norm(x - y, 2) - norm(x - z, 2) + 1).mean(),
        (X, Y, Z),
    ),
    "triplet_margin_loss, swapped, of sums": (
        lambda x, y, z: F.triplet_margin_loss(x, y, z, 2.5, p=1, swap=True, reduction="sum"),
        lambda x, y, z: np.maximum(0, norm(x - y, 1) - np.minimum(norm(x - z, 1), norm(y - z, 1)) + 2.5).sum(),
        (X, Y, Z),
    ),
    "sigmoid_focal_loss": (F.sigmoid_focal_loss, lambda x, y: focal(x, y).sum(), (X, LABEL)),
    "sigmoid_focal_loss, normalised": (
        lambda x, y: F.sigmoid_focal_loss(x, y, F.full([1], 5.0), reduction="mean"),
        lambda x, y: focal(x, y).mean() / 5,
        (X, LABEL),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_slopes(name: str) -> None:
    build, formula, arrays = LOSSES[name]
    with amp.program_guard(amp.Program(), amp.Program()), amp.unique_name.guard():
        feeds = [amp.data(f"x{i}", array.shape) for i, array in enumerate(arrays)]
        loss = build(*feeds)
        ((_, slope),) = amp.append_backward(F.sum(loss), [feeds[0]])
        feed = {f"x{i}": array for i, array in enumerate(arrays)}
        found, gradient = amp.Executor(threads=1).run(feed=feed, fetch_list=[loss, slope])
    wide = [array.astype(np.float64) for array in arrays]
    np.testing.assert_allclose(found.ravel(), [formula(*wide)], rtol=1e-5)
    expected = np.zeros_like(wide[0])
    for place in np.ndindex(expected.shape):
        moved = [wide[0].copy(), wide[0].copy()]
        for array, step in zip(moved, (1e-6, -1e-6), strict=True):
            array[place] += step
        expected[place] = (formula(moved[0], *wide[1:]) - formula(moved[1], *wide[1:])) / 2e-6
    np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: F.log_loss(amp.data("x", [2]), amp.data("y", [2]), 0), "epsilon must be above 0"),
        (lambda: F.sigmoid_focal_loss(amp.data("x", [2]), amp.data("y", [2]), gamma=-1), "gamma must not be negative"),
        (lambda: F.grid_sample(amp.data("x", [1, 1, 2, 2]), amp.data("g", [1, 2, 2, 2]), "cubic"), "mode is 'cubic'"),
        (lambda: F.unfold(amp.data("x", [1, 1, 4, 4]), 2, paddings=[1, 2, 3]), "one number, two or four"),
        (lambda: F.t(amp.data("x", [1, 1, 4])), "at most 2"),
        (lambda: F.linspace(0, float("inf"), 3), "finite"),
    ],
)
def test_what_is_refused(build: Callable[[], Any], words: str) -> None:
    with amp.program_guard(amp.Program(), amp.Program()), pytest.raises(ArgumentError, match=words):
        build()


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_an_image_that_keeps_its_size_keeps_its_slope(mode: str) -> None:
    """onnxruntime copies it, though 3 elements by 1.3 are 3 again, at other places."""
    with amp.program_guard(amp.Program(), amp.Program()), amp.unique_name.guard():
        x, w = amp.data("x", [1, 1, 3]), amp.data("w", [1, 1, 3])
        y = F.interpolate(x, scale_factor=1.3, mode=mode)
        ((_, slope),) = amp.append_backward(F.sum(y * w), [x])
        feed = {"x": np.array([[[1, 2, 4]]], np.float32), "w": np.array([[[0, 1, 0]]], np.float32)}
        found, gradient = amp.Executor(threads=1).run(feed=feed, fetch_list=[y, slope])
    np.testing.assert_array_equal(found, feed["x"])
    np.testing.assert_array_equal(gradient, feed["w"])
