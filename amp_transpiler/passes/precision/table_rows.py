"""Rows of tables: a lookup in a table that is 16 bit moves them as they are, and what reads them in fp32 casts them."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace

from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable, origin
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import SHORT
from amp_transpiler.passes.precision.rules import Decision
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.typing import Slots

#: Whose kernels take each 16-bit type where those of products do.
_LOOKUPS = frozenset({"Gather", "GatherND"})
#: Why an operator is fp32 that might be 16 bit.
_FOR_CASTS = frozenset({Kind.CHEAPER, Kind.NO_NEIGHBOUR})
#: Elements of a table of which a file should not hold two.
_LARGE = 1 << 16


def shares_table(op: Operator, decision: Decision) -> bool:
    """Whether the operator looks up rows of a large table and is fp32 for no more than its casts: where others read the
    table in 16 bit it does too."""
    table = op.input(0)
    if op.full_type not in _LOOKUPS or decision.why.kind not in _FOR_CASTS or table is None:
        return False
    return math.prod(static(table.shape) or (0,)) >= _LARGE


def move_rows(decisions: dict[Operator, Decision], narrow: Container[Variable], dtype: str) -> None:
    """Let lookups in tables that are 16 bit, or become it (``narrow``), be 16 bit: rows are cast, not the table."""
    for op, decision in decisions.items():
        if op.full_type not in _LOOKUPS or op.inputs[0] is None:
            continue
        table = origin(op.inputs[0])
        held = table.persistable or (constants.is_constant(table) and shares_table(op, decision))
        if held and (table in narrow or table.dtype == dtype):
            slots = Slots([dtype, *decision.slots.inputs[1:]], [dtype, *decision.slots.outputs[1:]])
            why = Reason(Kind.MOVES_ROWS, table.name, runs=SHORT[dtype])
            decisions[op] = replace(decision, precision=dtype, why=why, slots=slots)
