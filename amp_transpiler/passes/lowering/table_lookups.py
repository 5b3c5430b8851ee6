"""Lookups in tables that are marked sparse, and so may be large."""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import row_lookup
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage
from amp_transpiler.passes.lowering.lowered import static
from amp_transpiler.passes.view.lookups import is_row_lookup


def emit_lookup(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit a lookup of rows of such a table; False where it is none."""
    result, table, indices = op.output(0), op.input(0), op.input(1)
    if not storage.cpu or result is None or table is None or indices is None or not is_row_lookup(op, 0):
        return False
    if not (table.sparse and table.persistable):
        return False
    shape = static(result.shape if storage.shapes is None else storage.shapes[result][1])
    half = table.dtype in HALF
    value = storage.read(op, table)
    found = row_lookup(storage.e, storage.real(table, value) if half else value, storage.read(op, indices), shape)
    storage.env[result.key] = storage.emulated(found)
    return True
