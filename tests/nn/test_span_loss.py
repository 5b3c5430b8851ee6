"""The span loss against numpy, its gradient included."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.nn import functional as F


def reference(logits: np.ndarray, place: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss over the places inside, and its gradient."""
    inside = (place >= 0) & (place < logits.shape[1])
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    gradient, losses = np.zeros_like(logits), []
    for row in np.flatnonzero(inside):
        losses.append(-np.log(probability[row, place[row]]))
        gradient[row] = probability[row]
        gradient[row, place[row]] -= 1
    return (float(np.mean(losses)) if losses else 0.0), gradient / max(1, inside.sum())


@pytest.mark.parametrize(
    "start, end, column",
    [
        ([0, 6, 3, 2], [1, 6, 4, 2], False),
        ([0, -1, 7, 2], [1, -100, 3, 9], True),
        ([-1, 7, 8, -2], [0, 0, 0, 0], False),
        ([-1, 7, 8, -2], [-1, 7, 8, -2], False),
    ],
)
@pytest.mark.parametrize("length", [7, None])
def test_span_loss_is_the_mean_of_two_cross_entropies(start, end, column, length):
    rng = np.random.default_rng(0)
    first, last = rng.standard_normal((2, 4, 7))
    program, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(program, startup), amp.unique_name.guard():
        a, b = amp.data("a", [4, length], "float32"), amp.data("b", [4, length], "float32")
        places = [amp.data(name, [4, 1] if column else [4], "int64") for name in ("start", "end")]
        loss = F.span_loss(a, b, *places)
        a.stop_gradient = b.stop_gradient = False
        grads = amp.append_backward(loss, parameter_list=[a, b])
    assert loss.shape == ()
    shape = (4, 1) if column else (4,)
    feed = {"a": first.astype(np.float32), "b": last.astype(np.float32)}
    feed |= {"start": np.reshape(start, shape), "end": np.reshape(end, shape)}
    found = amp.Executor().run(program, feed=feed, fetch_list=[loss, *(grad for _, grad in grads)], scope=amp.Scope())
    (one, d_first), (two, d_last) = reference(first, np.array(start)), reference(last, np.array(end))
    np.testing.assert_allclose(found[0], (one + two) / 2, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found[1], d_first / 2, atol=1e-6)
    np.testing.assert_allclose(found[2], d_last / 2, atol=1e-6)


def test_places_must_fit_the_logits():
    with amp.program_guard(amp.Program(), amp.Program("startup")), amp.unique_name.guard():
        logits, cube = amp.data("a", [4, 7], "float32"), amp.data("c", [4, 7, 2], "float32")
        place, short = amp.data("start", [4], "int64"), amp.data("short", [3], "int64")
        with pytest.raises(ArgumentError, match="span_loss: label 'short'"):
            F.span_loss(logits, logits, place, short)
        with pytest.raises(ArgumentError, match="span_loss: logits 'c'"):
            F.span_loss(cube, logits, place, place)
