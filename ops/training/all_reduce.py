"""Gradients of several ranks: ``AllReduce(g1 … gn) -> (r1 … rn)``, their means over the ranks, and
``AllGatherRows(rows, values) -> (rows, values)``, the sparse gradients of all ranks, one behind the other.

``precision`` is the element type in which gradients travel: they are cast to it before, and back behind. In a lowered
model each tensor that travels has one node of this package's domain, at which the model is cut into sessions
(``passes/lowering/exchanges.py``). It is exchanged where it lies: of what is gathered each rank makes ``ranks`` copies,
and those of the others are written over.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import OWN, Operator, Shape
from amp_transpiler.ir.opdef import Slots, lowering_rule, own
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.training.branches import as_tensor, emulating

ALL_REDUCE, ALL_GATHER = "AllReduce", "AllGatherRows"
#: The operators at which ranks meet.
EXCHANGES = frozenset({ALL_REDUCE, ALL_GATHER})


@lowering_rule(own(ALL_REDUCE), native=True, slots=Slots(input_row=("gradient",), output_row=("gradient",)))
def all_reduce(e: Emitter, op: Operator, *grads: Value) -> Sequence[Value]:
    return [_exchanged(e, ALL_REDUCE, grad, str(op.attrs["precision"])) for grad in grads]


def _gathered_types(op: Operator) -> list[tuple[str | None, Shape | None] | None]:
    return [None if v is None else (v.dtype, _times(v.shape, int(op.attrs["ranks"]))) for v in op.inputs]


def _times(shape: Shape | None, ranks: int) -> Shape | None:
    return shape and (ranks * shape[0] if isinstance(shape[0], int) else None, *shape[1:])


@lowering_rule(own(ALL_GATHER), native=True, infer=_gathered_types)
def all_gather_rows(e: Emitter, op: Operator, rows: Value, values: Value) -> Sequence[Value]:
    """Every rank brings as many rows."""
    ranks = int(op.attrs["ranks"])
    found = []
    for value, precision in ((rows, rows.dtype), (values, str(op.attrs["precision"]))):
        shape = (ranks * size_of(value)[0], *size_of(value)[1:])
        copies = e.Concat(*[value] * ranks, axis=0, shape=shape)
        found.append(_exchanged(e, ALL_GATHER, copies, precision))
    return found


def _exchanged(e: Emitter, type_: str, value: Value, precision: str) -> Value:
    """What comes back of a value. A tensor of the type itself travels, also where 16 bit is emulated."""
    sent = e.cast(value, precision)
    held = as_tensor(e, sent)
    with e.emulation(False):
        made = e.op(type_, e.cast(held, precision), domain=OWN, dtype=precision, shape=value.shape)
    return e.cast(emulating(e, made, sent), value.dtype)
