"""The gradient of a softmax that weighs values, as attention does, reads the sums over its rows off what it weighed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.building import building, startup_values
from tests.helpers.node_by_node import node_by_node

HEADS, PLACES, WIDTH = 2, 64, 16
RNG = np.random.default_rng(4)
SCORES, VALUES, G = (
    RNG.normal(size=(3, HEADS, PLACES, width)) * scale
    for width, scale in ((PLACES, 3.0), (2 * WIDTH, 1.0), (2 * WIDTH, 1.0))
)
RATIO = 0.25


def attention(dtype: str, mixed: bool, drops: bool, width: int) -> tuple[list[onnx.NodeProto], list[np.ndarray]]:
    """What CUDA runs, and probabilities, mask (all of them without a dropout) and gradients of scores and values."""
    with building() as (main, startup):
        shapes = {"s": SCORES.shape, "v": (*VALUES.shape[:3], width), "g": (*G.shape[:3], width)}
        s, v, g = (amp.data(name, list(shape), dtype) for name, shape in shapes.items())
        s.stop_gradient = v.stop_gradient = False
        p = F.softmax(F.cast(s, "float32") if mixed else s)
        weights = F.dropout(p, RATIO) if drops else p
        o = F.matmul(F.cast(weights, dtype) if mixed else weights, v)
        loss = F.sum(F.cast(o * g, "float32"))
        ((_, ds), (_, dv)) = amp.append_backward(loss, parameter_list=[s, v])
    state = startup_values(startup)
    mask = weights.producer.outputs[1] if drops else None
    lowered = lower(main, "cuda", {}, [p, *[mask] * drops, ds, dv])
    values = {port.tensor: state[port.variable] for port in lowered.states}
    values |= {name: np.zeros((), np.float32) for name in lowered.scalars}
    fed = zip(shapes, (SCORES, VALUES[..., :width], G[..., :width]), strict=True)
    values |= {name: array.astype(dtype) for name, array in fed}
    known = node_by_node(lowered.model, {port.name: values[port.name] for port in lowered.model.graph.input})
    made, *dropped, ds, dv = (known[port.tensor] for port in lowered.fetches)
    return list(lowered.model.graph.node), [made, *(dropped or [np.ones(made.shape, bool)]), ds, dv]


def sums(nodes: list[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """What adds to a multiple of each row the products of two others, element by element."""
    made = {name: node for node in nodes for name in node.output}
    for node in nodes:
        if node.op_type == "HyperConnectionPostMix" and len(node.input) == 4:
            shape = made.get(node.input[2])
            if shape is not None and shape.op_type == "Reshape" and made[shape.input[0]].op_type == "FusedMatMul":
                yield node


@pytest.mark.parametrize("drops", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize(("dtype", "mixed"), [("float32", False), ("float16", False), ("float16", True)])
def test_against_float64(dtype: str, mixed: bool, drops: bool) -> None:
    nodes, (p, mask, ds, dv) = attention(dtype, mixed, drops, WIDTH)
    assert len(list(sums(nodes))) == 1
    s, v, g = (a.astype(dtype).astype(np.float64) for a in (SCORES, VALUES[..., :WIDTH], G[..., :WIDTH]))
    exact = np.exp(s - s.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    kept = mask / (1 - RATIO) if drops else mask
    dp = (g @ v.swapaxes(-1, -2)) * kept
    wanted = exact * (dp - (dp * exact).sum(-1, keepdims=True))
    size = 1e-5 if dtype == "float32" else 2.0**-9
    np.testing.assert_allclose(p, exact, atol=size)
    np.testing.assert_allclose(ds, wanted, rtol=0, atol=size * np.abs(wanted).max())
    np.testing.assert_allclose(dv, (exact * kept).swapaxes(-1, -2) @ g, rtol=0, atol=size * np.abs(g).max())
    if mixed:  # the gradient of the weights is read as the product made it
        assert not [n for n in nodes if n.op_type == "Cast" and "GRAD" in n.input[0] and "FusedMatMul" in n.input[0]]


def test_rows_that_are_hardly_shorter_are_not_kept_for_it() -> None:
    nodes, _ = attention("float16", False, False, 2 * WIDTH)
    assert not list(sums(nodes))
