"""Functions of one number: roots, exponentials, angles, rounding. Formulas: the operators' specifications
(https://onnx.ai/onnx/operators/)."""

from __future__ import annotations

import math

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import INF, Interval, Ranges, increasing
from amp_transpiler.ir.metadata import LENGTH
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, no_gradient, range_rule, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import Grads, comparable, pointwise
from amp_transpiler.ops.gpu_kernels import rounded_once

pointwise(
    "x0 dy0",
    Log=lambda e, x, dy: e.Div(dy, x),
    Sin=lambda e, x, dy: e.Mul(dy, e.Cos(x)),
    Cos=lambda e, x, dy: e.Neg(e.Mul(dy, e.Sin(x))),
    Asin=lambda e, x, dy: e.Div(dy, _arc(e, x)),
    Acos=lambda e, x, dy: e.Neg(e.Div(dy, _arc(e, x))),
    Sinh=lambda e, x, dy: _times_cosh(e, dy, x),
    # sinh as tanh * cosh: the difference of two exponentials cancels near 0.
    Cosh=lambda e, x, dy: _times_cosh(e, e.Mul(dy, e.Tanh(x)), x),
    Erf=lambda e, x, dy: e.Mul(dy, rounded_once(e, _erf_slope, x, 5.0)),
)
pointwise(
    "y0 dy0",
    Exp=lambda e, y, dy: e.Mul(dy, y),
    Reciprocal=lambda e, y, dy: e.Neg(e.Mul(e.Mul(dy, y), y)),
    # dy (y² + 1), without the square alone: it leaves fp16 from 256 on.
    Tan=lambda e, y, dy: e.Add(e.Mul(e.Mul(dy, y), y), dy),
)


@gradient("Sqrt", reads="y0 dy0", native=True)
def sqrt(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    """dy / (2 y): half of dy may be too small for 16 bit. Of a length 0 where it is 0, as the slope of ReduceL2."""
    slope = e.Div(dy, e.Mul(y, e.like(2, y)))
    if LENGTH not in op.metadata:
        return [slope]
    plain = comparable(e, y)
    return [e.Where(e.Equal(plain, e.like(0, plain)), e.like(0, slope), slope)]


def _arc(e: Emitter, x: Value) -> Value:
    """The square root of 1 - x²."""
    one = e.like(1, x)
    return e.Sqrt(e.Mul(e.Sub(one, x), e.Add(one, x)))


def _square_and_one(e: Emitter, x: Value) -> tuple[Value | None, Value]:
    """m and s with 1 + x² = m² s; where x² fits the type, m is 1, and None."""
    one = e.like(1, x)
    if x.dtype not in HALF:
        return None, e.Add(e.Mul(x, x), one)
    m = e.Max(e.Abs(x), one)
    shares = [e.Div(v, m) for v in (x, one)]
    return m, e.Add(*(e.Mul(share, share) for share in shares))


@gradient("Atan", reads="x0 dy0", native=True)
def atan(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    m, s = _square_and_one(e, x)
    return [e.Div(dy if m is None else e.Div(e.Div(dy, m), m), s)]


def _times_cosh(e: Emitter, dy: Value, x: Value) -> Value:
    """dy cosh(x), of which CUDA has no kernel. In 16 bit exp(x) may not fit where half of it does."""
    half = e.like(0.5, x)
    if x.dtype not in HALF:
        return e.Mul(dy, e.Mul(e.Add(e.Exp(x), e.Exp(e.Neg(x))), half))
    root, dy = e.Exp(e.Mul(x, half)), e.Mul(dy, half)
    return e.Add(e.Mul(e.Mul(dy, root), root), e.Div(e.Div(dy, root), root))


@gradient("Asinh", reads="x0 dy0", native=True)
def asinh(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    m, s = _square_and_one(e, x)
    return [e.Div(dy if m is None else e.Div(dy, m), e.Sqrt(s))]


@gradient("Acosh", reads="x0 dy0", native=True)
def acosh(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    one = e.like(1, x)
    return [e.Div(e.Div(dy, e.Sqrt(e.Sub(x, one))), e.Sqrt(e.Add(x, one)))]


@gradient("Atanh", reads="x0 dy0", native=True)
def atanh(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    one = e.like(1, x)
    return [e.Div(e.Div(dy, e.Sub(one, x)), e.Add(one, x))]


def _erf_slope(e: Emitter, x: Value) -> Value:
    return e.Mul(e.Exp(e.Neg(e.Mul(x, x))), e.like(2 / math.sqrt(math.pi), x))


_ROUNDS = ("Floor", "Ceil", "Round")
_ANGLES = ("Sin", "Cos", "Tan")
_ARCS = ("Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh")
traits(*_ROUNDS, *_ANGLES, *_ARCS, "Sqrt", "Exp", "Log", "Reciprocal", "Sinh", "Cosh", "Erf", "Sign", elementwise=True)
traits(*_ROUNDS, "Exp", "Sinh", "Cosh", carries_large=True)
traits(*_ANGLES, periodic=True)
traits("Sin", "Cos", "Erf", "Sign", bounded=(-1.0, 1.0))
traits("Erf", nears=True)
traits("Asin", "Atan", bounded=(-math.pi / 2, math.pi / 2))
traits("Acos", bounded=(0.0, math.pi))
traits("Exp", ignores="low")
traits("Log", "Reciprocal", "Sqrt", poles=(0.0,))
traits("Log", "Sqrt", "Asinh", shortens=True)
traits("Asin", "Acos", "Atanh", poles=(-1.0, 1.0))
traits("Acosh", poles=(1.0,))
traits("Sinh", "Cosh", overflows=Kind.HYPERBOLIC)
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
