"""Gradients of several ranks: ``AllReduce(g1 … gn) -> (r1 … rn)``, their means (by ``op`` sums, or largest ones) over
the ranks, and ``AllGatherRows(rows, values) -> (rows, values)``, the sparse gradients of all, one behind the other.

``precision`` is the element type in which gradients travel: they are cast to it before, and back behind. In a lowered
model each tensor that travels has one node. Where it is left out, a value travels as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amp_transpiler.errors import DistributedError, GraphError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.exchange_call import Ranks
from amp_transpiler.ir.nodes import Operator, Shape, Types
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import size_of, sliced
from amp_transpiler.ops.training.exchange import exchange, exchanged
from amp_transpiler.ops.training.remaining import remaining

ALL_REDUCE, ALL_GATHER = "AllReduce", "AllGatherRows"
#: Metadata entry of an exchange of rows: as how many it is made, where a rank has fewer of them than another.
ROOM = "room"


@exchange(own(ALL_REDUCE), in_place=True, joined=True, on_device=True)
def _reduce(ranks: Ranks, sent: Sequence[Any], received: Sequence[Any], attrs: Mapping[str, Any]) -> None:
    ranks.all_reduce(received[0], attrs.get("op", "mean"))


@exchange(own(ALL_GATHER), on_device=True)
def _gather(ranks: Ranks, sent: Sequence[Any], received: Sequence[Any], attrs: Mapping[str, Any]) -> None:
    try:
        ranks.all_gather(sent[0], [sent[0].size] * ranks.size, received[0])
    except DistributedError as error:
        if not error.differ:
            raise
        raise DistributedError(
            f"{error}; table '{attrs['table']}', whose gradients are sparse, is looked up by one program on "
            "each rank, with other numbers of ids only where it is fed others",
            error.ranks,
            differ=True,
        ) from None


@lowering_rule(own(ALL_REDUCE), native=True, slots=Slots(input_row=("gradient",), output_row=("gradient",)))
def all_reduce(e: Emitter, op: Operator, *grads: Value) -> Sequence[Value]:
    return [_reduced(e, grad, str(op.attrs.get("precision") or grad.dtype), op.attrs.get("op")) for grad in grads]


def _reduced(e: Emitter, value: Value, precision: str, op: str | None) -> Value:
    (made,) = exchanged(e, ALL_REDUCE, [e.cast(value, precision)], op=op)
    made = e.cast(made, value.dtype)
    return remaining(e, made, op or "mean") if precision in HALF and op != "max" else made


def types_of_ranks(op: Operator) -> Types:
    """What several ranks bring, one behind the other, is of the type of what this rank brings."""
    return [None if v is None else (v.dtype, of_ranks(op, v.shape)) for v in op.inputs]


def of_ranks(op: Operator, shape: Shape | None) -> Shape | None:
    """The shape of what several ranks bring, one behind the other, where this rank has rows of this shape."""
    return shape and (int(op.attrs["ranks"]) * room_of(op, shape[0]) if isinstance(shape[0], int) else None, *shape[1:])


def room_of(op: Operator, count: int) -> int:
    """For how many rows of each rank there is room in an exchange, where this rank has so many."""
    return max(count, int(op.metadata.get(ROOM, 0)))


@lowering_rule(own(ALL_GATHER), native=True, infer=types_of_ranks)
def all_gather_rows(e: Emitter, op: Operator, rows: Value, values: Value) -> Sequence[Value]:
    """Every rank brings as many rows: one that has fewer than another repeats its last one, with values of zero."""
    _, grad = op.inputs
    assert grad is not None
    table, found, count = (grad.grad_of or grad).name, [], size_of(rows)[0]
    more = room_of(op, count) - count
    if more and not count:
        raise GraphError(f"this rank looks up no row of table '{table}', and another one does; let each look one up")
    if more:
        last = e.Expand(sliced(e, rows, 0, count - 1, count), e.ints(more), shape=(more,))
        rows = e.Concat(rows, last, axis=0, shape=(count + more,))
        rest = size_of(values)[1:]
        values = e.Concat(values, e.zeros((more, *rest), values.dtype), axis=0, shape=(count + more, *rest))
    for value, precision in ((rows, rows.dtype), (values, str(op.attrs.get("precision") or values.dtype))):
        shape = (int(op.attrs["ranks"]) * size_of(value)[0], *size_of(value)[1:])
        (of_all,) = exchanged(e, ALL_GATHER, [e.cast(value, precision)], [shape], table=table)
        found.append(e.cast(of_all, value.dtype))
    return found
