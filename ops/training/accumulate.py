"""Gradients summed over micro-batches, in fp32.

``AccumulateGradients(a1, g1 … an, gn) -> (a1 … an)`` adds, ``AccumulateRows(a, rows, g) -> (a)`` to some rows of a
table; ``ResetGradients(a1 … an) -> (a1 … an)`` gives zeros in
their place, also where they hold NaN, for the next window.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.training.sparse import picked, repeated, written

ACCUMULATE, ACCUMULATE_ROWS, RESET = "AccumulateGradients", "AccumulateRows", "ResetGradients"


@lowering_rule(own(ACCUMULATE), slots=Slots(input_row=("sum", "gradient"), output_row=("sum",)))
def accumulate(e: Emitter, op: Operator, *rows: Value) -> Sequence[Value]:
    return [
        e.Add(total, e.cast(grad, total.dtype), shape=total.shape)
        for total, grad in zip(rows[::2], rows[1::2], strict=True)
    ]


@lowering_rule(own(ACCUMULATE_ROWS), slots=Slots(inputs=("sum", "rows", "gradient"), outputs=("sum",)))
def accumulate_rows(e: Emitter, op: Operator, total: Value, rows: Value, grad: Value) -> Sequence[Value]:
    """In one node that writes, so that the sum may lie where it lay. On the host that is no ScatterND that adds, which
    loses some of what goes to one row in several threads: the last row is there again, with zeros.
    """
    grad = e.cast(grad, total.dtype)
    if e.at.host:
        return [written(e, total, rows, e.Add(picked(e, total, rows), repeated(e, rows, grad), shape=grad.shape))]
    return [e.ScatterND(total, e.reshape(rows, (*size_of(rows), 1)), grad, reduction="add", shape=total.shape)]


@lowering_rule(own(RESET), slots=Slots(input_row=("sum",), output_row=("sum",)))
def reset(e: Emitter, op: Operator, *totals: Value) -> Sequence[Value]:
    """Where, not a constant: so that the zeros are written over what was read, and only after it was."""
    zero = e.scalar("zero")
    always = e.op("Equal", zero, e.like(0, zero), shape=())
    return [e.Where(always, e.like(0, total), total, shape=total.shape) for total in totals]
