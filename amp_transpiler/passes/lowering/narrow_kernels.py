"""Operators in fp32 between casts, as mixed precision leaves them: the 16-bit kernel, where it computes the same.

A kernel that computes in fp32 inside and rounds what comes out once gives what the three would give, and spares both
casts and half of its own bytes. Nobody else may read the fp32 result. Which kernels are so stands in places.toml.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from amp_transpiler.ir.metadata import only_looks
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.lists import PlaceTraits
from amp_transpiler.ops.common import unwidened
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage

#: The element type whose kernels are known to be so.
_NARROW = "float16"


def narrow_kernels(order: Sequence[Operator], at: PlaceTraits, targets: Container[Variable]) -> frozenset[Operator]:
    """The operators between casts that a 16-bit kernel may stand for; ``targets`` are read from outside."""
    return frozenset(op for op in order if op.full_type in at.rounds_once and _is_between_casts(op, targets))


def _is_between_casts(op: Operator, targets: Container[Variable]) -> bool:
    x, y = op.input(0), op.output(0)
    made = None if x is None else x.producer
    if made is None or made.type != "Cast" or y is None or y in targets or x is None:
        return False
    readers = [reader for reader, _ in y.readers if not only_looks(reader)]
    narrow = {reader.outputs[0].dtype for reader in readers if reader.type == "Cast" and reader.outputs[0]}
    source = made.input(0)
    return (
        (x.dtype, y.dtype) == ("float32", "float32")
        and source is not None
        and source.dtype == _NARROW
        and narrow == {_NARROW}
        and all(reader.type == "Cast" for reader in readers)
        and op.attrs.get("approximate", "none") == "none"  # its kernel computes in 16 bit
    )


def emit_narrow(storage: EmulatedStorage, op: Operator, found: Container[Operator]) -> bool:
    """Emit the 16-bit kernel of an operator that is ``found``; False for another."""
    y = op.output(0)
    if op not in found or y is None:
        return False
    e = storage.e
    x, *others = (None if v is None else storage.read(op, v) for v in op.inputs)
    held = None if x is None else unwidened(e, x)
    if held is None or held.dtype != _NARROW:
        return False
    made = e.op(op.type, held, *others, outputs=None, domain=op.domain, shape=storage.fixed(y), **op.attrs)
    storage.env[y.key] = e.cast(made, "float32")
    return True
