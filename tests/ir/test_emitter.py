"""What rules and decompositions get from an operator that they write: one value, or as many as they ask for."""

from __future__ import annotations

import pytest

import amp_transpiler as amp
from amp_transpiler.ir.decompose import Parts
from amp_transpiler.ir.emitter import Emitter, Value


@pytest.mark.parametrize("count", [1, 2, 3])
def test_outputs_gives_a_tuple_of_as_many(count: int) -> None:
    e = Emitter()
    found = e.Split(Value("x", "float32", (6,)), axis=0, num_outputs=count, outputs=count)
    assert [v.name for v in found] == list(e.nodes[0].output) and len(found) == count


def test_without_outputs_there_is_one_value() -> None:
    e = Emitter()
    found = e.Split(Value("x", "float32", (6,)), axis=0, num_outputs=1)
    assert isinstance(found, Value) and [found.name] == list(e.nodes[0].output)


@pytest.mark.parametrize("count", [1, 3])
def test_outputs_of_a_decomposition(count: int) -> None:
    program = amp.Program()
    with amp.program_guard(program):
        x = amp.data("x", [6], "float32")
        y = amp.nn.functional.relu(x)
    parts = Parts(y.producer)
    found = parts.Split(x, axis=0, num_outputs=count, outputs=count)
    assert [v.shape for v in found] == [(6 // count,)] * count
    assert isinstance(parts.Split(x, axis=0, num_outputs=1), amp.Variable)
