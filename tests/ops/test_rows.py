"""Rows that are joined come out of the operator that made each of them, where that moves no more bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.flat import Rows
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training.rows import joined, products, remember_state, state_as
from tests.helpers.node_by_node import node_by_node
from tests.helpers.rules import as_model, tensor_info

SHAPES = ((5, 1), (130,), (2, 3))
RNG = np.random.default_rng(0)
Values = list[Value]


def _run(
    write: Callable[[Emitter, Values, Values], Values], shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> tuple[list[str], np.ndarray, list[np.ndarray]]:
    """The operators that join what ``write`` makes of two lists of tensors; what came of them, and of ``write``."""
    e = Emitter("cuda")
    rows = Rows(tuple(range(len(shapes))), shapes)
    given = [[Value(f"{letter}{i}", "float32", shape) for i, shape in enumerate(shapes)] for letter in "ab"]
    e.reserve(v.name for values in given for v in values)
    each = write(e, *given)
    before = len(e.nodes)
    whole = joined(e, rows, each)
    infos = [tensor_info(v.name, v.dtype, v.shape or ()) for values in given for v in values]
    outputs = [onnx.helper.make_empty_tensor_value_info(v.name) for v in (whole, *each)]
    graph = onnx.helper.make_graph(e.nodes, "joined", infos, outputs, list(e.initializers.values()))
    feeds = {v.name: RNG.uniform(1, 2, v.shape).astype(np.float32) for values in given for v in values}
    known = node_by_node(as_model(graph), feeds)
    return [node.op_type for node in e.nodes[before:]], known[whole.name], [known[v.name] for v in each]


def _different_numbers(e: Emitter, a: Values, b: Values) -> Values:
    return [e.Neg(e.Mul(v, e.like(i, v))) for i, v in enumerate(a)]


def _a_quotient(e: Emitter, a: Values, b: Values) -> Values:
    ones = [e.const(np.ones(v.shape or ()), "float32") for v in a]
    return [e.reshape(e.Sub(e.Div(one, v), w), (v.shape or ())[::-1]) for one, v, w in zip(ones, a, b, strict=True)]


def _a_choice(e: Emitter, a: Values, b: Values) -> Values:
    good = e.Equal(e.const(0, "int32"), e.const(0, "int32"), shape=())
    return [e.op("Where", good, v, w, shape=v.shape) for v, w in zip(a, b, strict=True)]


def _unlike(e: Emitter, a: Values, b: Values) -> Values:
    return [e.Neg(a[0]), e.Mul(a[1], e.like(2, a[1])), e.Neg(a[2])]


def _a_sum_with_a_number(e: Emitter, a: Values, b: Values) -> Values:
    return [e.Add(v, e.like(1, v)) for v in a]


@pytest.mark.parametrize(
    ("write", "operators"),
    [
        (_different_numbers, {"Mul", "Neg", "Concat"}),
        (_a_quotient, {"Div", "Sub", "Concat"}),
        (_a_choice, {"Where", "Concat"}),
        (_unlike, {"Concat"}),
        (_a_sum_with_a_number, {"Concat"}),  # between the rows it would put that number
    ],
)
def test_joined_is_each_of_them_with_zeros_between(
    write: Callable[[Emitter, Values, Values], Values], operators: set[str]
) -> None:
    made, whole, each = _run(write)
    expected = np.zeros((1, 390), np.float32)
    for offset, value in zip((0, 128, 384), each, strict=True):
        expected[0, offset : offset + value.size] = value.ravel()
    assert set(made) - {"Reshape"} == operators
    np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize(("quotients", "divisions"), [(2, 0), (3, 1), (5, 1)])
def test_most_quotients_are_divided_at_once(quotients: int, divisions: int) -> None:
    """The others by ones, which changes no bit; of two, a second Concat would cost what a Div less saves."""

    def write(e: Emitter, a: Values, b: Values) -> Values:
        return [e.Div(v, w) if 0 < i <= quotients else e.Neg(v) for i, (v, w) in enumerate(zip(a, b, strict=True))]

    made, whole, each = _run(write, (*SHAPES, (128,), (64, 2), (7,), (1,)))
    assert (made.count("Div"), made.count("Concat")) == (divisions, 1 + divisions)
    for offset, value in zip((0, 128, 384, 512, 640, 768, 896), each, strict=True):
        assert whole[0, offset : offset + value.size].tobytes() == value.tobytes()
    assert np.count_nonzero(whole) == sum(value.size for value in each)


@pytest.mark.parametrize(
    ("place", "shapes", "whole", "casts"),
    [
        ("webgpu", [(5,), (130,), (2, 3)], True, 1),
        ("webgpu", [(5,), (130,), (2, 3)], False, 2),
        ("cuda", [(5,), (130,), (2, 3)], True, 3),
        ("cuda", [(130,), (5,), (130,), (2, 65), (2, 3), (130,)], True, 3),
        ("cuda", [(130,), (5,), (130,), (2, 65), (130,), (130,), (5,)], False, 4),
    ],
)
def test_parts_of_a_flat_state_are_cast_together(
    place: str, shapes: list[tuple[int, ...]], whole: bool, casts: int
) -> None:
    """All of them, or the vectors alone: the matrix is cast by itself then, and only where somebody asks for it. On CUDA
    those of which four or more are of one length."""
    e = Emitter(place)
    states = [Value(f"s{i}", "float32", shape) for i, shape in enumerate(shapes)]
    e.reserve(["flat", *(v.name for v in states)])
    rows = Rows(tuple(range(len(shapes))), tuple(shapes))
    remember_state(e, states, Value("flat", "float32", rows.shape), whole)
    low = [state_as(e, v, "float16") for v in states]
    assert [state_as(e, v, "float32") for v in states] == states
    values = {v.name: RNG.normal(size=v.shape).astype(np.float32) for v in states}
    flat = np.zeros(rows.shape, np.float32)
    for segment in rows.segments(list(values)):
        flat[0, segment.offset : segment.offset + values[segment.variable].size] = values[segment.variable].ravel()
    infos = [tensor_info(n, "float32", v.shape) for n, v in ({"flat": flat} | values).items()]
    outputs = [onnx.helper.make_empty_tensor_value_info(v.name) for v in low]
    graph = onnx.helper.make_graph(e.nodes, "cast", infos, outputs, list(e.initializers.values()))
    known = node_by_node(as_model(graph), values | {"flat": flat})
    assert [node.op_type for node in e.nodes].count("Cast") == casts
    for v, state in zip(low, states, strict=True):
        np.testing.assert_array_equal(known[v.name], values[state.name].astype(np.float16))


def test_products_of_pairs_are_one() -> None:
    e = Emitter("cuda")
    pairs = [(Value(f"a{i}", "float32", (n,)), Value(f"b{i}", "float32", (n,))) for i, n in enumerate((5, 130, 3))]
    made = products(e, pairs)
    values = {v.name: RNG.normal(size=v.shape).astype(np.float32) for pair in pairs for v in pair}
    infos = [tensor_info(n, "float32", v.shape) for n, v in values.items()]
    outputs = [onnx.helper.make_empty_tensor_value_info(v.name) for v in made]
    graph = onnx.helper.make_graph(e.nodes, "products", infos, outputs, list(e.initializers.values()))
    known = node_by_node(as_model(graph), values)
    assert [node.op_type for node in e.nodes].count("Mul") == 1
    for v, (a, b) in zip(made, pairs, strict=True):
        np.testing.assert_array_equal(known[v.name], values[a.name] * values[b.name])


def test_running_statistics_of_all_layers_come_in_one_update() -> None:
    """Two layers of 5 and 3 channels on CUDA, against float64; their states lie side by side."""
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 5, 6, 6], "float32")
        h = amp.nn.batch_norm(x)
        y = amp.nn.batch_norm(F.split(h * h, [3, 2], axis=1)[0])
        loss = F.mean(y * y)
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    lowered = main.lower(amp.CUDAPlace(0))
    ports = {port.variable: port for port in lowered.updates}
    feeds = {"x": RNG.normal(3, 2, (4, 5, 6, 6)).astype(np.float32), "@zero": np.zeros((), np.float32)}
    mean, var = RNG.normal(size=(1, 131)).astype(np.float32), RNG.uniform(1, 2, (1, 131)).astype(np.float32)
    states = {"@BatchNormalization/3": mean, "@BatchNormalization/4": var}
    for port in lowered.states:
        states.setdefault(port.tensor, np.ones([int(n or 0) for n in port.shape or ()], np.float32))
    names = {info.name for info in lowered.model.graph.input}
    known = node_by_node(lowered.model, {name: value for name, value in (feeds | states).items() if name in names})

    layer, truth = feeds["x"].astype(np.float64), []
    for channels in (5, 3):
        layer = layer[:, :channels]
        m, v = layer.mean((0, 2, 3)), layer.var((0, 2, 3))
        truth.append((m, v))
        layer = ((layer - m.reshape(1, -1, 1, 1)) / np.sqrt(v.reshape(1, -1, 1, 1) + 1e-5) + 1) ** 2
    for slot, old in enumerate((mean, var)):
        port = ports[f"@BatchNormalization/{3 + slot}"]
        assert [(s.offset, s.shape) for s in port.segments] == [(0, (5,)), (128, (3,))]
        new = known[port.tensor][0]
        for segment, moments in zip(port.segments, truth, strict=True):
            at = slice(segment.offset, segment.offset + segment.shape[0])
            np.testing.assert_allclose(new[at], 0.9 * old[0, at] + 0.1 * moments[slot], rtol=1e-5)
        assert np.isfinite(new).all()
