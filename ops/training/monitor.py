"""Operators that look at a training step, for its report. They are computed in runs that fetch the report alone.

``InspectGradients(g1 … gn) -> (found_inf, squares, zeros)``: for each gradient whether an element is not finite
(bool [n], found as ``CheckFiniteAndUnscale`` finds it), the sum of squares (fp32 [n]) and the number of elements that
are zero (fp32 [n]).

``StepSummary(x1 … xn) -> summary``: scalars of any type as one fp32 vector [n], so that a report is few tensors;
NaN where an input is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Types
from amp_transpiler.ir.opdef import lowering_rule, own

INSPECT, SUMMARY = "InspectGradients", "StepSummary"


def _inspect_types(op: Operator) -> Types:
    count = len(op.inputs)
    return [("bool", (count,)), ("float32", (count,)), ("float32", (count,))]


@lowering_rule(own(INSPECT), infer=_inspect_types)
def _inspect_gradients(e: Emitter, op: Operator, *grads: Value) -> Sequence[Value]:
    totals, squares, zeros = [], [], []
    for grad in grads:
        totals.append(e.reshape(e.cast(e.reduce_sum(grad), "float32"), (1,)))
        squares.append(e.reshape(e.cast(e.ReduceSumSquare(grad, keepdims=0), "float32"), (1,)))
        none = e.Equal(grad, e.like(0, grad), shape=grad.shape)
        zeros.append(e.reshape(e.reduce_sum(e.cast(none, "float32")), (1,)))  # int32 takes three times as long
    total = _joined(e, totals)
    found = e.IsNaN(e.Mul(total, e.like(0, total), shape=total.shape), shape=total.shape)
    return [found, _joined(e, squares), _joined(e, zeros)]


def _summary_types(op: Operator) -> Types:
    return [("float32", (len(op.inputs),))]


@lowering_rule(own(SUMMARY), infer=_summary_types)
def _step_summary(e: Emitter, op: Operator, *scalars: Value | None) -> Sequence[Value]:
    unknown = e.const([math.nan], "float32")
    return [_joined(e, [unknown if v is None else e.reshape(e.cast(v, "float32"), (1,)) for v in scalars])]


def _joined(e: Emitter, values: list[Value]) -> Value:
    return e.Concat(*values, axis=0, shape=(len(values),))
