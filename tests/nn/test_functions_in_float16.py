"""Functions in pure float16: values and gradients where a formula as it is written would lose them.

The truth is float64, on numbers that float16 holds; gradients are those of the sum of the values times a cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.nn import functional as F

Array = np.ndarray[Any, Any]
_RNG = np.random.default_rng(0)
_CLASSES = 1000
_LABELS = np.arange(7, 967, 160)
_SMOOTH = 0.003
_BINARY = np.tile(np.arange(48) % 2, (4, 1)).astype(np.float32)


def held(array: Array) -> Array:
    """Rounded to float16."""
    return array.astype(np.float16).astype(np.float64)


def cosine(a: Array, b: Array) -> Array:
    return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def deviation(x: Array) -> Array:
    return x.std(-1, ddof=1)


def smoothed(x: Array) -> Array:
    logs = x - x.max(-1, keepdims=True)
    logs = logs - np.log(np.exp(logs).sum(-1, keepdims=True))
    return -(1 - _SMOOTH) * logs[np.arange(len(x)), _LABELS] - _SMOOTH * logs.mean(-1)


def normal(*shape: int, mean: float = 0.0, size: float = 1.0) -> Array:
    return _RNG.normal(mean, size, shape)


Case = tuple[Callable[..., Variable], Callable[..., Array], list[Array]]
CASES: dict[str, Case] = {
    "cosine of large vectors": (
        lambda a, b: F.cosine_similarity(a, b, axis=-1),
        cosine,
        [normal(4, 48, size=1000), normal(4, 48, size=1000)],
    ),
    "cosine of small vectors": (
        lambda a, b: F.cosine_similarity(a, b, axis=-1),
        cosine,
        [normal(4, 48, size=1e-3), normal(4, 48, size=1e-3)],
    ),
    "large deviation": (lambda x: F.std(x, -1), deviation, [normal(4, 48, size=1000)]),
    "small deviation": (lambda x: F.std(x, -1), deviation, [normal(4, 48, size=1e-4)]),
    "biased deviation": (lambda x: F.std(x, -1, unbiased=False), lambda x: x.std(-1), [normal(4, 48, size=1000)]),
    "variance around a large mean": (
        lambda x: F.var(x, -1),
        lambda x: x.var(-1, ddof=1),
        [normal(16, 48, mean=10, size=0.02)],
    ),
    "large variance": (lambda x: F.var(x, -1), lambda x: x.var(-1, ddof=1), [normal(4, 48, size=150)]),
    "large variance of a row": (
        lambda x: F.var(x, -1, unbiased=False),
        lambda x: x.var(-1),
        [normal(4, 50, size=150)],
    ),
    "log1p": (F.log1p, np.log1p, [_RNG.uniform(-2e-3, 2e-3, (4, 48))]),
    "expm1": (F.expm1, np.expm1, [_RNG.uniform(-2e-3, 2e-3, (4, 48))]),
    "expm1 of large numbers": (F.expm1, np.expm1, [np.append(_RNG.uniform(-6, 6, 47), -16)[None]]),
    "norm of a power": (
        lambda x: F.norm(x, 3, -1),
        lambda x: (np.abs(x) ** 3).sum(-1) ** (1 / 3),
        [normal(4, 256, mean=100)],
    ),
    "smoothed labels": (
        lambda x: F.cross_entropy(x, F.assign(_LABELS), "none", label_smoothing=_SMOOTH),
        smoothed,
        [normal(len(_LABELS), _CLASSES, size=8)],
    ),
    "sure of binary labels": (
        lambda x: F.bce_with_logits(x, F.assign(_BINARY), "none"),
        lambda x: np.log1p(np.exp(np.where(_BINARY > 0, -x, x))),
        [np.where(np.arange(48) % 2, 1, -1) * _RNG.uniform(4, 10, (4, 48))],
    ),
    "sure of classes": (
        lambda x: F.log_softmax(x)[:, 1],
        lambda x: x[:, 1] - np.log(np.exp(x).sum(-1)),
        [normal(32, 6) + np.eye(6)[1] * _RNG.uniform(6, 11, (32, 1))],
    ),
    "log loss": (
        lambda p: F.log_loss(p, F.full_like(p, 0.0)),
        lambda p: -np.log(1 - p + 1e-4),
        [_RNG.uniform(0.99, 0.999, (4, 48))],
    ),
}


def in_float16(function: Callable[..., Variable], arrays: Sequence[Array], scale: float) -> tuple[Array, ...]:
    """The value, and the gradients of the sum of it times a cotangent, unscaled; and the cotangent."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        leaves = [
            amp.create_parameter(a.shape, name=f"x{i}", initializer=a.astype(np.float32)) for i, a in enumerate(arrays)
        ]
        with amp.fp16_guard():
            y = function(*leaves)
        cotangent = held(np.random.default_rng(1).uniform(0.5, 1.5, y.shape))
        loss = F.sum(F.cast(y, "float32") * F.assign(cotangent.astype(np.float32)))
        optimizer = amp.decorate(
            amp.optimizer.SGD(1.0, multi_precision=True),
            init_loss_scaling=scale,
            use_dynamic_loss_scaling=False,
            use_pure_fp16=True,
        )
        pairs = optimizer.backward(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    value, *slopes = executor.run(main, fetch_list=[y, *(gradient for _, gradient in pairs)], scope=scope)
    assert all(s.dtype == np.float16 for s in slopes)
    return cotangent, value, *(s.astype(np.float64) / scale for s in slopes)


def slope(function: Callable[..., Array], arrays: list[Array], at: int, cotangent: Array) -> Array:
    """Central differences; of every row at once, as no function looks beyond its row."""
    x = arrays[at]
    found, step = np.zeros_like(x), 1e-6 * np.abs(x).max()
    for j in range(x.shape[-1]):
        ahead, behind = ([*arrays] for _ in range(2))
        ahead[at], behind[at] = x.copy(), x.copy()
        ahead[at][..., j] += step
        behind[at][..., j] -= step
        change = cotangent * (function(*ahead) - function(*behind)) / (2 * step)
        found[..., j] = change.reshape(*x.shape[:-1], -1).sum(-1)
    return found


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_keep_their_digits(name: str) -> None:
    function, truth, given = CASES[name]
    arrays = [held(array) for array in given]
    cotangent, value, *slopes = in_float16(function, arrays, scale=32)
    wanted = [slope(truth, arrays, i, cotangent) for i in range(len(arrays))]
    for found, right in zip([value, *slopes], [truth(*arrays), *wanted], strict=True):
        assert np.linalg.norm(found - right) <= 2**-9 * np.linalg.norm(right)
    for found, right in zip(slopes, wanted, strict=True):
        assert np.median(np.abs(found - right) / np.abs(right)) <= 2**-9


def test_windows_of_two_sizes_are_of_numbers_that_float16_has() -> None:
    """A mean over three as a product with thirds would be off by how a third is rounded, once for each axis."""
    main = amp.Program()
    with amp.program_guard(main):
        F.adaptive_avg_pool2d(amp.data("x", [2, 4, 10, 13]), (4, 5))
    constants = [as_array(v.data) for v in main.variables if v.is_constant and v.dtype == "float32"]
    assert len(constants) == 3 and all((held(c) == c).all() for c in constants)


def test_windows_that_overlap_alike_are_one_pool() -> None:
    main = amp.Program()
    with amp.program_guard(main):
        F.adaptive_avg_pool2d(amp.data("x", [2, 4, 16, 7]), 3)
    (pool,) = main.operators
    assert (pool.type, pool.attrs) == ("AveragePool", {"kernel_shape": [6, 3], "strides": [5, 2]})


def test_an_unbiased_variance_has_no_rounded_factor() -> None:
    """64 / 63 is 3e-4 less in float16."""
    x = held(normal(64, 64))
    value = in_float16(lambda x: F.var(x, -1), [x], scale=1)[1]
    exact = x.var(-1, ddof=1)
    assert abs(np.mean((value - exact) / exact)) < 1e-4
