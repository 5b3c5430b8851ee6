"""Gradients summed over micro-batches, in fp32.

``AccumulateGradients(a1, g1 … an, gn) -> (a1 … an)`` adds; ``ResetGradients(a1 … an) -> (a1 … an)`` gives zeros in
their place, also where they hold NaN, for the next window.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import body, own
from amp_transpiler.ops.training.scaling import Types

ACCUMULATE, RESET = "AccumulateGradients", "ResetGradients"


def _sums(op: Operator) -> Types:
    return [None if v is None else (v.dtype, v.shape) for v in op.inputs[::2]]


@body(own(ACCUMULATE), infer=_sums)
def accumulate(e: Emitter, op: Operator, *rows: Value) -> Sequence[Value]:
    return [
        e.Add(total, e.cast(grad, total.dtype), shape=total.shape)
        for total, grad in zip(rows[::2], rows[1::2], strict=True)
    ]


def _alike(op: Operator) -> Types:
    return [None if v is None else (v.dtype, v.shape) for v in op.inputs]


@body(own(RESET), infer=_alike)
def reset(e: Emitter, op: Operator, *totals: Value) -> Sequence[Value]:
    """Where, not a constant: so that the zeros are written over what was read, and only after it was."""
    zero = e.scalar("zero")
    always = e.op("Equal", zero, e.like(0, zero), shape=())
    return [e.Where(always, e.like(0, total), total, shape=total.shape) for total in totals]
