"""Gradients of several ranks: ``AllReduce(g1 … gn) -> (r1 … rn)``, their means (by ``op`` sums, or largest ones) over
the ranks, and ``AllGatherRows(rows, values) -> (rows, values)``, the sparse gradients of all, one behind the other.

``precision`` is the element type in which gradients travel: they are cast to it before, and back behind. In a lowered
model each tensor that travels has one node. Where it is left out, a value travels as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amp_transpiler.errors import DistributedError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.exchange_call import Ranks
from amp_transpiler.ir.nodes import Operator, Shape
from amp_transpiler.ir.opdef import Slots, lowering_rule, own
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.training.exchange import exchange, exchanged
from amp_transpiler.ops.training.remaining import remaining

ALL_REDUCE, ALL_GATHER = "AllReduce", "AllGatherRows"


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
            f"{error}; table '{attrs['table']}', whose gradients are sparse, is looked up with as many ids on "
            "each rank: pad the batches to one size",
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


def _gathered_types(op: Operator) -> list[tuple[str | None, Shape | None] | None]:
    return [None if v is None else (v.dtype, times(v.shape, int(op.attrs["ranks"]))) for v in op.inputs]


def times(shape: Shape | None, ranks: int) -> Shape | None:
    """The shape of what several ranks bring, one behind the other, of this shape each."""
    return shape and (ranks * shape[0] if isinstance(shape[0], int) else None, *shape[1:])


@lowering_rule(own(ALL_GATHER), native=True, infer=_gathered_types)
def all_gather_rows(e: Emitter, op: Operator, rows: Value, values: Value) -> Sequence[Value]:
    """Every rank brings as many rows."""
    _, grad = op.inputs
    assert grad is not None
    table, found = (grad.grad_of or grad).name, []
    for value, precision in ((rows, rows.dtype), (values, str(op.attrs.get("precision") or values.dtype))):
        shape = (int(op.attrs["ranks"]) * size_of(value)[0], *size_of(value)[1:])
        (of_all,) = exchanged(e, ALL_GATHER, [e.cast(value, precision)], [shape], table=table)
        found.append(e.cast(of_all, value.dtype))
    return found
