"""Roots that are written as powers become roots: Gemma multiplies by ``(mean(x * x) + epsilon) ** -0.5``.

What recognises norms looks for Sqrt and Reciprocal, and a negative power of what is next to 0 leaves float16.
"""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.matching import added_number, computed, maker, number, put, squaring
from amp_transpiler.passes.view.of_type import of_type


def write_roots(program: Graph, names: frozenset[str] = frozenset(), keep: frozenset[Operator] = frozenset()) -> int:
    """Put Sqrt, and Reciprocal behind it, in the place of powers of 0.5 and -0.5 of mean squares and sums of squares,
    which are not negative, with or without an epsilon; in place; how many.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    count = 0
    for power in of_type(program, "Pow"):
        exponent, out = number(power.input(1)), power.output(0)
        if exponent not in (0.5, -0.5) or out is None or power in keep or out.name in names:
            continue
        if _of_squares(power.input(0)):
            _write(power, exponent < 0)
            count += 1
    return count


def _of_squares(variable: Variable | None) -> bool:
    summed, epsilon = added_number(variable)
    read = variable if epsilon is None or epsilon < 0 else summed
    if maker(read, "ReduceSumSquare") is not None:
        return True
    total = maker(read, "ReduceMean") or maker(read, "ReduceSum")
    return total is not None and squaring(total.input(0)) is not None


def _write(power: Operator, inverse: bool) -> None:
    base, out = power.inputs[0], power.outputs[0]
    assert base is not None and out is not None
    if inverse:
        put(power, "Reciprocal", [computed(power, "Sqrt", [base], f"{out.name}.root", out.shape)])
    else:
        put(power, "Sqrt", [base])
