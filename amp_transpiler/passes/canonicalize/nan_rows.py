"""Whether rows that a softmax made are NaN is asked of one number of each.

Exports of attention put 0 in the place of what a softmax makes of scores that a mask forbids altogether. All numbers of
a row come to be NaN at once: they have the sum of all for their divisor.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.view.of_type import of_type


def ask_rows(program: Graph) -> list[str]:
    """Let an IsNaN look at one number of each row of a softmax, where all that reads it selects rows; in place.

    For programs of opset 13 or later, whose softmax is along one axis.
    """
    count = 0
    for op in of_type(program, "IsNaN"):
        rows, asked = op.inputs[0], op.outputs[0]
        if rows is None or asked is None or not _along_the_last_axis(rows) or asked in program.outputs:
            continue
        if all(_selects(reader, slot, rows) for reader, slot in asked.readers):
            _ask_first(op, rows)
            count += 1
    return [f"{count} times a softmax is asked for NaN by one number of a row"] if count else []


def _along_the_last_axis(rows: Variable) -> bool:
    op, rank = rows.producer, len(rows.shape or ())
    if op is None or op.full_type != "Softmax" or op.program is not rows.program or rank == 0:
        return False
    return op.attrs.get("axis", -1) in (-1, rank - 1)


def _selects(reader: Operator, slot: object, rows: Variable) -> bool:
    """Whether an operator takes it as the condition beside the rows themselves, whose shape the result has."""
    return reader.full_type == "Where" and slot == 0 and rows in reader.inputs


def _ask_first(op: Operator, rows: Variable) -> None:
    program, shape = op.program, (*(rows.shape or ())[:-1], 1)
    asked = op.outputs[0]
    assert asked is not None
    bounds = [program.add_constant(f"{rows.name}.{name}", np.array([n])) for name, n in _FIRST]
    first = program.new_variable(rows.name, rows.dtype, shape)
    program.add_operator("Slice", [rows, *bounds], [first], like=op)
    op.set_input(0, first)
    asked.shape = shape


#: The bounds of the Slice that takes the first number of each row.
_FIRST = (("start", 0), ("end", 1), ("axis", -1))
