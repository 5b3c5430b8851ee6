"""What a recurrent operator keeps for its gradient on CPU: nothing is computed twice, and nothing comes out otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.ops.rnn.directions import Direction
from tests.helpers.gradcheck import assert_near

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def trained(
    type_: str, directions: int, lengths: list[int] | None, peepholes: bool = False, **attrs: Any
) -> tuple[amp.Program, amp.Program, list[amp.Variable]]:
    """One operator on six steps of three rows, a loss on all that it gives, and the gradients of all that it takes."""
    rng, program, startup = np.random.default_rng(0), amp.Program(), amp.Program()
    with amp.program_guard(program, startup):
        many = GATES[type_] * 4
        shapes: list[list[int] | None] = [[6, 3, 2], *([directions, many, n] for n in (2, 4)), [directions, 2 * many]]
        shapes += [None, *[[directions, 3, 4]] * (2 if type_ == "LSTM" else 1), *[[directions, 12]] * peepholes]
        inputs = [
            s and amp.create_parameter(s, "float32", initializer=rng.normal(size=s).astype(np.float32)) for s in shapes
        ]
        if lengths is not None:
            inputs[4] = program.add_constant("lengths", np.array(lengths, np.int32))
        y = program.add_variable("y", "float32", (6, directions, 3, 4))
        states = [
            program.add_variable(f"s{i}", "float32", (directions, 3, 4)) for i in range(len(shapes) - 5 - peepholes)
        ]
        if directions == 2:
            attrs["direction"] = "bidirectional"
        program.add_operator(type_, inputs, [y, *states], attrs={"hidden_size": 4, **attrs})
        weight = amp.nn.functional.sum(y * rng.normal(size=y.shape).astype(np.float32))
        loss = sum((amp.nn.functional.sum(s * s) for s in states), weight)
        return program, startup, [y, *(gradient for _, gradient in amp.append_backward(loss))]


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {"directions": 2, "lengths": [6, 0, 4]}),
    ("LSTM", {"directions": 1, "lengths": [5, 2, 6], "peepholes": True, "input_forget": 1, "clip": 0.6}),
    ("GRU", {"directions": 2, "lengths": [6, 1, 4], "linear_before_reset": 1}),
    ("GRU", {"directions": 1, "lengths": None, "linear_before_reset": 0}),
    ("RNN", {"directions": 2, "lengths": None, "activations": ["Elu", "Tanh"]}),
]


@pytest.mark.parametrize(("type_", "form"), FORMS)
def test_gradients_are_those_of_gates_computed_again(
    type_: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, startup, wanted = trained(type_, **form)
    found = []
    for _ in range(2):
        executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        executor.run(startup, scope=scope)
        found.append(executor.run(program, fetch_list=wanted, scope=scope))
        monkeypatch.setattr(Direction, "kept", lambda self, *values: None)
    for variable, one, other in zip(wanted, *found, strict=True):
        assert_near(one, other, 2e-6, f"{type_} {variable.name}")


@pytest.mark.parametrize("type_", ["LSTM", "GRU"])
def test_no_gate_is_computed_twice(type_: str) -> None:
    program, _, wanted = trained(type_, 1, None, **({"linear_before_reset": 1} if type_ == "GRU" else {}))
    nodes = list(program.lower(amp.CPUPlace(), fetch_list=wanted).model.graph.node)
    kinds = [node.op_type for node in nodes]
    # The input's part of the gates, then the gradients of X, W and R; what the recurrences need is inside them.
    assert kinds.count("Gemm") == 4 and kinds.count("Scan") == 2 and type_ not in kinds
    evaluated = program.clone(for_test=True)
    assert type_ in [
        node.op_type for node in evaluated.lower(amp.CPUPlace(), fetch_list=[evaluated.var("y")]).model.graph.node
    ]
