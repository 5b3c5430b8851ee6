"""The gradient of a softmax behind which a dropout stands reads what the dropout kept, and selects nothing again."""

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

SHAPE, RATIO = (3, 16, 32), 0.25
RNG = np.random.default_rng(2)
X, G = (RNG.normal(size=SHAPE) for _ in range(2))


def results(place: str, dtype: str, axis: int = -1) -> tuple[list[str], list[Any]]:
    """The operators of a place, and probabilities, mask, d x and the result of sum(g * dropout(softmax(x))), run on CPU."""
    with building() as (main, startup):
        x, g = (amp.data(name, list(SHAPE), dtype) for name in "xg")
        x.stop_gradient = False
        y = F.softmax(x, axis=axis)
        dropped = F.dropout(y, RATIO)
        ((_, dx),) = amp.append_backward(F.sum(F.cast(dropped * g, "float32")), parameter_list=[x])
    state = startup_values(startup)
    lowered = lower(main, place, {}, [y, dropped.producer.outputs[1], dx, dropped])
    inputs = {port.tensor: state[port.variable] for port in lowered.states} | {"x": X.astype(dtype)}
    inputs |= {"g": G.astype(dtype)} | {name: np.zeros((), np.float32) for name in lowered.scalars}
    inputs = {port.name: inputs[port.name] for port in lowered.model.graph.input}
    ports, kinds = [port.tensor for port in lowered.fetches], [node.op_type for node in lowered.model.graph.node]
    if place == "cuda":
        known = node_by_node(lowered.model, inputs)
        return kinds, [known[port] for port in ports]
    return kinds, session(lowered.model).run(ports, inputs)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_against_float64(place: str, dtype: str, axis: int) -> None:
    kinds, (y, mask, dx, _) = results(place, dtype, axis)
    x, g = (a.astype(dtype).astype(np.float64) for a in (X, G))
    exact = np.exp(x) / np.exp(x).sum(axis, keepdims=True)
    np.testing.assert_allclose(y, exact, rtol=2e-3 if dtype == "float16" else 1e-5)
    dy = g * mask / (1 - RATIO)
    wanted = exact * (dy - (dy * exact).sum(axis, keepdims=True))
    assert 0.15 < 1 - mask.mean() < 0.35
    np.testing.assert_allclose(dx, wanted, rtol=0, atol=1e-7 if dtype == "float32" else 2.0**-9 * np.abs(wanted).max())
    if axis == -1 and place == "cuda":
        assert "Cast" not in kinds[kinds.index("Softmax") :]
        assert kinds.count("Neg") == (dtype == "float32")  # of a column; a product of 16 bit has the sign
    if axis == -1 and (place == "cuda" or dtype == "float16"):
        assert kinds.count("Where") == 1  # of the forward pass
