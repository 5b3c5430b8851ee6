"""Layers and functions of the builder, computed on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler import nn
from amp_transpiler.ir.nodes import Variable
from tests.helpers.building import building, run, startup_values

Array = np.ndarray[Any, Any]


def feed(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def made(layer: Callable[[amp.Variable], amp.Variable], x: Array) -> tuple[Array, dict[str, Array], amp.Variable]:
    """What a layer gives, the values of the scope, and the variable itself; the batch is unknown while building."""
    with building() as (main, startup):
        y = layer(nn.data("x", [None, *x.shape[1:]], x.dtype.name))
    scope = startup_values(startup)
    (found,) = run(main, scope, {"x": x}, [y])
    assert y.shape is not None
    assert len(y.shape) == found.ndim and all(d in (None, n) for d, n in zip(y.shape, found.shape, strict=True))
    return found, scope, y


def computed(build: Callable[..., Variable | list[Variable]], *arrays: Array, unknown: bool = True) -> list[Array]:
    """What a function of inputs gives; the declared shapes must hold of the results. ``unknown``: the batch is."""
    with building() as (main, startup):
        inputs = [
            nn.data(f"x{i}", [None if unknown and axis == 0 else size for axis, size in enumerate(a.shape)], a.dtype)
            for i, a in enumerate(arrays)
        ]
        result = build(*inputs)
    results = result if isinstance(result, list) else [result]
    found = run(main, startup_values(startup), {v.name: a for v, a in zip(inputs, arrays, strict=True)}, results)
    for variable, array in zip(results, found, strict=True):
        assert variable.dtype == array.dtype.name and variable.shape is not None
        assert len(variable.shape) == array.ndim
        assert all(
            d is None or isinstance(d, str) or d == size for d, size in zip(variable.shape, array.shape, strict=True)
        )
    return found


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)
