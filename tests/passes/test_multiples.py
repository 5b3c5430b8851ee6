"""A number that scales a tensor goes into what reads it: on CUDA no pass of its own, and one rounding less."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
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
    lowered = main.lower(amp.CUDAPlace(0) if place == "cuda" else amp.CPUPlace(), fetch_list=fetches)
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
    lowered = main.lower(amp.CUDAPlace(0), fetch_list=[dropped, fetches[0]])
    given = {port.tensor: state[port.variable] for port in lowered.states} | {"x": X}
    known = node_by_node(lowered.model, given | {name: np.zeros((), np.float32) for name in lowered.scalars})
    multiple, y = (known[port.tensor] for port in lowered.fetches)
    np.testing.assert_array_equal(y, X + multiple)


HEADS, FACTOR = 4, 0.375


def scores(place: str, dtype: str, other_reader: bool = False, fetch: bool = False) -> tuple[list[str], list[Any]]:
    """(x w * 0.375) as heads times x as heads: the operators of a place that make or read float tensors; the products,
    the gradient of w, and what is fetched besides."""
    with building() as (main, startup):
        x, g = (amp.data(name, [2, ROWS, WIDTH], dtype) for name in "xg")
        w = amp.create_parameter([WIDTH, WIDTH], dtype, "w")
        scaled = (x @ w) * FACTOR
        q, k = (F.transpose(F.reshape(v, [2, ROWS, HEADS, WIDTH // HEADS]), [0, 2, 1, 3]) for v in (scaled, x))
        y = q @ F.transpose(k, [0, 1, 3, 2])
        loss = F.sum(F.cast(y, "float32"))
        if other_reader:
            loss = loss + F.sum(F.cast(F.relu(scaled) * g, "float32"))
        ((_, dw),) = amp.append_backward(loss, parameter_list=[w])
    lowered = lower(main, place, {}, [y, dw, *([scaled] if fetch else [])])
    state = startup_values(startup) | {"w": W.astype(dtype)}
    given = {port.tensor: state[port.variable] for port in lowered.states}
    given |= {"x": X.astype(dtype), "g": G.astype(dtype)} | {n: np.zeros((), np.float32) for n in lowered.scalars}
    given = {port.name: given[port.name] for port in lowered.model.graph.input}
    ports, kinds = [port.tensor for port in lowered.fetches], [node.op_type for node in lowered.model.graph.node]
    if place == "cuda":
        known = node_by_node(lowered.model, given)
        return kinds, [known[port] for port in ports]
    return kinds, session(lowered.model).run(ports, given)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_what_the_program_scales(place: str, dtype: str) -> None:
    """The number goes through reshapes and transposes into the products, of both directions."""
    kinds, (y, dw) = scores(place, dtype)
    x, w = (a.astype(dtype).astype(np.float64) for a in (X, W))
    heads = [v.reshape(2, ROWS, HEADS, -1).transpose(0, 2, 1, 3) for v in ((x @ w) * FACTOR, x)]
    exact = heads[0] @ heads[1].transpose(0, 1, 3, 2)
    dq = np.broadcast_to(heads[1].sum(2, keepdims=True), heads[0].shape).transpose(0, 2, 1, 3).reshape(2, ROWS, WIDTH)
    limit = 2.0**-9 if dtype == "float16" else 1e-5
    wanted = (x.reshape(-1, WIDTH).T @ dq.reshape(-1, WIDTH)) * FACTOR
    for found, value in ((y, exact), (dw, wanted)):
        assert np.abs(found - value).max() <= limit * np.abs(value).max()
    assert ("Mul" in kinds) == (place == "cpu")


def test_others_read_the_multiple() -> None:
    """Who fetches it, and where something else reads it too, all do."""
    kinds, (*found, fetched) = scores("cuda", "float16", fetch=True)
    assert kinds.count("Mul") == 1
    np.testing.assert_array_equal(fetched, ((X @ W).astype(np.float16) * np.float16(FACTOR)))
    plain, expected = scores("cuda", "float16")
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))
    kinds, _ = scores("cuda", "float16", other_reader=True)
    assert "Mul" in kinds and "Mul" not in plain


def test_places_of_unknown_number_are_transposed() -> None:
    """Where pictures stand in a text is looked up before the run: their number is known to nobody."""
    text = """<ir_version: 8, opset_import: ["" : 18]> net (int64[2,5] ids) => (float[2,5,4] y)
      <int64 picture = {6}, int64[1] none = {0}, int64[1] two = {-1}, float[7,4] w = {WEIGHTS}>
    {
      found = Equal(ids, picture)  at = NonZero(found)  rows = Transpose<perm = [1, 0]>(at)
      number = Shape<start = 0, end = 1>(rows)  none_there = Expand(none, number)
      clean = ScatterND(ids, rows, none_there)  y = Gather(w, clean)
    }"""
    weights = RNG.normal(size=(7, 4)).astype(np.float32)
    numbers = ", ".join(f"{v:.4f}" for v in weights.reshape(-1))
    main = amp.Program.from_onnx(onnx.parser.parse_model(text.replace("{WEIGHTS}", f"{{{numbers}}}")))
    amp.prepare_training(main)
    with amp.program_guard(main, main.startup):
        loss = F.sum(F.square(main.outputs[0]))
        ((_, grad),) = amp.append_backward(loss)
    ids = np.array([[1, 6, 2, 6, 0], [3, 6, 6, 4, 5]])
    found = []
    for place in (amp.CPUPlace(), amp.CUDAPlace(0)):
        lowered = main.lower(place, {"ids": ids.shape}, fetch_list=[loss, grad])
        given = {port.tensor: np.round(weights, 4) for port in lowered.states} | {"ids": ids}
        known = node_by_node(lowered.model, given | {name: np.zeros((), np.float32) for name in lowered.scalars})
        found.append([known[port.tensor] for port in lowered.fetches])
    rows = np.bincount(np.where(ids == 6, 0, ids).reshape(-1), minlength=7)
    for _, dw in found:
        np.testing.assert_allclose(dw, 2 * np.round(weights, 4) * rows[:, None], rtol=1e-5)
