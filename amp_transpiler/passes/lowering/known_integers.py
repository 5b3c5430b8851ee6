"""Integers that are known once the sizes of the feeds are: shape arithmetic is lowered to what it gives."""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage

_TYPES = frozenset({"int32", "int64", "bool"})


def emit_known(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit what an operator makes as a constant; False where it makes other things, or what sizes do not tell."""
    shapes, result = storage.shapes, op.output(0)
    if shapes is None or result is None or len(op.outputs) != 1 or result.dtype not in _TYPES:
        return False
    known = shapes.value(result)
    if known is None:
        return False
    storage.env[result.key] = storage.e.const(known, result.dtype)
    return True
