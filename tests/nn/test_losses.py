"""bce_with_logits and kl_div against their definitions, in value and gradient, at both ends of their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F


def run(loss_of: Callable[..., amp.Variable], x: np.ndarray, label: np.ndarray, **options: Any) -> list[np.ndarray]:
    """The loss and the gradient of its sum with respect to the input."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        w = amp.create_parameter(list(x.shape), "float32", name="w", initializer=x)
        loss = loss_of(w, amp.data("label", list(label.shape), "float32"), **options)
        ((_, grad),) = amp.append_backward(loss if not loss.shape else F.sum(loss))
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(startup, scope=scope)
    return [np.asarray(v) for v in exe.run(main, feed={"label": label}, fetch_list=[loss, grad], scope=scope)]


def test_binary_cross_entropy_is_finite_and_exact() -> None:
    x = np.array([[-200.0, -3, 0], [2, 40, 200]], np.float32)
    y = np.array([[0, 1, 0.25], [1, 0, 1]], np.float32)
    wide = x.astype(np.float64)
    p = 1 / (1 + np.exp(-wide))
    expected = np.logaddexp(0, wide) - wide * y
    loss, grad = run(F.bce_with_logits, x, y, reduction="none")
    np.testing.assert_allclose(loss, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(grad, p - y, rtol=1e-6, atol=1e-7)
    for reduction, total in (("sum", expected.sum()), ("mean", expected.mean())):
        assert np.isclose(run(F.bce_with_logits, x, y, reduction=reduction)[0], total, rtol=1e-6)


@pytest.mark.parametrize("smooth", [0.0, 0.2])
@pytest.mark.parametrize("tail", [(), (1,)])
def test_cross_entropies_have_the_shape_of_labels_of_open_sizes(tail: tuple[int, ...], smooth: float) -> None:
    main = amp.Program()
    with amp.program_guard(main), amp.unique_name.guard():
        x, y = amp.data("x", [None, None, 3]), amp.data("y", [None, None, *tail], "int64")
        loss = F.cross_entropy(x, y, "none", label_smoothing=smooth)
    assert loss.shape == y.shape
    logits, labels = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32), np.arange(8).reshape(2, 4) % 3
    (found,) = amp.Executor().run(main, {"x": logits, "y": labels.reshape(2, 4, *tail)}, [loss])
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at_label = np.take_along_axis(logs, labels[..., None], -1)[..., 0]
    expected = -(1 - smooth) * at_label - smooth * logs.mean(-1)
    np.testing.assert_allclose(found, expected.reshape(2, 4, *tail), rtol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_kl_divergence(reduction: str) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 5))
    x = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    y = rng.dirichlet(np.ones(5), 4).astype(np.float32)
    y[0], x[0, 1] = [1, 0, 0, 0, 0], -np.inf  # what has no probability costs nothing
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(y > 0, y * (np.log(y) - x), 0)
    expected = {"none": each, "sum": each.sum(), "mean": each.mean(), "batchmean": each.sum() / 4}[reduction]
    loss, grad = run(F.kl_div, x, y, reduction=reduction)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, -y / {"mean": 20, "batchmean": 4}.get(reduction, 1), rtol=1e-5)


@pytest.mark.parametrize("call", [F.bce_with_logits, F.kl_div])
def test_shapes_and_reductions_are_checked(call: Callable[..., amp.Variable]) -> None:
    with amp.program_guard(amp.Program(), amp.Program()), amp.unique_name.guard():
        x, y = amp.data("x", [4, 3], "float32"), amp.data("y", [4, 2], "float32")
        with pytest.raises(amp.AmpError, match=r"\[4, 3\].*\[4, 2\].*one shape"):
            call(x, y)
        with pytest.raises(amp.AmpError, match="reduction is 'avg'"):
            call(x, x, reduction="avg")


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("lengths", [None, "int32", "int64"])
def test_labels_are_read_off_the_best_path(steps: int, lengths: str | None) -> None:
    rng, blank = np.random.default_rng(steps), 3
    x, counts = rng.normal(size=(9, steps, 4)).astype(np.float32), rng.integers(0, steps + 1, 9)
    program = amp.Program()
    with amp.program_guard(program, amp.Program("startup")):
        count = None if lengths is None else amp.data("n", [None, 1], lengths)
        labels, sizes = F.ctc_greedy_decoder(amp.data("x", [None, None, 4]), blank, count, padding_value=-1)
    feed = {"x": x} if lengths is None else {"x": x, "n": counts[:, None].astype(lengths)}
    found, found_sizes = amp.Executor().run(program, feed, [labels, sizes])
    for row, label, size, taken in zip(x.argmax(2), found, found_sizes, counts, strict=True):
        path = row if lengths is None else row[:taken]
        wanted = [c for i, c in enumerate(path) if c != blank and (i == 0 or c != path[i - 1])]
        assert size.tolist() == [len(wanted)]
        assert label.tolist() == wanted + [-1] * (steps - len(wanted))
