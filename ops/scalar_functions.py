"""Functions of one number: roots, exponentials, rounding. Formulas: the operators' specifications
(https://onnx.ai/onnx/operators/)."""

from __future__ import annotations

import math

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import INF, Interval, Ranges, increasing
from amp_transpiler.ir.metadata import LENGTH
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, no_gradient, range_rule, traits
from amp_transpiler.ops.common import Grads, comparable, pointwise
from amp_transpiler.ops.looked_up import rounded_once

pointwise(
    "x0 dy0",
    Log=lambda e, x, dy: e.Div(dy, x),
    Erf=lambda e, x, dy: e.Mul(dy, rounded_once(e, _erf_slope, x, 5.0)),
)
pointwise(
    "y0 dy0",
    Exp=lambda e, y, dy: e.Mul(dy, y),
    Reciprocal=lambda e, y, dy: e.Neg(e.Mul(e.Mul(dy, y), y)),
)


@gradient("Sqrt", reads="y0 dy0", native=True)
def sqrt(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    """dy / (2 y): half of dy may be too small for 16 bit. Of a length 0 where it is 0, as the slope of ReduceL2."""
    slope = e.Div(dy, e.Mul(y, e.like(2, y)))
    if LENGTH not in op.metadata:
        return [slope]
    plain = comparable(e, y)
    return [e.Where(e.Equal(plain, e.like(0, plain)), e.like(0, slope), slope)]


def _erf_slope(e: Emitter, x: Value) -> Value:
    return e.Mul(e.Exp(e.Neg(e.Mul(x, x))), e.like(2 / math.sqrt(math.pi), x))


_ROUNDS = ("Floor", "Ceil", "Round")
traits(*_ROUNDS, "Sqrt", "Exp", "Log", "Reciprocal", "Erf", "Sign", elementwise=True)
traits(*_ROUNDS, "Exp", carries_large=True)
traits("Erf", "Sign", bounded=(-1.0, 1.0))
traits("Erf", nears=True)
traits("Exp", ignores="low")
traits("Log", "Reciprocal", "Sqrt", poles=(0.0,))
traits("Log", "Sqrt", shortens=True)
no_gradient(*_ROUNDS, "Sign")

range_rule("Exp")(increasing(lambda x: math.exp(x) if x < 700 else INF))
range_rule("Sqrt")(increasing(lambda x: math.sqrt(max(x, 0.0))))


@range_rule(*_ROUNDS)
def _rounded_range(op: Operator, ranges: Ranges) -> Interval | None:
    found = ranges.bound(op.input(0))
    return found and (found[0] - 1.0, found[1] + 1.0)


@range_rule("Reciprocal")
def _reciprocal_range(op: Operator, ranges: Ranges) -> Interval | None:
    found = ranges.bound(op.input(0))
    return None if found is None or found[0] <= 0 <= found[1] else (1 / found[1], 1 / found[0])


@range_rule("Log")
def _log_range(op: Operator, ranges: Ranges) -> Interval | None:
    found = ranges.bound(op.input(0))
    if found is None or found[1] <= 0:
        return None
    return (math.log(found[0]) if found[0] > 0 else -INF), (math.log(found[1]) if found[1] < INF else INF)
