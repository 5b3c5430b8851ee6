"""Functions of the builder against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.layers import computed, feed, softmax

Array = np.ndarray[Any, Any]


X = feed(3, 4)
P = np.abs(X) + 0.1
IMAGE = feed(2, 3, 6, 8)


def erf(x: Array) -> Array:
    return np.vectorize(math.erf)(x)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Array, ...], Any]] = {
    "relu": (F.relu, (X,), np.maximum(X, 0)),
    "gelu": (F.gelu, (X,), X * 0.5 * (1 + erf(X / math.sqrt(2)))),
    "gelu_none": (lambda v: F.gelu(v, approximate="none"), (X,), X * 0.5 * (1 + erf(X / math.sqrt(2)))),
    "gelu_tanh": (
        lambda v: F.gelu(v, approximate=True),
        (X,),
        0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))),
    ),
    "sigmoid": (F.sigmoid, (X,), 1 / (1 + np.exp(-X))),
    "tanh": (F.tanh, (X,), np.tanh(X)),
    "exp": (F.exp, (X,), np.exp(X)),
    "log": (F.log, (P,), np.log(P)),
    "sqrt": (F.sqrt, (P,), np.sqrt(P)),
    "pow": (lambda v: F.pow(v, 3), (X,), X**3),
    "softmax": (F.softmax, (X,), softmax(X)),
    "softmax_axis": (lambda v: F.softmax(v, 0), (X,), softmax(X, 0)),
    "log_softmax": (F.log_softmax, (X,), np.log(softmax(X))),
    "mean": (F.mean, (X,), X.mean()),
    "mean_axis": (lambda v: F.mean(v, [0, 2], keepdim=True), (IMAGE,), IMAGE.mean((0, 2), keepdims=True)),
    "sum": (F.sum, (X,), X.sum()),
    "sum_axis": (lambda v: F.sum(v, -1), (X,), X.sum(-1)),
    "matmul": (lambda a, b: F.matmul(a, b, transpose_x=True), (X, feed(3, 5)), X.T @ feed(3, 5)),
    "matmul_y": (
        lambda a, b: F.matmul(a, b, transpose_y=True),
        (feed(2, 3, 4), feed(2, 5, 4)),
        feed(2, 3, 4) @ feed(2, 5, 4).transpose(0, 2, 1),
    ),
    "where": (lambda v: F.where(v > 0, v, -1), (X,), np.where(X > 0, X, -1)),
    "cast": (lambda v: F.cast(v, "int32"), (X,), X.astype(np.int32)),
    "max_pool2d": (lambda v: F.max_pool2d(v, 2), (IMAGE,), IMAGE.reshape(2, 3, 3, 2, 4, 2).max((3, 5))),
    "avg_pool2d": (lambda v: F.avg_pool2d(v, (3, 4)), (IMAGE,), IMAGE.reshape(2, 3, 2, 3, 2, 4).mean((3, 5))),
    "avg_pool2d_pad": (lambda v: F.avg_pool2d(v, 2, 8, padding=1), (IMAGE,), IMAGE[:, :, :1, ::7]),
    "avg_pool2d_pad_counts": (
        lambda v: F.avg_pool2d(v, 2, 8, padding=1, exclusive=False),
        (IMAGE,),
        IMAGE[:, :, :1, ::7] / 4,
    ),
    "global_avg_pool2d": (F.global_avg_pool2d, (IMAGE,), IMAGE.mean((2, 3), keepdims=True)),
    "global_max_pool2d": (F.global_max_pool2d, (IMAGE,), IMAGE.max((2, 3), keepdims=True)),
    "adaptive_avg_pool2d": (
        lambda v: F.adaptive_avg_pool2d(v, (2, 4)),
        (IMAGE,),
        IMAGE.reshape(2, 3, 2, 3, 4, 2).mean((3, 5)),
    ),
    "adaptive_avg_pool2d_whole": (F.adaptive_avg_pool2d, (IMAGE,), IMAGE.mean((2, 3), keepdims=True)),
    "reshape": (lambda v: F.reshape(v, [0, -1, 4]), (IMAGE,), IMAGE.reshape(2, -1, 4)),
    "transpose": (lambda v: F.transpose(v, [0, 3, 1, -2]), (IMAGE,), IMAGE.transpose(0, 3, 1, 2)),
    "flatten": (lambda v: F.flatten(v, 1), (IMAGE,), IMAGE.reshape(2, -1)),
    "flatten_all": (F.flatten, (IMAGE,), IMAGE.reshape(-1)),
    "flatten_middle": (lambda v: F.flatten(v, 1, 2), (IMAGE,), IMAGE.reshape(2, 18, 8)),
    "squeeze": (lambda v: F.squeeze(F.unsqueeze(v, [1, -1]), -1), (X,), X[:, None]),
    "concat": (lambda a, b: F.concat([a, b, a], 1), (X, feed(3, 2)), np.concatenate([X, feed(3, 2), X], 1)),
    "split": (lambda v: F.split(v, 2, 1), (X,), np.split(X, 2, 1)),
    "split_open": (lambda v: F.split(v, 3), (X,), np.split(X, 3)),
    "split_open_unevenly": (lambda v: F.chunk(v, 2), (X,), [X[:2], X[2:]]),
    "split_open_sections": (lambda v: F.split(v, [1, 2]), (X,), np.split(X, [1])),
    "split_sections": (lambda v: F.split(v, [2, -1, 1], -1), (IMAGE,), np.split(IMAGE, [2, 7], -1)),
    "slice": (lambda v: F.slice(v, [2, -1], [1, -3], [100, -1]), (IMAGE,), IMAGE[:, :, 1:, -3:-1]),
    "slice_steps": (lambda v: F.slice(v, [3], [7], [0], [-2]), (IMAGE,), IMAGE[..., 7:0:-2]),
    "gather": (lambda v, i: F.gather(v, i, 1), (X, np.array([[3, 0]])), X[:, [[3, 0]]]),
    "mse_loss": (F.mse_loss, (X, P), ((X - P) ** 2).mean()),
    "mse_loss_none": (lambda a, b: F.mse_loss(a, b, "none"), (X, P), (X - P) ** 2),
    "dropout_off": (lambda v: F.dropout(v, 0.5, training=False) + 0, (X,), X),
    "add": (lambda a, b: a + b + 1, (X, P), X + P + 1),
    "subtract": (lambda a, b: 2 - (a - b), (X, P), 2 - (X - P)),
    "multiply": (lambda a, b: 2 * a * b * 0.5, (X, P), X * P),
    "divide": (lambda a, b: 1 / (a / b), (P, P + 1), (P + 1) / P),
    "power": (lambda a: (2**a) ** 2, (X,), (2**X) ** 2),
    "negative": (lambda a: -a, (X,), -X),
    "matmul_operator": (lambda a, b: a @ b, (X, feed(4, 2)), X @ feed(4, 2)),
    "matmul_array": (lambda a: np.eye(3, dtype=np.float32)[:2] @ (a * np.ones(4)), (X,), X[:2]),
    "less": (lambda a, b: a < b, (X, P), X < P),
    "greater_equal": (lambda a: a >= 0, (X,), X >= 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    build, arrays, expected = FUNCTIONS[name]
    found = computed(build, *arrays, unknown=name not in ("flatten_all",))
    for one, other in zip(found, expected if isinstance(expected, list) else [expected], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("lead", [(6,), (3, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(lead: tuple[int, ...], reduction: str, column: bool) -> None:
    logits = feed(*lead, 5)
    label = np.random.default_rng(0).integers(0, 5, lead)
    label.ravel()[1] = -100
    fed = label[..., None] if column else label
    (found,) = computed(lambda x, y: F.cross_entropy(x, y, reduction), logits, fed)
    logs = np.log(softmax(logits))
    losses = np.where(label < 0, 0, -np.take_along_axis(logs, np.maximum(label, 0)[..., None], -1)[..., 0])
    expected = {"mean": losses.sum() / (label >= 0).sum(), "sum": losses.sum(), "none": losses.reshape(fed.shape)}
    np.testing.assert_allclose(found, expected[reduction], rtol=1e-5, atol=1e-6)
    assert found.shape == np.shape(expected[reduction])


def test_cross_entropy_ignore_index() -> None:
    logits, label = feed(4, 3), np.array([0, 2, 1, 2], np.int32)
    (found,) = computed(lambda x, y: F.cross_entropy(x, y, ignore_index=2), logits, label)
    np.testing.assert_allclose(found, -np.log(softmax(logits))[[0, 2], [0, 1]].mean(), rtol=1e-5)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_accuracy(k: int, dtype: str) -> None:
    scores, label = feed(40, 6), np.random.default_rng(1).integers(0, 6, (40, 1)).astype(dtype)
    (found,) = computed(lambda x, y: F.accuracy(x, y, k), scores, label)
    best = np.argsort(-scores, 1)[:, :k]
    np.testing.assert_allclose(found, (best == label).any(1).mean(), rtol=1e-6)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_the_backward_pass_ends_in_a_detached_copy_alone(mode: str) -> None:
    """A straight-through estimator, y = z + detach(q - z), and a target that z is drawn to, in every precision."""
    x = feed(6, 4)
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard(), amp.fp16_guard():
        w = amp.create_parameter([4, 3], name="w", initializer=amp.nn.initializer.Constant(0.5))
        c = amp.create_parameter([3], name="c", initializer=amp.nn.initializer.Constant(0.25))
        z = amp.data("x", [6, 4]) @ w
        q = F.round(z) + c
        y = z + (q - z).detach()
        loss = F.mean(F.square(y - 1.0)) + F.mean(F.square(F.detach(z) - q))
        optimizer: Any = amp.optimizer.SGD(1.0, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", init_loss_scaling=8.0)
        optimizer.minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(amp.CPUPlace())
    executor.run(startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope)
    executor.run(main, {"x": x}, [], scope=scope)
    made = x @ np.full((4, 3), 0.5)
    rounded = np.round(made) + 0.25
    steps = {"w": x.T @ (2 * (rounded - 1) / made.size), "c": (2 * (rounded - made) / made.size).sum(0)}
    for name, first in (("w", 0.5), ("c", 0.25)):
        step = first - scope.find_var(f"{name}_fp32_master_0" if mode == "pure" else name)
        np.testing.assert_allclose(step, steps[name], atol=1e-6 if mode == "fp32" else 2e-3)
