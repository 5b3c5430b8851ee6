"""A gradient that several readers of a variable contribute to is added up by the products that make the contributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.building import building, startup_values
from tests.helpers.node_by_node import node_by_node
from tests.helpers.sessions import session

WIDTH, READERS = 64, 3
RNG = np.random.default_rng(8)
X, G = (RNG.normal(size=(2, 4, WIDTH)) for _ in range(2))
WEIGHTS = [RNG.normal(size=(WIDTH, WIDTH)) / 8 for _ in range(READERS)]


def gradient(
    place: str, dtype: str, weights: list[Any], g: Any, matrix: bool = False, fetch_shares: bool = False
) -> tuple[list[str], Any]:
    """The operators of a place, and d x of sum(g * (x w0 + x w1 + ... + x)) as they give it, run on CPU."""
    shape = [8, WIDTH] if matrix else [2, 4, WIDTH]
    with building() as (main, startup):
        x, given = (amp.data(name, shape, dtype) for name in "xg")
        x.stop_gradient = False
        made = [x @ amp.create_parameter([WIDTH, WIDTH], dtype, f"w{number}") for number, _ in enumerate(weights)]
        y = sum(made[1:], made[0]) + x
        ((_, dx),) = amp.append_backward(F.sum(F.cast(y * given, "float32")), parameter_list=[x])
    assert dx.producer is not None
    shares = [v for v in dx.producer.inputs if v is not None]
    assert len(shares) == 1 + len(weights)
    state = startup_values(startup) | {f"w{n}": w.astype(dtype) for n, w in enumerate(weights)}
    lowered = lower(main, place, {}, [dx, *(shares if fetch_shares else [])])
    inputs = {port.tensor: state[port.variable] for port in lowered.states}
    inputs |= {"x": X.reshape(shape).astype(dtype), "g": g.reshape(shape).astype(dtype)}
    inputs |= {name: np.zeros((), np.float32) for name in lowered.scalars}
    inputs = {port.name: inputs[port.name] for port in lowered.model.graph.input}
    kinds = [node.op_type for node in lowered.model.graph.node]
    port = lowered.fetches[0].tensor
    if place == "cuda":
        return kinds, node_by_node(lowered.model, inputs)[port]
    return kinds, session(lowered.model).run([port], inputs)[0]


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_each_product_adds_what_is_there(place: str, matrix: bool) -> None:
    """Against float64: a rounding for each product, and no operator that adds."""
    kinds, found = gradient(place, "float16", WEIGHTS, G, matrix)
    g = G.astype(np.float16).astype(np.float64)
    parts = [g, *(g @ w.astype(np.float16).astype(np.float64).T for w in WEIGHTS)]
    assert (np.abs(found.reshape(G.shape) - sum(parts)) <= np.abs(parts).sum(0) * READERS * 2.0**-11).all()
    assert kinds.count("Gemm") == READERS and not {"Add", "Concat", "ReduceSum", "Sum"} & set(kinds)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_share_beyond_the_format_does_not_count(place: str) -> None:
    """The product is 72000 where 60000 fits, and what is there before takes it back: added before it is rounded."""
    weight = -np.eye(WIDTH) * 3 / 2
    _, found = gradient(place, "float16", [weight], np.full(G.shape, 48000.0))
    np.testing.assert_array_equal(found, np.full(G.shape, -24000.0, np.float16))


def test_who_fetches_a_share_gets_it() -> None:
    kinds, found = gradient("cuda", "float16", WEIGHTS, G, fetch_shares=True)
    assert "ReduceSum" in kinds
    g = G.astype(np.float16).astype(np.float64)
    exact = g + sum(g @ w.astype(np.float16).astype(np.float64).T for w in WEIGHTS)
    np.testing.assert_allclose(found.astype(np.float64), exact, atol=0.02)


def test_fp32_on_cpu_keeps_its_order() -> None:
    """The same bits as the gradients added up by one Sum."""
    kinds, found = gradient("cpu", "float32", WEIGHTS, G)
    assert "Sum" in kinds and "Gemm" not in kinds
    g = G.astype(np.float32)
    exact = g.astype(np.float64) + sum(
        g.astype(np.float64) @ w.astype(np.float32).astype(np.float64).T for w in WEIGHTS
    )
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
