"""Lookups in tables that are marked sparse, and so may be large, and in those whose rows are dealt out among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import row_lookup
from amp_transpiler.ops.training.dealt_tables import look_up_dealt
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage
from amp_transpiler.passes.view.lookups import is_row_lookup


def looks_up_dealt(operators: Sequence[Operator]) -> bool:
    """Whether operators look up rows that are dealt out: what ranks exchange has fixed shapes."""
    return any((v := op.input(0)) is not None and v.dealt is not None for op in operators)


def emit_lookup(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit a lookup of rows of such a table; False where it is none."""
    result, table, indices = op.output(0), op.input(0), op.input(1)
    if result is None or table is None or indices is None or not is_row_lookup(op, 0) or not table.persistable:
        return False
    if table.dealt is not None:
        _emit_dealt(storage, op, result, table, indices)
        return True
    if not (storage.cpu and table.sparse):
        return False
    shape = storage.fixed(result)
    value = storage.read(op, table)
    real = storage.real(table, value) if table.dtype in HALF else value
    storage.env[result.key] = storage.emulated(row_lookup(storage.e, real, storage.read(op, indices), shape))
    return True


def _emit_dealt(storage: EmulatedStorage, op: Operator, result: Variable, table: Variable, indices: Variable) -> None:
    ids = storage.shaped(op, indices)
    held = storage.stands_for(table, storage.shaped(op, table))
    rows = (table.shape or (None,))[0]
    if not isinstance(rows, int) or table.dealt is None:
        raise GraphError(f"the rows of table '{table.name}' are dealt out, and how many there are is not known")

    with storage.e.emulation() if storage.cpu else nullcontext():
        found = look_up_dealt(storage.e, op, held, ids, table.dealt, rows, table.name)
    storage.env[result.key] = storage.finished(result, found, True)
