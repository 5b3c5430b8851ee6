"""Elementwise arithmetic with broadcasting.

Gradients of inputs that were broadcast are summed back, in fp32. Formulas: the operators' specifications
(https://onnx.ai/onnx/operators/).
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, lowering_rule, no_gradient, own, traits
from amp_transpiler.ops.common import Grads, shape_of, summed


def _widened(e: Emitter, index: int, dy: Value, *values: Value) -> tuple[Value, ...]:
    """The operands as they are where the result is not summed, in fp32 where it is."""
    if shape_of(e, index) == dy.shape:
        return (dy, *values)
    return tuple(e.f32(v) for v in (dy, *values))


@gradient("Add", reads="dy0", native=True)
def add(e: Emitter, op: Operator, dy: Value) -> Grads:
    return [summed(e, dy, dy, i) if e.wants(i) else None for i in range(2)]


@gradient("Sub", reads="dy0", native=True)
def sub(e: Emitter, op: Operator, dy: Value) -> Grads:
    dx0 = summed(e, dy, dy, 0) if e.wants(0) else None
    dx1 = e.Neg(summed(e, dy, dy, 1)) if e.wants(1) else None
    return [dx0, dx1]


@gradient("Mul", reads="x0 x1 dy0", native=True)
def mul(e: Emitter, op: Operator, x0: Value, x1: Value, dy: Value) -> Grads:
    def side(index: int, other: Value) -> Value | None:
        return summed(e, e.Mul(*_widened(e, index, dy, other)), dy, index) if e.wants(index) else None

    return [side(0, x1), side(1, x0)]


@gradient("Div", reads="x0 x1 dy0")
def div(e: Emitter, op: Operator, x0: Value, x1: Value, dy: Value) -> Grads:
    by_x1 = e.Div(dy, x1)
    dx0 = summed(e, by_x1, dy, 0) if e.wants(0) else None
    dx1 = summed(e, e.Neg(e.Mul(by_x1, e.Div(x0, x1))), dy, 1) if e.wants(1) else None
    return [dx0, dx1]


@gradient("Pow", reads="x0 x1 y0 dy0")
def pow_(e: Emitter, op: Operator, x: Value, exponent: Value, y: Value, dy: Value) -> Grads:
    dx = dp = None
    power = e.cast(exponent, x.dtype)
    if e.wants(0):
        dx = summed(e, e.Mul(dy, _pow_slope(e, x, power, e.known(op.inputs[1]))), dy, 0)
    if e.wants(1):
        # y * log(x) tends to 0 with x for a positive exponent, where the product itself is 0 * -inf.
        zero = e.like(0, x)
        log = e.Log(e.Where(e.Equal(x, zero), e.like(1, x), x))
        dp = summed(e, e.Mul(dy, e.Mul(y, log)), dy, 1)
    return [dx, dp]


def _pow_slope(e: Emitter, x: Value, power: Value, known: np.ndarray | None) -> Value:
    """d x**p / d x = p * x**(p - 1), and 0 for p = 0 at x = 0 too."""
    if known is not None and known.size == 1:
        p = float(known.reshape(()))
        if p == 2:
            return e.Mul(x, e.like(2, x))
        if p == 3:
            return e.Mul(e.Mul(x, x), e.like(3, x))
        if p == 0.5:
            return e.Div(e.like(0.5, x), e.Sqrt(x))
    slope = e.Mul(power, e.Pow(x, e.Sub(power, e.like(1, x))))
    return e.Where(e.Equal(power, e.like(0, x)), e.like(0, x), slope)


@gradient("Neg", reads="dy0", native=True)
def neg(e: Emitter, op: Operator, dy: Value) -> Grads:
    return [e.Neg(dy)]


@gradient("Abs", reads="x0 dy0", native=True)
def abs_(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Mul(dy, e.Sign(x))]


@gradient("Sqrt", reads="y0 dy0")
def sqrt(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    return [e.Div(e.Mul(dy, e.like(0.5, dy)), y)]


@gradient("Exp", reads="y0 dy0", native=True)
def exp(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    return [e.Mul(dy, y)]


@gradient("Log", reads="x0 dy0", native=True)
def log(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Div(dy, x)]


@gradient("Reciprocal", reads="y0 dy0")
def reciprocal(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    return [e.Neg(e.Mul(dy, e.Mul(y, y)))]


@gradient("Sin", reads="x0 dy0")
def sin(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Mul(dy, e.Cos(x))]


@gradient("Cos", reads="x0 dy0")
def cos(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Neg(e.Mul(dy, e.Sin(x)))]


@gradient("Tan", reads="y0 dy0")
def tan(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    return [e.Mul(dy, e.Add(e.Mul(y, y), e.like(1, y)))]


def _arc(e: Emitter, x: Value) -> Value:
    """The square root of 1 - x²."""
    one = e.like(1, x)
    return e.Sqrt(e.Mul(e.Sub(one, x), e.Add(one, x)))


@gradient("Asin", reads="x0 dy0")
def asin(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Div(dy, _arc(e, x))]


@gradient("Acos", reads="x0 dy0")
def acos(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Neg(e.Div(dy, _arc(e, x)))]


@gradient("Atan", reads="x0 dy0")
def atan(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Div(dy, e.Add(e.Mul(x, x), e.like(1, x)))]


def _cosh(e: Emitter, x: Value) -> Value:
    """CUDA has no kernel of Cosh."""
    return e.Mul(e.Add(e.Exp(x), e.Exp(e.Neg(x))), e.like(0.5, x))


@gradient("Sinh", reads="x0 dy0")
def sinh(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Mul(dy, _cosh(e, x))]


@gradient("Cosh", reads="x0 dy0")
def cosh(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    # sinh as tanh * cosh: the difference of two exponentials cancels near 0.
    return [e.Mul(dy, e.Mul(e.Tanh(x), _cosh(e, x)))]


@gradient("Asinh", reads="x0 dy0")
def asinh(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Div(dy, e.Sqrt(e.Add(e.Mul(x, x), e.like(1, x))))]


@gradient("Acosh", reads="x0 dy0")
def acosh(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    one = e.like(1, x)
    return [e.Div(dy, e.Sqrt(e.Mul(e.Sub(x, one), e.Add(x, one))))]


@gradient("Atanh", reads="x0 dy0")
def atanh(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    one = e.like(1, x)
    return [e.Div(dy, e.Mul(e.Sub(one, x), e.Add(one, x)))]


@gradient("Mod", reads="x0 x1 y0 dy0")
def mod(e: Emitter, op: Operator, x0: Value, x1: Value, y: Value, dy: Value) -> Grads:
    """y = x0 - q x1 with an integer q, which has no slope. Read from y: x0 / x1 itself may round up to it."""
    dx0 = summed(e, dy, dy, 0) if e.wants(0) else None
    dx1 = None
    if e.wants(1):
        q = e.Round(e.Div(e.Sub(x0, y), x1), shape=dy.shape)
        dx1 = summed(e, e.Neg(e.Mul(dy, q)), dy, 1)
    return [dx0, dx1]


@gradient("Erf", reads="x0 dy0")
def erf(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Mul(dy, e.Mul(e.Exp(e.Neg(e.Mul(x, x))), e.like(2 / math.sqrt(math.pi), x)))]


def _select(e: Emitter, op: Operator, xs: list[Value], y: Value, dy: Value) -> Grads:
    """Max and Min: the gradient goes to the first input that holds the result."""
    zero = e.like(0, dy)
    grads: list[Value | None] = []
    rest = dy
    for index, x in enumerate(xs):
        chosen = e.Equal(x, y)
        grads.append(summed(e, e.Where(chosen, rest, zero), dy, index) if e.wants(index) else None)
        rest = e.Where(chosen, zero, rest)
    return grads


gradient("Max", reads="x* y0 dy0")(_select)
gradient("Min", reads="x* y0 dy0")(_select)


@gradient("Sum", reads="x* dy0", native=True)
def sum_(e: Emitter, op: Operator, xs: list[Value], dy: Value) -> Grads:
    return [summed(e, dy, dy, i) if e.wants(i) else None for i in range(len(xs))]


@gradient("Mean", reads="x* dy0")
def mean(e: Emitter, op: Operator, xs: list[Value], dy: Value) -> Grads:
    part = e.Mul(dy, e.like(1 / len(xs), dy))
    return [summed(e, part, dy, i) if e.wants(i) else None for i in range(len(xs))]


@gradient("Where", reads="x0 dy0", native=True)
def where(e: Emitter, op: Operator, condition: Value, dy: Value) -> Grads:
    zero = e.like(0, dy)
    dx1 = summed(e, e.Where(condition, dy, zero), dy, 1) if e.wants(1) else None
    dx2 = summed(e, e.Where(condition, zero, dy), dy, 2) if e.wants(2) else None
    return [None, dx1, dx2]


@gradient("Clip", reads="x0 x1 x2 dy0", inputs=[0])
def clip(e: Emitter, op: Operator, x: Value, low: Value | None, high: Value | None, dy: Value) -> Grads:
    zero = e.like(0, dy)
    if low is not None:
        dy = e.Where(e.GreaterOrEqual(x, e.cast(low, x.dtype)), dy, zero)
    if high is not None:
        dy = e.Where(e.GreaterOrEqual(e.cast(high, x.dtype), x), dy, zero)
    return [dy]


def _is_bfloat16(op: Operator) -> bool:
    data = op.inputs[0]
    return data is not None and data.dtype == "bfloat16"


@lowering_rule("Clip", native=True, when=_is_bfloat16)
def clip_body(e: Emitter, op: Operator, x: Value, low: Value | None = None, high: Value | None = None) -> Grads:
    """From Max and Min: CUDA has no kernel of Clip for bfloat16, nor of the comparisons in its function body."""
    x = x if low is None else e.Max(x, low)
    return [x if high is None else e.Min(x, high)]


@gradient("Identity", reads="dy0", native=True)
def identity(e: Emitter, op: Operator, dy: Value) -> Grads:
    return [dy]


@lowering_rule(own("GradSum"))
def grad_sum(e: Emitter, op: Operator, *values: Value) -> Grads:
    """The sum of a variable's gradients: in fp32, rounded once."""
    return [e.Sum(*values, shape=values[0].shape) if len(values) > 1 else values[0]]


@lowering_rule("Sum")
def sum_body(e: Emitter, op: Operator, *values: Value) -> Grads:
    return [e.Sum(*values)]


@lowering_rule("Mean")
def mean_body(e: Emitter, op: Operator, *values: Value) -> Grads:
    """CUDA has no kernel of Mean."""
    return [e.Mul(e.Sum(*values), e.like(1 / len(values), values[0]))]


traits("Identity", moves=(0,), view=True, exact=True)
traits("Where", moves=(1, 2), exact=True)
traits("Neg", "Abs", "Max", "Min", own("NegGrad"), own("AbsGrad"), own("IdentityGrad"), exact=True)
traits(
    "Acos",
    "Acosh",
    "Add",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Ceil",
    "Clip",
    "Cos",
    "Cosh",
    "Div",
    "Equal",
    "Erf",
    "Exp",
    "Floor",
    "Greater",
    "GreaterOrEqual",
    "IsInf",
    "IsNaN",
    "Less",
    "LessOrEqual",
    "Log",
    "Mean",
    "Mod",
    "Mul",
    "Pow",
    "Reciprocal",
    "Round",
    "Sign",
    "Sin",
    "Sinh",
    "Sqrt",
    "Sub",
    "Sum",
    "Tan",
)

no_gradient(
    "Floor",
    "Ceil",
    "Round",
    "Sign",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Not",
    "And",
    "Or",
    "Xor",
    "IsNaN",
    "IsInf",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "BitwiseNot",
    "BitShift",
)
