"""Operators that look rows of a table up."""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator


def is_row_lookup(op: Operator, slot: int | str) -> bool:
    """Whether an operator looks up rows, slices of the first axis, of what it reads in this slot."""
    return op.full_type == "Gather" and slot == 0 and int(op.attrs.get("axis", 0)) == 0
