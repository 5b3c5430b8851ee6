"""Shares of a sum, as routers of experts make them of probabilities: the floor under the sum is one that float16 has.

In ``x / (sum(x) + 1e-20)`` the number is there for a sum of 0, and is 0 itself in float16, so that sum and quotient
would be fp32 between casts. Where no x is below 0, or magnitudes are added, the least number of float16 does for it: a
sum that is less is 0 in float16, and so is all that it is a sum of.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.passes.canonicalize.matching import LEAST_HALF, added_number, alone, lower_bound, put
from amp_transpiler.passes.view.computed_by import computed_by
from amp_transpiler.passes.view.of_type import of_type


def write_shares(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> int:
    """Raise the floors under sums that float16 does not hold, in place; how many.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    count = 0
    for last in of_type(program, "Div"):
        expand = alone(last.input(1), ("Expand",), names)
        below = last.input(1) if expand is None else expand.input(0)
        floor = alone(below, ("Add", "Max", "Clip"), names)
        summed, least = (None, None) if floor is None else _floored(floor)
        total = alone(summed, ("ReduceSum", "ReduceL1"), names)
        if floor is None or total is None or least is None or not 0 < least < LEAST_HALF:
            continue
        whole = total.type == "ReduceL1" or _never_negative(total.input(0))
        if total.input(0) is last.input(0) and whole and not keep & {last, floor, total}:
            _write(floor, summed)
            count += 1
    return count


def _floored(op: Operator) -> tuple[Variable | None, float | None]:
    """What has a floor under it, or a number added to it, and the number."""
    return (op.input(0), lower_bound(op)) if op.type == "Clip" else added_number(op.output(0), op.type)


def _never_negative(variable: Variable | None) -> bool:
    """Whether it holds elements of what has none below 0, whatever it is made of."""
    bounds = [traits_of(op).bounded for op in computed_by(variable) or ()]
    return bool(bounds) and all(each is not None and each[0] >= 0 for each in bounds)


def _write(floor: Operator, summed: Variable | None) -> None:
    program, out = floor.program, floor.outputs[0]
    assert summed is not None and out is not None
    held = program.add_constant(f"{out.name}.floor", np.array(LEAST_HALF, np.float32))
    put(floor, "Max", [summed, held])
