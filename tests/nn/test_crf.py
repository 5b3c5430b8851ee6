"""Conditional random fields beside a sum over all paths in float64: the loss, its gradients, and the best path."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.nn import functional as F

CHAINS, STEPS, TAGS = 5, 4, 3
LENGTHS = np.array([4, 1, 3, 2, 4])


def score(x: np.ndarray, w: np.ndarray, path: tuple[int, ...]) -> float:
    moves = sum(w[2 + one, other] for one, other in itertools.pairwise(path))
    return float(w[0, path[0]] + w[1, path[-1]] + moves + sum(x[step, tag] for step, tag in enumerate(path)))


def paths(length: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(TAGS), repeat=length))


def losses(x: np.ndarray, w: np.ndarray, tags: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.array(
        [
            np.logaddexp.reduce([score(row, w, path) for path in paths(length)]) - score(row, w, tuple(tag[:length]))
            for row, tag, length in zip(x, tags, lengths, strict=True)
        ]
    )


def slopes(x: np.ndarray, w: np.ndarray, tags: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The gradient of the mean loss for the parameter, by differences."""
    found = np.zeros_like(w)
    for at in np.ndindex(w.shape):
        step = np.zeros_like(w)
        step[at] = 1e-5
        found[at] = (losses(x, w + step, tags, lengths) - losses(x, w - step, tags, lengths)).mean() / 2e-5
    return found


def built(length: bool, pure: bool) -> tuple[amp.Program, Any, Any, list[amp.Variable]]:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None, STEPS, TAGS])
        label = amp.data("label", [None, STEPS] if length else [None, STEPS, 1], "int64")
        count = amp.data("length", [None, 1], "int32") if length else None
        loss = amp.nn.linear_chain_crf(x, label, amp.ParamAttr("crf"), count)
        found = [loss, amp.nn.crf_decoding(x, "crf", length=count), amp.nn.crf_decoding(x, "crf", label, count)]
        sgd = amp.optimizer.SGD(1.0, multi_precision=True)
        optimizer = amp.decorate(sgd, init_loss_scaling=8.0, use_pure_fp16=pure, use_fp16_guard=False)
        optimizer.minimize(F.mean(loss), startup)
    return main, startup, optimizer, found


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("length", [False, True])
def test_losses_slopes_and_best_paths_are_those_of_all_paths(length: bool, pure: bool) -> None:
    rng = np.random.default_rng(0)
    x, tags = rng.normal(size=(CHAINS, STEPS, TAGS)).astype(np.float16), rng.integers(0, TAGS, (CHAINS, STEPS))
    main, startup, optimizer, fetched = built(length, pure)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    start = rng.normal(size=(TAGS + 2, TAGS)).astype(np.float16)  # what either precision holds
    scope.set_var("crf", start.astype(scope.find_var("crf").dtype))
    w, lengths = start.astype(np.float64), LENGTHS if length else np.full(CHAINS, STEPS)
    feed = {"x": x.astype(np.float32), "label": tags if length else tags[..., None]}
    if length:
        feed["length"] = lengths[:, None].astype(np.int32)
    loss, best, right = executor.run(main, feed, fetched, scope)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(loss, losses(wide, w, tags, lengths)[:, None], rtol=1e-5, atol=1e-5)
    moved = w - slopes(wide, w, tags, lengths)
    np.testing.assert_allclose(scope.find_var("crf").astype(np.float64), moved, atol=2e-3 if pure else 1e-5)
    for row, count, tag, path, hit in zip(wide, lengths, tags, best, right, strict=True):
        wanted = max(paths(count), key=lambda each: score(row, w, each))
        assert path.tolist() == [*wanted, *[0] * (STEPS - count)]
        assert hit.tolist() == [int(a == b) for a, b in zip(wanted, tag, strict=False)] + [0] * (STEPS - count)


def test_wrong_arguments_are_named() -> None:
    with amp.program_guard(amp.Program(), amp.Program("startup")):
        x = amp.data("x", [None, None, TAGS])
        with pytest.raises(ArgumentError, match="linear_chain_crf: .*x 'x'"):
            amp.nn.linear_chain_crf(x, amp.data("label", [None, STEPS], "int64"))
        with pytest.raises(ArgumentError, match="label 'flat' .* is not"):
            amp.nn.linear_chain_crf(amp.data("y", [None, STEPS, TAGS]), amp.data("flat", [None], "int64"))
