"""A step function over time: unrolled and as a Scan, with equal bits, and where each is chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ops.rnn import recurrence
from amp_transpiler.program import Program
from tests.helpers.recurrent_oracle import uneven
from tests.helpers.rules import as_model, run_cpu, tensor_info

STATE = (3, 5)


def operator() -> Operator:
    program = Program()
    return program.add_operator("LSTM", [program.add_input("x", "float32", [1])], [program.add_variable("y")])


def model(place: str, steps: int, reverse: bool = False) -> onnx.ModelProto:
    """A recurrence with two states, two sequences, a captured weight and two outputs."""
    e = Emitter(place, 21)
    fed = {"a": STATE, "b": STATE, "u": (steps, *STATE), "v": (steps, 3, 1), "w": (5, 5)}
    values = {name: Value(name, "float32", shape) for name, shape in fed.items()}
    e.reserve(fed)

    def step(states: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        (a, b), (u, v) = states, slices
        a = e.Tanh(e.Add(e.MatMul(a, values["w"]), u))
        b = e.Add(e.Mul(b, e.Sigmoid(v)), e.Mul(a, e.like(0.5, a)))
        return [a, b], [b, e.Mul(a, b)]

    states, outputs = recurrence.recur(
        e, operator(), step, [values["a"], values["b"]], [values["u"], values["v"]], reverse=reverse
    )
    infos = [tensor_info(name, "float32", shape) for name, shape in fed.items()]
    results = [tensor_info(v.name, v.dtype, v.shape or ()) for v in (*states, *outputs)]
    graph = onnx.helper.make_graph(e.nodes, "recurrence", infos, results, list(e.initializers.values()))
    onnx.checker.check_model(as_model(graph), full_check=True)
    return as_model(graph)


def feeds(steps: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(steps)
    shapes = {"a": STATE, "b": STATE, "u": (steps, *STATE), "v": (steps, 3, 1), "w": (5, 5)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def truth(given: dict[str, np.ndarray], reverse: bool) -> list[np.ndarray]:
    a, b, u, v, w = (given[name].astype(np.float64) for name in "abuvw")
    first, second = np.zeros(u.shape), np.zeros(u.shape)
    for t in reversed(range(len(u))) if reverse else range(len(u)):
        a = np.tanh(a @ w + u[t])
        b = b / (1 + np.exp(-v[t])) + a * 0.5
        first[t], second[t] = b, a * b
    return [a, b, first, second]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 7, 9, 33, 70])
def test_both_forms_give_equal_bits(steps: int, reverse: bool) -> None:
    forms = [model("cpu", steps, reverse), model("cuda", steps, reverse)]
    kinds = [{node.op_type for node in form.graph.node} for form in forms]
    assert ("Scan" in kinds[0]) == (steps > recurrence.FEW) and "Scan" not in kinds[1]
    given = feeds(steps)
    found, unrolled = (run_cpu(form, given) for form in forms)
    for one, other, expected in zip(found, unrolled, truth(given, reverse), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [33, 700, 1100])
def test_splits_and_concats_are_such_that_a_cuda_graph_can_be_replayed(steps: int) -> None:
    assert not uneven(model("cuda", steps))


def test_too_many_steps_for_cuda_are_refused_by_name() -> None:
    with pytest.raises(GraphError, match=r"LSTM.*2049 time steps.*2048"):
        model("cuda", 2049)
