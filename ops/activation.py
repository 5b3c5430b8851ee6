"""Activations, Softmax and LogSoftmax. Formulas: the operators' specifications (https://onnx.ai/onnx/operators/)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import INF, Interval, Ranges, hull, increasing, product
from amp_transpiler.ir.metadata import FUSED
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient, lowering_rule, no_gradient, own, range_rule, traits
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import Grads, comparable, multiple, pointwise, scaled_by, size_of, summed, times
from amp_transpiler.ops.gpu_kernels import (
    added_multiple,
    mixed_rows,
    of_apart,
    plus_rows,
    remember_balanced,
    sums_of_rows,
    weighed_sums,
)
from amp_transpiler.ops.looked_up import is_looked_up, rounded_once
from amp_transpiler.ops.pool import through_maxima
from amp_transpiler.ops.training.random import kept_of

#: x * sigmoid(alpha * x), as onnxruntime has it at every opset.
QUICK_GELU = f"{DOMAIN}::QuickGelu"


def _greater(e: Emitter, value: Value, number: float) -> Value:
    value = comparable(e, value)
    return e.Greater(value, e.like(number, value))


def _less(e: Emitter, value: Value, number: float) -> Value:
    value = comparable(e, value)
    return e.Less(value, e.like(number, value))


def _positive(e: Emitter, value: Value) -> Value:
    return _greater(e, value, 0.0)


@gradient("Relu", reads="y0 dy0", native=True)
def relu(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    # Selected, not multiplied: an overflowed dy behind a dead unit is no NaN.
    return [through_maxima(e, y, dy) or e.Where(_positive(e, y), dy, e.like(0, dy))]


@gradient("LeakyRelu", reads="x0 dy0", native=True)
def leaky_relu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Where(_positive(e, x), dy, e.Mul(dy, e.like(op.attrs.get("alpha", 0.01), dy)))]


@gradient("ThresholdedRelu", reads="x0 dy0", native=True)
def thresholded_relu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Where(_greater(e, x, op.attrs.get("alpha", 1.0)), dy, e.like(0, dy))]


@gradient("PRelu", reads="x0 x1 dy0", native=True)
def prelu(e: Emitter, op: Operator, x: Value, slope: Value, dy: Value) -> Grads:
    positive = _positive(e, x)
    dx = e.Where(positive, dy, e.Mul(dy, slope)) if e.wants(0) else None
    dslope = summed(e, e.Where(positive, e.like(0, dy), e.Mul(dy, x)), dy, 1) if e.wants(1) else None
    return [dx, dslope]


@gradient("Elu", reads="x0 dy0", native=True)
def elu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    alpha = float(op.attrs.get("alpha", 1.0))
    below = e.Mul(dy, e.Exp(x))
    return [e.Where(_positive(e, x), dy, below if alpha == 1 else e.Mul(below, e.like(alpha, x)))]


@gradient("Selu", reads="x0 dy0", native=True)
def selu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    alpha = float(op.attrs.get("alpha", 1.67326319217681884765625))
    gamma = float(op.attrs.get("gamma", 1.05070102214813232421875))
    below = e.Mul(e.Mul(dy, e.Exp(x)), e.like(alpha * gamma, x))
    return [e.Where(_positive(e, x), e.Mul(dy, e.like(gamma, dy)), below)]


def _mish_slope(e: Emitter, x: Value) -> Value:
    """t + x σ(x) (1 - t²) with t = tanh(softplus(x))."""
    t = e.Tanh(e.Softplus(x))
    return e.Add(t, e.Mul(e.Mul(x, e.Sigmoid(x)), e.Sub(e.like(1, x), e.Mul(t, t))))


def _softplus_gradient(e: Emitter, x: Value, dy: Value) -> Value:
    """dy / (1 + exp(-x)). The logarithm of a softplus divides by what the Sigmoid of onnxruntime on a processor has few
    digits of: it is off by 0.6 % at -12, and 0 from -17 on."""
    if e.at.fused or x.dtype != "float32":
        return e.Mul(dy, e.Sigmoid(x))
    return e.Div(dy, e.Add(e.Exp(e.Neg(x)), e.like(1, x)))


pointwise(
    "y0 dy0",
    Sigmoid=lambda e, y, dy: e.Mul(e.Mul(dy, y), e.Sub(e.like(1, y), y)),
    # dy (1 - y²): near 1 the rounding of the square costs less than that of y has cost already.
    Tanh=lambda e, y, dy: e.Mul(dy, e.Sub(e.like(1, y), e.Mul(y, y))),
)
pointwise(
    "x0 dy0",
    Softplus=_softplus_gradient,
    # In 16-bit steps the slope would lose three times what one rounding does, and take 13 passes.
    Mish=lambda e, x, dy: e.Mul(dy, rounded_once(e, _mish_slope, x, 20.0)),
    HardSwish=lambda e, x, dy: e.Mul(dy, rounded_once(e, _hard_swish_slope, x, 4.0)),
)


@gradient("HardSigmoid", reads="y0 dy0", native=True)
def hard_sigmoid(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    inside = e.And(_greater(e, y, 0.0), _less(e, y, 1.0))
    return [e.Where(inside, e.Mul(dy, e.like(op.attrs.get("alpha", 0.2), dy)), e.like(0, dy))]


def _hard_swish_slope(e: Emitter, x: Value) -> Value:
    """Of x * max(0, min(1, x / 6 + 1 / 2)): 0 up to -3, 1 from 3 on, x / 3 + 1 / 2 between."""
    ramp = e.Add(e.Mul(x, e.like(1 / 3, x)), e.like(0.5, x))
    return e.Where(_less(e, x, 3.0), e.Where(_greater(e, x, -3.0), ramp, e.like(0, x)), e.like(1, x))


@gradient("Shrink", reads="x0 dy0", native=True)
def shrink(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Where(_greater(e, e.Abs(x), op.attrs.get("lambd", 0.5)), dy, e.like(0, dy))]


@gradient("Softsign", reads="x0 dy0", native=True)
def softsign(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    """dy / (1 + |x|)², divided twice: the square leaves fp16 from 255 on."""
    base = e.Add(e.Abs(x), e.like(1, x))
    return [e.Div(e.Div(dy, base), base)]


@gradient("Gelu", reads="x0 dy0", native=True)
def gelu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    """In 16-bit steps the slope would lose three times what one rounding does, and half of its digits below -2."""
    tanh = op.attrs.get("approximate", "none") == "tanh"
    if e.at.fused and not is_looked_up(e, x):
        return [(_gelu_tanh_gradient if tanh else _gelu_gradient)(e, x, dy)]
    return [e.Mul(dy, rounded_once(e, _gelu_tanh_slope if tanh else _gelu_slope, x, 7.0))]


def _gelu_slope(e: Emitter, x: Value) -> Value:
    """Φ(x) + x φ(x), with Φ(x) = (1 + erf(t)) / 2, in one pass, and x φ(x) = t exp(-ln(π) / 2 - t²); t = x / √2."""
    t = e.Mul(x, e.like(math.sqrt(0.5), x))
    bell = e.Exp(e.Sub(e.like(-0.5 * math.log(math.pi), x), e.Mul(t, t)))
    return e.Add(e.HardSigmoid(e.Erf(t), alpha=0.5, beta=0.5), e.Mul(t, bell))


def _gelu_gradient(e: Emitter, x: Value, dy: Value) -> Value:
    """dy times that slope, in kernels that a GPU runs fast: 2 dX = dy (1 + erf(x / √2) + √(2/π) x exp(-x² / 2))."""
    bell = e.Pow(e.like(math.exp(-0.5), x), e.Mul(x, x))
    bent = added_multiple(e, e.Erf(e.Mul(x, e.like(math.sqrt(0.5), x))), e.Mul(bell, x), math.sqrt(2 / math.pi))
    return times(e, e.Mul(dy, e.Add(bent, e.like(1, x))), 0.5)


_TANH, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh_slope(e: Emitter, x: Value) -> Value:
    """y = x (1 + t) / 2, t = tanh(u), u = √(2/π) (x + 0.044715 x³)."""
    square = e.Mul(x, x)
    u = e.Mul(e.Mul(x, e.Add(e.Mul(square, e.like(_CUBIC, x)), e.like(1, x))), e.like(_TANH, x))
    t = e.Tanh(u)
    du = e.Add(e.Mul(square, e.like(3 * _CUBIC * _TANH, x)), e.like(_TANH, x))
    half = e.like(0.5, x)
    inner = e.Mul(e.Mul(x, e.Sub(e.like(1, x), e.Mul(t, t))), du)
    return e.Mul(e.Add(e.Add(t, e.like(1, x)), inner), half)


def _gelu_tanh_gradient(e: Emitter, x: Value, dy: Value) -> Value:
    """dy times that slope, likewise: y = x s with s = σ(2u), and dX = dy s (1 + (1 - s) 2 x u')."""
    cube = e.Mul(x, e.Mul(x, x))
    double = e.Mul(x, e.like(2 * _TANH, x))
    share, slope = (added_multiple(e, double, cube, n * _TANH * _CUBIC) for n in (2, 6))
    share = e.Sigmoid(share)
    rest = e.Mul(e.Sub(e.like(1, share), share), slope)
    kept = e.Mul(dy, share)
    return e.Add(kept, e.Mul(rest, kept))


@gradient("Softmax", reads="y0 dy0", native=True)
def softmax(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    """y dy - y sum(y dy): the sum adds up in fp32 inside, and is at most the largest dy.

    What is rounded off the sum is as far off for the whole row, and what the keys of attention have in common adds that
    up in the gradients of queries: in 16 bit what dy has in common along the axis, which changes nothing, is left out
    before. Not where a dropout is behind: what it keeps of that differs.
    """
    axis, last = _axis(op, y), len(size_of(y)) - 1
    base, factor = multiple(e, dy) if axis == last else (dy, 1.0)
    kept = _kept(e, base, y)
    weights = (base, y) if kept is None else kept
    if axis == last and (found := weighed_sums(e, *weights, apart=kept is None)) is not None:
        dx = mixed_rows(e, y, *found, weights[1])
        if kept is not None and found[0].dtype in HALF:
            remember_balanced(e, dx)
        return [dx if factor == 1 else times(e, dx, factor)]

    thin = (*size_of(y)[:axis], 1, *size_of(y)[axis + 1 :])

    def sums(weighed: Value, sign: float) -> Value:
        if axis == last:
            return sums_of_rows(e, weighed, sign)
        return e.ReduceSum(weighed, e.ints(axis), keepdims=1, shape=thin)

    def told(rows: Value) -> Value:
        """Infinity for rows that a kernel made zeros of, and so NaN, a bad step: their scores are not finite."""
        if not e.at.zeroed_rows:
            return rows
        most = e.ReduceMax(y, e.ints(axis), keepdims=1, shape=thin)
        return e.Where(e.Greater(most, e.like(0, most)), rows, e.like(math.inf, rows))

    if kept is None and y.dtype in HALF:
        apart = of_apart(e, base) if axis == last else None
        base = e.Sub(base, sums(e.Mul(base, y, shape=y.shape), 1.0), shape=y.shape) if apart is None else apart
        weights = base, y
    weighed = e.Mul(*weights, shape=y.shape)
    if axis == last:
        dx = plus_rows(e, weighed, told(sums(weighed, -1.0)), y)
        if kept is not None and y.dtype in HALF:
            remember_balanced(e, dx)
        return [dx if factor == 1 else times(e, dx, factor)]
    return [e.Mul(e.Sub(base, told(sums(weighed, 1.0))), y)]


def _kept(e: Emitter, dy: Value, y: Value) -> tuple[Value, Value] | None:
    """Where dy is what a dropout behind the softmax kept: dy as it was, and what that kept of y, whose product is dy y.

    Nothing is selected, for the bytes of that: a dy that is infinite where it was dropped makes a bad step, as it does
    where a probability is 0.
    """
    maker = e.makers.get(dy.name)
    if maker is None or maker.type != "Where" or maker.inputs[0] is None or maker.inputs[1] is None:
        return None
    kept = e.shared.get(kept_of(maker.inputs[0], y))
    return None if kept is None else (maker.inputs[1], kept[0])


@gradient("LogSoftmax", reads="x0 y0 dy0", native=True)
def log_softmax(e: Emitter, op: Operator, x: Value, y: Value, dy: Value) -> Grads:
    """dy - softmax(x) sum(dy). In 16 bit exp(y) would be off by as much as y was rounded."""
    axis = _axis(op, y)
    last = axis == len(size_of(y)) - 1

    def minus_sum(value: Value) -> Value:
        """Of each row along the axis."""
        return sums_of_rows(e, value, -1.0) if last else e.Neg(e.ReduceSum(value, e.ints(axis), keepdims=1))

    total = minus_sum(dy)
    if x.dtype not in HALF:
        share = e.Exp(y)
    else:  # of what is above a half, what is left to 1 has the digits: dy - sum(dy) + (1 - share) sum(dy)
        share = e.Softmax(x, axis=axis, shape=y.shape)
        above = e.Greater(comparable(e, share), e.like(0.5, comparable(e, share)))
        others = e.Where(above, e.like(0, share), share)
        share = e.Where(above, e.cast(minus_sum(others), share.dtype), others)
        dy = e.Add(dy, e.Where(above, e.cast(total, dy.dtype), e.like(0, dy)))
    return [plus_rows(e, dy, total, share) if last else e.Add(dy, e.Mul(share, e.cast(total, dy.dtype)))]


def _axis(op: Operator, value: Value) -> int:
    return int(op.attrs.get("axis", -1)) % len(size_of(value))


@decomposition("Celu")
def celu(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """Of which no GPU place has a kernel, and onnxruntime would take the CPU's there."""
    alpha = d.number("alpha", 1.0)
    if alpha == 1:
        return [d.Elu(x)]
    return [d.Where(d.Greater(x, 0), x, d.Mul(d.Elu(d.Div(x, alpha)), alpha))]


@decomposition("Swish", QUICK_GELU)
def swish(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """x * sigmoid(alpha * x)."""
    alpha = _alpha(op)
    return [d.Mul(x, d.Sigmoid(x if alpha == 1 else d.Mul(x, alpha)))]


def _alpha(op: Operator) -> float:
    """The number in the sigmoid, of a gradient too."""
    return float(op.attrs.get("alpha", 1.0 if op.type in ("Swish", "SwiGLU") else 1.702))


def _of_onnxruntime(op: Operator) -> str:
    """Why an operator is taken apart to be trained; "" where it stands for what a pass found written out."""
    return "" if FUSED in op.metadata else "onnxruntime's kernel takes the sigmoid of numbers below 0 from 1, in 16 bit"


@lowering_rule(QUICK_GELU, native=True, when=lambda op: FUSED in op.metadata)
def quick_gelu(e: Emitter, op: Operator, x: Value) -> Sequence[Value]:
    """In 16 bit z and σ(z) are rounded, as if they were written out."""
    if e.at.fused and _alpha(op) == 1:
        return [e.op("ScaledSiLU", x, domain=DOMAIN, alpha=1.0, shape=x.shape)]
    return [e.Mul(x, e.Sigmoid(scaled_by(e, x, _alpha(op))))]


@gradient(QUICK_GELU, reads="x0 y0 dy0", native=True, refuse=_of_onnxruntime)
def quick_gelu_gradient(e: Emitter, op: Operator, x: Value, y: Value, dy: Value) -> Grads:
    """dy σ(z) (1 + z σ(-z)) with z = alpha x: in 16 bit 1 - σ(z) would have no digits where z is large."""
    alpha = _alpha(op)
    if x.dtype == "float16" and alpha > 1:  # the slope is 0 or 1 beyond, and z may not fit
        x = e.Clip(x, e.like(-64.0, x), e.like(64.0, x))
    z = scaled_by(e, x, alpha)
    share = e.Sigmoid(z)
    if e.at.fused:
        rest = e.op("ScaledSiLU", x, domain=DOMAIN, alpha=-alpha, shape=x.shape)
    elif x.dtype in HALF:
        back = e.Neg(z)
        rest = e.Mul(back, e.Sigmoid(back))
    else:
        return [e.Mul(dy, e.Add(share, e.Mul(scaled_by(e, y, alpha), e.Sub(e.like(1, share), share))))]
    return [e.Mul(e.Mul(dy, share), e.Sub(e.like(1, rest), rest))]


@decomposition("SwiGLU")
def swi_glu(d: Parts, op: Operator, gate: Variable, value: Variable) -> list[Variable]:
    return [d.Mul(swish(d, op, gate)[0], value)]


_AS_LARGE = (
    "Celu Elu Gelu HardSwish LeakyRelu Mish PRelu Relu Selu Shrink Softplus Swish ThresholdedRelu".split()  # noqa: SIM905
)
traits(*_AS_LARGE, QUICK_GELU, elementwise=True, carries_large=True)
traits("HardSigmoid", "Sigmoid", elementwise=True, bounded=(0.0, 1.0))
traits("Softsign", "Tanh", elementwise=True, bounded=(-1.0, 1.0))
traits("Softmax", "Hardmax", over="axis", bounded=(0.0, 1.0), ignores="low")
traits("LogSoftmax", over="axis", bounded=(-INF, 0.0), ignores="low")
traits("Softmax", "LogSoftmax", centres=True)
traits("Sigmoid", "Softplus", ignores="low")
traits("Sigmoid", "Softsign", "Tanh", "Softmax", nears=True)
traits("Relu", "ThresholdedRelu", own("ReluGrad"), own("ThresholdedReluGrad"), exact=True)
traits("PRelu", weights=(1,))
traits("SwiGLU", elementwise=True)
no_gradient("Hardmax")

range_rule("Relu")(increasing(lambda x: max(x, 0.0)))
range_rule("Softplus")(increasing(lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x)))))


def _between(op: Operator, ranges: Ranges, below: float = 1.0, above: float = 1.0) -> Interval:
    """Between multiples of the argument (or -2) where it is negative and where it is positive."""
    found = ranges.bound(op.input(0))
    if found is None:
        return -2.0 * max(below, 1.0), INF
    return min(found[0] * max(below, 1.0), -2.0 * below, 0.0), max(found[1], 0.0) * above


range_rule("Gelu", "HardSwish", "Mish")(_between)


@range_rule("Swish", QUICK_GELU)
def _swish_range(op: Operator, ranges: Ranges) -> Interval | None:
    return _between(op, ranges) if _alpha(op) >= 1 else None


@range_rule("Selu")
def _selu_range(op: Operator, ranges: Ranges) -> Interval | None:
    return None if {"alpha", "gamma"} & set(op.attrs) else _between(op, ranges, 2.0, 1.06)


@range_rule("Elu")
def _elu_range(op: Operator, ranges: Ranges) -> Interval | None:
    alpha = float(op.attrs.get("alpha", 1.0))
    return _between(op, ranges, alpha) if alpha >= 0 else None


@range_rule("LeakyRelu")
def _leaky_relu_range(op: Operator, ranges: Ranges) -> Interval | None:
    alpha = float(op.attrs.get("alpha", 0.01))
    return _between(op, ranges, alpha) if alpha >= 0 and ranges.bound(op.input(0)) else None


@range_rule("ThresholdedRelu")
def _thresholded_relu_range(op: Operator, ranges: Ranges) -> Interval | None:
    found = ranges.bound(op.input(0)) or (float(op.attrs.get("alpha", 1.0)), INF)
    return hull([found, (0.0, 0.0)])


@range_rule("PRelu")
def _prelu_range(op: Operator, ranges: Ranges) -> Interval | None:
    found, slope = ranges.bound(op.input(0)), ranges.bound(op.input(1))
    if not found or not slope:
        return None
    below = min(found[0], 0.0), min(found[1], 0.0)
    return hull([product(below, slope), (max(found[0], 0.0), max(found[1], 0.0))])
