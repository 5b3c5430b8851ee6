"""Scatters that add, on CPU: in one of the forms that add whole whatever the number of threads."""

from __future__ import annotations

from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import combined, traits_of
from amp_transpiler.ops.row_sums import added_rows
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage


def emit_scatter(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit a ScatterND that adds; False where it is none, or sizes are not known: then it has one thread."""
    if not storage.cpu or op.type != "ScatterND" or op.domain or combined(op) != "add":
        return False
    result, values = op.output(0), list[Value]()
    for v in op.inputs:
        shape = None if v is None else storage.fixed(v)
        if v is None or shape is None:
            return False
        held = storage.read(op, v)
        values.append(Value(held.name, held.dtype, shape))
    if result is None:
        return False
    total, at, rows = values
    added = added_rows(storage.e, total, at, rows)
    storage.env[result.key] = storage.finished(result, added, traits_of(op).exact)
    return True
