"""On CUDA a product reads a transposed matrix as it was, and a gradient of one is made as it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.building import building, startup_values
from tests.helpers.node_by_node import node_by_node

RNG = np.random.default_rng(6)
X, W, B = (RNG.normal(size=size).astype(np.float32) for size in ([2, 5, 8], [6, 8], [6]))
Layer = Callable[[Any, Any, Any], Any]


def biased(x: Any, w: Any, b: Any) -> Any:
    return x @ F.transpose(w, [1, 0]) + b


def plain(x: Any, w: Any, b: Any) -> Any:
    return x @ F.transpose(w, [1, 0])


def one_matrix(x: Any, w: Any, b: Any) -> Any:
    return F.reshape(x[0], [1, 5, 8]) @ F.transpose(w, [1, 0])


def scaled(x: Any, w: Any, b: Any) -> Any:
    return x @ (F.transpose(w, [1, 0]) * 0.25)


def narrowed(x: Any, w: Any, b: Any) -> Any:
    """As in mixed precision, in which a transposed weight is cast."""
    low = "float16" if x.dtype == "float32" else x.dtype
    return F.cast(F.cast(x, low) @ F.cast(F.transpose(w, [1, 0]), low), x.dtype) + b


def in_another_shape(x: Any, w: Any, b: Any) -> Any:
    return x @ F.reshape(F.transpose(F.reshape(w, [1, 6, 8]), [0, 2, 1]), [8, 6])


def left(x: Any, w: Any, b: Any) -> Any:
    return w @ F.transpose(x, [0, 2, 1])


def scores(x: Any, w: Any, b: Any) -> Any:
    """Of queries and keys that come of one matrix."""
    heads = F.transpose(F.reshape(x @ F.transpose(w, [1, 0]), [2, 5, 2, 3]), [0, 2, 1, 3])
    return heads @ (F.transpose(heads, [0, 1, 3, 2]) * 0.5)


def shared(x: Any, w: Any, b: Any) -> Any:
    """Two products read one transposed matrix."""
    turned = F.transpose(w, [1, 0])
    return x @ turned + F.relu(x) @ turned


def read_otherwise(x: Any, w: Any, b: Any) -> Any:
    turned = F.transpose(w, [1, 0])
    return x @ turned * F.sum(F.relu(turned))


#: Layers, and how many transpositions their steps have on CUDA.
LAYERS: dict[Layer, int] = {biased: 0, plain: 0, one_matrix: 0, scaled: 0, in_another_shape: 0, left: 3}
LAYERS |= {narrowed: 0, scores: 2, shared: 1, read_otherwise: 2}


def step(layer: Layer, dtype: str, place: str) -> tuple[list[str], list[np.ndarray]]:
    """The operators of a step; y, and the gradients of x and w, the latter of sum(y * y)."""
    with building() as (main, startup):
        x = amp.data("x", list(X.shape), dtype)
        x.stop_gradient = False
        w, b = (amp.create_parameter(list(a.shape), dtype, n) for n, a in (("w", W), ("b", B)))
        y = layer(x, w, b)
        pairs = amp.append_backward(F.sum(F.cast(y * y, "float32")), parameter_list=[w, x])
    lowered = lower(main, place, {}, [y, *(gradient for _, gradient in pairs)])
    state = startup_values(startup) | {"w": W.astype(dtype), "b": B.astype(dtype)}
    given = {port.tensor: state[port.variable] for port in lowered.states}
    given |= {"x": X.astype(dtype)} | {name: np.zeros((), np.float32) for name in lowered.scalars}
    known = node_by_node(lowered.model, given)
    return [node.op_type for node in lowered.model.graph.node], [known[port.tensor] for port in lowered.fetches]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_it_is_read_as_it_was(layer: Layer) -> None:
    """Against what the CPU runs, in which Transpose stands; fp16 rounds as often as before or less."""
    _, wanted = step(layer, "float64", "cpu")
    kinds, exact = step(layer, "float32", "cuda")
    assert kinds.count("Transpose") == LAYERS[layer], kinds
    assert set(kinds) & {"Gemm", "FusedMatMul"}
    _, half = step(layer, "float16", "cuda")
    for tolerance, found in ((4e-3 if layer is narrowed else 1e-5, exact), (4e-3, half)):
        for value, right in zip(found, wanted, strict=True):
            assert value.shape == right.shape
            assert np.abs(value - right).max() <= tolerance * np.abs(right).max()


def test_who_fetches_a_transposed_matrix_gets_it() -> None:
    with building() as (main, _):
        x, w = amp.data("x", list(X.shape), "float32"), amp.create_parameter([6, 8], "float32", "w")
        turned = F.transpose(w, [1, 0])
        y = x @ turned
    lowered = lower(main, "cuda", {}, [y, turned])
    given = {port.tensor: W for port in lowered.states} | {"x": X}
    found = node_by_node(lowered.model, given)
    np.testing.assert_allclose(found[lowered.fetches[0].tensor], X @ W.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[lowered.fetches[1].tensor], W.T)
