"""The order of operators: as added, each after its producers, whatever was put in late."""

import random

import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError


def _late(count: int, seed: int) -> amp.Program:
    """A program whose operators were added in another order than that in which they read one another."""
    rng, program = random.Random(seed), amp.Program()
    variables = [program.add_input("x", "float32", [2])]
    variables += [program.add_variable(f"v{i}", "float32", [2]) for i in range(count)]
    for i in rng.sample(range(count), count):
        read = rng.sample(variables[: i + 1], min(2, i + 1))
        program.add_operator("Sum", read, [variables[i + 1]])
    return program


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_a_depth_first_search_from_each_operator_as_added(seed: int) -> None:
    program = _late(30, seed)
    expected: list[int] = []

    def visit(key: int) -> None:
        if key not in expected:
            op = next(op for op in program.added if op.key == key)
            for before in sorted({v.producer.key for v in op.inputs if v.producer is not None}):
                visit(before)
            expected.append(key)

    for op in program.added:
        visit(op.key)
    assert [op.key for op in program.operators] == expected


def test_a_circle_among_operators_that_were_added_late_is_found() -> None:
    program = amp.Program()
    x, a, b = program.add_input("x", "float32", [2]), *(program.add_variable(n, "float32", [2]) for n in "ab")
    program.add_operator("Relu", [x], [program.add_variable("c", "float32", [2])])
    program.add_operator("Add", [x, a], [b])
    program.add_operator("Add", [x, b], [a])
    with pytest.raises(GraphError, match="cycle"):
        _ = program.operators
