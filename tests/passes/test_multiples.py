"""A number that scales a tensor goes into what reads it: on CUDA no pass of its own, and one rounding less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.building import building, startup_values
from tests.helpers.node_by_node import node_by_node
from tests.helpers.sessions import session

ROWS, WIDTH = 8, 64
RATIO = 0.25
RNG = np.random.default_rng(4)
X = RNG.normal(size=(2, ROWS, WIDTH)).astype(np.float16)
G = RNG.normal(size=(2, ROWS, WIDTH)).astype(np.float16)
W = RNG.normal(size=(WIDTH, WIDTH)).astype(np.float16) / 8


def program() -> tuple[amp.Program, list[Any], dict[str, Any]]:
    """x + dropout(x w) in float16: its value, the mask, and the gradients of x, w and of a bias before the dropout."""
    with building() as (main, startup):
        x, g = (amp.data(name, [2, ROWS, WIDTH], "float16") for name in "xg")
        w, b = (amp.create_parameter(s, "float16", n) for n, s in (("w", [WIDTH, WIDTH]), ("b", [WIDTH])))
        x.stop_gradient = False
        dropped = F.dropout(x @ w + b, RATIO)
        y = x + dropped
        loss = F.sum(y * g)
        pairs = amp.append_backward(loss, parameter_list=[w, b, x])
    state = startup_values(startup) | {"w": W, "b": np.zeros(WIDTH, np.float16)}
    return main, [y, dropped.producer.outputs[1], *(grad for _, grad in pairs)], state


def results(place: str) -> tuple[list[tuple[str, int]], list[Any]]:
    main, fetches, state = program()
    lowered = main.lower(amp.CUDAPlace(0) if place == "cuda" else amp.CPUPlace(), fetches=fetches)
    given = {port.tensor: state[port.variable] for port in lowered.states} | {"x": X, "g": G}
    given |= {name: np.zeros((), np.float32) for name in lowered.scalars}
    if place == "cpu":
        return [], session(lowered.model).run([port.tensor for port in lowered.fetches], given)
    known = node_by_node(lowered.model, given)
    made = {n.output[0]: n.op_type for n in lowered.model.graph.node}
    large = [kind for name, kind in made.items() if known[name].size == X.size and known[name].dtype == np.float16]
    return [(kind, large.count(kind)) for kind in sorted(set(large))], [known[port.tensor] for port in lowered.fetches]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_values_and_gradients(place: str) -> None:
    """Against float64: products round once, and sums of two what they add too."""
    kinds, (y, mask, dw, db, dx) = results(place)
    x, g, w, kept = (a.astype(np.float64) for a in (X, G, W, mask))
    scale = 1 / (1 - RATIO)
    dropped, through = kept * scale * (x @ w).astype(np.float16), g * kept * scale
    back = through @ w.T
    once, twice = 2.0**-11, 2.0**-10
    for found, exact, limit in (
        (y, x + dropped, twice * (np.abs(x) + np.abs(dropped))),
        (dx, g + back, twice * (np.abs(g) + np.abs(back))),
        (dw, np.einsum("brk,brn->kn", x, through), once * np.abs(np.einsum("brk,brn->kn", x, through))),
        (db, through.sum((0, 1)), once * np.abs(through.sum((0, 1)))),
    ):
        assert (np.abs(found - exact) <= 1.001 * limit + 1e-5).all()
    if place == "cuda":
        assert dict(kinds)["GatedAdd"] == 1 and dict(kinds)["Mul"] == 1, f"{kinds}: but for g, nothing is multiplied"


def test_who_fetches_the_multiple_gets_it() -> None:
    main, fetches, state = program()
    dropped = next(op for op in main.operators if op.type == "Dropout").outputs[0]
    lowered = main.lower(amp.CUDAPlace(0), fetches=[dropped, fetches[0]])
    given = {port.tensor: state[port.variable] for port in lowered.states} | {"x": X}
    known = node_by_node(lowered.model, given | {name: np.zeros((), np.float32) for name in lowered.scalars})
    multiple, y = (known[port.tensor] for port in lowered.fetches)
    np.testing.assert_array_equal(y, X + multiple)
