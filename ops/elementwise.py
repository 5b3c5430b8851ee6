"""Elementwise arithmetic with broadcasting.

Gradients of inputs that were broadcast are summed back, in fp32. Formulas: the operators' specifications
(https://onnx.ai/onnx/operators/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import (
    ANY,
    INF,
    Interval,
    RangeRule,
    Ranges,
    any_of,
    magnitude,
    negative,
    product,
    same,
    squared,
    total,
)
from amp_transpiler.ir.metadata import FLOORED
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient, lowering_rule, no_gradient, own, range_rule, traits
from amp_transpiler.ir.operator_call import Held, Writer
from amp_transpiler.ir.types import FLOATS, HALF, LIMITS
from amp_transpiler.ops.common import Grads, comparable, pointwise, size_of, summed, times
from amp_transpiler.ops.reduce import last_less_each
from amp_transpiler.ops.row_sums import with_rows


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
        if not e.wants(index):
            return None
        known = e.known(op.inputs[1 - index])
        if known is not None and known.size == 1 and len(known.shape) <= len(size_of(dy)):
            return summed(e, times(e, dy, float(known.item())), dy, index)
        return summed(e, e.Mul(dy, other), dy, index)

    return [side(0, x1), side(1, x0)]


@gradient("Div", reads="x1 y0 dy0", native=True)
def div(e: Emitter, op: Operator, x1: Value, y: Value, dy: Value) -> Grads:
    """dx0 = dy / x1, dx1 = -dx0 y: what leaves 16 bit on the way leaves it in dx0 as well.

    Where x1 is a length that is a tiny number at least, dx0 is dy there."""
    if FLOORED in op.metadata:
        plain = comparable(e, x1)
        x1 = e.Where(e.Less(plain, e.like(LIMITS["float16"].normal, plain)), e.like(1, x1), x1)
    by_x1 = e.Div(dy, x1)
    dx0 = summed(e, by_x1, dy, 0) if e.wants(0) else None
    dx1 = e.Neg(summed(e, e.Mul(by_x1, y), dy, 1)) if e.wants(1) else None
    return [dx0, dx1]


@gradient("Pow", reads="x0 x1 y0 dy0", native=True)
def pow_(e: Emitter, op: Operator, x: Value, exponent: Value, y: Value, dy: Value) -> Grads:
    dx = dp = None
    power = e.cast(exponent, x.dtype)
    if e.wants(0):
        dx = summed(e, e.Mul(dy, _pow_slope(e, x, power, e.known(op.inputs[1]))), dy, 0)
    if e.wants(1):
        # y * log(x) tends to 0 with x for a positive exponent, where the product itself is 0 * -inf.
        wide = comparable(e, x)  # CUDA has no logarithm of bfloat16 either
        log = e.cast(e.Log(e.Where(e.Equal(wide, e.like(0, wide)), e.like(1, wide), wide)), y.dtype)
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
        if p != 0:
            return e.Mul(e.Pow(x, e.like(p - 1, x)), e.like(p, x))
    slope = e.Mul(power, e.Pow(x, e.Sub(power, e.like(1, x))))
    powers = comparable(e, power)
    return e.Where(e.Equal(powers, e.like(0, powers)), e.like(0, x), slope)


@gradient("Neg", reads="dy0", native=True)
def neg(e: Emitter, op: Operator, dy: Value) -> Grads:
    return [e.Neg(dy)]


pointwise("x0 dy0", Abs=lambda e, x, dy: e.Mul(dy, e.Sign(x)))


@gradient("Mod", reads="x0 x1 y0 dy0", native=True)
def mod(e: Emitter, op: Operator, x0: Value, x1: Value, y: Value, dy: Value) -> Grads:
    """y = x0 - q x1 with an integer q, which has no slope. Read from y: x0 / x1 itself may round up to it."""
    dx0 = summed(e, dy, dy, 0) if e.wants(0) else None
    dx1 = None
    if e.wants(1):
        q = e.Round(comparable(e, e.Div(e.Sub(x0, y), x1)), shape=dy.shape)  # nor has CUDA a Round of bfloat16
        dx1 = summed(e, e.Neg(e.Mul(dy, e.cast(q, dy.dtype))), dy, 1)
    return [dx0, dx1]


@decomposition("Mod")
def floor_mod(d: Parts, op: Operator, x: Variable, y: Variable) -> list[Variable]:
    """Floats have only the remainder with the sign of x before opset 28: one of the other sign is off by one y.

    A zero has no sign that counts: onnxruntime's Where makes 0 of -0.
    """
    if d.whole("fmod", 0) or x.dtype not in FLOATS:
        return [d.Mod(x, y, fmod=d.whole("fmod", 0))]
    rest = d.Mod(x, y, fmod=1)
    return [d.Where(d.Less(d.Mul(d.Sign(rest), d.Sign(y)), 0), d.Add(rest, y), rest)]


def _select(e: Emitter, op: Operator, xs: list[Value], y: Value, dy: Value) -> Grads:
    """Max and Min: the gradient goes to the first input that holds the result."""
    zero = e.like(0, dy)
    grads: list[Value | None] = []
    rest = dy
    for index, x in enumerate(xs):
        chosen = e.Equal(comparable(e, x), comparable(e, y))
        grads.append(summed(e, e.Where(chosen, rest, zero), dy, index) if e.wants(index) else None)
        rest = e.Where(chosen, zero, rest)
    return grads


gradient("Max", reads="x* y0 dy0", native=True)(_select)
gradient("Min", reads="x* y0 dy0", native=True)(_select)


@gradient("Sum", reads="x* dy0", native=True)
def sum_(e: Emitter, op: Operator, xs: list[Value], dy: Value) -> Grads:
    return [summed(e, dy, dy, i) if e.wants(i) else None for i in range(len(xs))]


@gradient("Mean", reads="x* dy0", native=True)
def mean(e: Emitter, op: Operator, xs: list[Value], dy: Value) -> Grads:
    part = e.Mul(dy, e.like(1 / len(xs), dy))
    return [summed(e, part, dy, i) if e.wants(i) else None for i in range(len(xs))]


@gradient("Where", reads="x0 dy0", native=True)
def where(e: Emitter, op: Operator, condition: Value, dy: Value) -> Grads:
    zero = e.like(0, dy)
    dx1 = summed(e, e.Where(condition, dy, zero), dy, 1) if e.wants(1) else None
    dx2 = summed(e, e.Where(condition, zero, dy), dy, 2) if e.wants(2) else None
    return [None, dx1, dx2]


@gradient("Clip", reads="x0 x1 x2 dy0", inputs=[0], native=True)
def clip(e: Emitter, op: Operator, x: Value, low: Value | None, high: Value | None, dy: Value) -> Grads:
    zero, x = e.like(0, dy), comparable(e, x)
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
    """CUDA has no kernel of Clip for bfloat16, nor of the comparisons in its function body."""
    return [limited(e, x, low, high)]


def limited(w: Writer[Held], x: Held, low: Held | None = None, high: Held | None = None) -> Held:
    """Clip from Max and Min: NaN stays NaN, and a bound above the other wins."""
    x = x if low is None else w.Max(x, low)
    return x if high is None else w.Min(x, high)


@gradient("Identity", reads="dy0", native=True)
def identity(e: Emitter, op: Operator, dy: Value) -> Grads:
    return [dy]


@lowering_rule(own("GradSum"), native=True)
def grad_sum(e: Emitter, op: Operator, *values: Value) -> Grads:
    """The sum of a variable's gradients, rounded once.

    CUDA's Sum of 16-bit tensors rounds after each of them; its ReduceSum adds up in fp32. The rows of a table that is
    looked up, and multiplied with too, are added to its other gradient.
    """
    if len(values) == 2 and e.at.fused:
        added = with_rows(e, values[1], values[0]) or with_rows(e, values[0], values[1])
        if added is not None:
            return [added]
    if len(values) < 3:
        return [e.Add(*values) if len(values) == 2 else values[0]]
    if e.at.fused and values[0].dtype in HALF:
        return [e.reshape(e.ReduceSum(_stacked(e, values), e.ints(0), keepdims=1), size_of(values[0]))]
    return [e.Sum(*values, shape=values[0].shape)]


@lowering_rule("Sum", native=True)
def sum_body(e: Emitter, op: Operator, *values: Value) -> Grads:
    if len(values) < 3 or len({size_of(v) for v in values}) == 1:
        return grad_sum(e, op, *values)
    return [e.cast(e.Sum(*(e.f32(v) for v in values)), values[0].dtype)]


@lowering_rule("Mean", native=True)
def mean_body(e: Emitter, op: Operator, *values: Value) -> Grads:
    """CUDA has no kernel of Mean. In 16 bit the sum may not fit."""
    if e.at.fused and values[0].dtype in HALF and len({size_of(v) for v in values}) == 1:
        return [e.reshape(e.ReduceMean(_stacked(e, values), e.ints(0), keepdims=1), size_of(values[0]))]
    wide = [e.f32(v) for v in values]
    return [e.cast(e.Mul(e.Sum(*wide), e.like(1 / len(wide), wide[0])), values[0].dtype)]


def _stacked(e: Emitter, values: Sequence[Value]) -> Value:
    """Tensors of one shape as the rows of a matrix."""
    rows = [e.reshape(v, (1, math.prod(size_of(v)))) for v in values]
    return e.Concat(*rows, axis=0, shape=(len(rows), *size_of(rows[0])[1:]))


_ADD = ("Add", "Sub", "Sum", "Mean", "Max", "Min")
_SIGNS = ("Neg", "Abs")
_LOGIC = ("And", "Or", "Xor", "Not", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift")
_COMPARE = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
_SORTS = ("IsNaN", "IsInf")
traits(*_ADD, *_SIGNS, *_LOGIC, *_COMPARE, *_SORTS, "Mul", "Div", "Pow", "Mod", elementwise=True)
traits("Where", "Identity", "Clip", own("GradSum"), elementwise=True)
traits(*_ADD, *_COMPARE, adds=True)
traits(*_COMPARE, *_SORTS, compares=True)
traits(*_ADD, *_SIGNS, "Mul", carries_large=True)
traits("Max", "Min", *_SIGNS, own("NegGrad"), own("AbsGrad"), exact=True)
traits("Identity", own("IdentityGrad"), exact=True)
traits("Identity", moves=(0,), view=True)
traits("Where", moves=(1, 2), exact=True)
traits("Clip", settings=(1, 2), lower=(1,), upper=(2,))
traits("Max", lower=None)
traits("Min", upper=None)
no_gradient(*_LOGIC, *_COMPARE, *_SORTS)

range_rule("Identity")(same)
range_rule("Mean", "Where")(any_of)


@range_rule("Add", "Sum")
def _sum_range(op: Operator, ranges: Ranges) -> Interval | None:
    return total(*(ranges.bound(v) for v in op.inputs if v is not None))


@range_rule("Sub")
def _sub_range(op: Operator, ranges: Ranges) -> Interval | None:
    found = total(ranges.bound(op.input(0)), negative(ranges.bound(op.input(1))))
    return (found[0] if found else -INF, 0.0) if last_less_each(op, ranges) else found


@range_rule("Mul")
def _mul_range(op: Operator, ranges: Ranges) -> Interval | None:
    one, other = ranges.bound(op.input(0)), ranges.bound(op.input(1))
    if ranges.source(op.input(0)) is ranges.source(op.input(1)):
        return squared(one)
    return product(one, other) if one and other else None


@range_rule("Div")
def _div_range(op: Operator, ranges: Ranges) -> Interval | None:
    one, other = ranges.bound(op.input(0)), ranges.bound(op.input(1))
    if one is None or other is None or other[0] <= 0 <= other[1]:
        return None
    return product(one, (1 / other[1], 1 / other[0]))


@range_rule("Pow")
def _pow_range(op: Operator, ranges: Ranges) -> Interval | None:
    found, exponent = ranges.bound(op.input(0)), ranges.bound(op.input(1))
    if exponent is None or exponent[0] != exponent[1]:
        return None
    power = exponent[0]
    if power == 2:
        return squared(found)
    if found is None or power <= 0 or (found[0] < 0 and power != int(power)):
        return None
    try:
        ends = [math.copysign(1.0, x) ** int(power) * abs(x) ** power if x < 0 else x**power for x in found]
    except OverflowError:
        return None
    return min(*ends, 0.0) if found[0] < 0 < found[1] else min(ends), max(ends)


@range_rule("Neg")
def _neg_range(op: Operator, ranges: Ranges) -> Interval | None:
    return negative(ranges.bound(op.input(0)))


@range_rule("Abs")
def _abs_range(op: Operator, ranges: Ranges) -> Interval | None:
    return magnitude(ranges.bound(op.input(0)))


def _selected(pick: Callable[[Iterable[float]], float]) -> RangeRule:
    def rule(op: Operator, ranges: Ranges) -> Interval | None:
        ends = [ranges.bound(v) or ANY for v in op.inputs if v is not None]
        return pick(i[0] for i in ends), pick(i[1] for i in ends)

    return rule


range_rule("Max")(_selected(max))
range_rule("Min")(_selected(min))


@range_rule("Clip")
def _clip_range(op: Operator, ranges: Ranges) -> Interval | None:
    low, high = ranges.bound(op.input(0)) or ANY
    if op.program.opset() < 11:
        given = [(float(op.attrs.get(name, none)),) * 2 for name, none in (("min", -INF), ("max", INF))]
    else:
        bounds = [(op.input(1), -INF), (op.input(2), INF)]
        given = [(none, none) if v is None else ranges.bound(v) or ANY for v, none in bounds]
    least, largest = given
    return min(max(low, least[0]), largest[0]), min(max(high, least[1]), largest[1])
