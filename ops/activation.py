"""Activations, Softmax and LogSoftmax. Formulas: the operators' specifications (https://onnx.ai/onnx/operators/)."""

from __future__ import annotations

import math

from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import INF, Interval, Ranges, hull, increasing, product
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient, no_gradient, own, range_rule, traits
from amp_transpiler.ops.common import Grads, summed


def _positive(e: Emitter, value: Value) -> Value:
    """``value > 0``; CUDA compares no bfloat16."""
    value = e.f32(value) if value.dtype == "bfloat16" else value
    return e.Greater(value, e.like(0, value))


@gradient("Relu", reads="y0 dy0", native=True)
def relu(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    # Selected, not multiplied: an overflowed dy behind a dead unit is no NaN.
    return [e.Where(_positive(e, y), dy, e.like(0, dy))]


@gradient("LeakyRelu", reads="x0 dy0")
def leaky_relu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Where(_positive(e, x), dy, e.Mul(dy, e.like(op.attrs.get("alpha", 0.01), dy)))]


@gradient("ThresholdedRelu", reads="x0 dy0")
def thresholded_relu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Where(e.Greater(x, e.like(op.attrs.get("alpha", 1.0), x)), dy, e.like(0, dy))]


@gradient("PRelu", reads="x0 x1 dy0")
def prelu(e: Emitter, op: Operator, x: Value, slope: Value, dy: Value) -> Grads:
    positive = _positive(e, x)
    dx = e.Where(positive, dy, e.Mul(dy, slope)) if e.wants(0) else None
    dslope = summed(e, e.Where(positive, e.like(0, dy), e.Mul(dy, x)), dy, 1) if e.wants(1) else None
    return [dx, dslope]


@gradient("Elu", reads="x0 dy0")
def elu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    slope = e.Mul(e.Exp(x), e.like(op.attrs.get("alpha", 1.0), x))
    return [e.Where(_positive(e, x), dy, e.Mul(dy, slope))]


@gradient("Celu", reads="x0 dy0")
def celu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    slope = e.Exp(e.Div(x, e.like(op.attrs.get("alpha", 1.0), x)))
    return [e.Where(_positive(e, x), dy, e.Mul(dy, slope))]


@gradient("Selu", reads="x0 dy0")
def selu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    alpha = op.attrs.get("alpha", 1.67326319217681884765625)
    scaled = e.Mul(dy, e.like(op.attrs.get("gamma", 1.05070102214813232421875), dy))
    return [e.Where(_positive(e, x), scaled, e.Mul(scaled, e.Mul(e.Exp(x), e.like(alpha, x))))]


@gradient("Sigmoid", reads="y0 dy0")
def sigmoid(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    return [e.Mul(dy, e.Mul(y, e.Sub(e.like(1, y), y)))]


@gradient("Tanh", reads="y0 dy0")
def tanh(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    return [e.Mul(dy, e.Sub(e.like(1, y), e.Mul(y, y)))]


@gradient("Softplus", reads="x0 dy0")
def softplus(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Mul(dy, e.Sigmoid(x))]


@gradient("Mish", reads="x0 dy0")
def mish(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    t = e.Tanh(e.Softplus(x))
    inner = e.Mul(e.Mul(x, e.Sigmoid(x)), e.Sub(e.like(1, x), e.Mul(t, t)))
    return [e.Mul(dy, e.Add(t, inner))]


@gradient("HardSigmoid", reads="y0 dy0")
def hard_sigmoid(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    zero = e.like(0, y)
    scaled = e.Mul(dy, e.like(op.attrs.get("alpha", 0.2), dy))
    inside = e.Where(e.Greater(e.like(1, y), y), scaled, zero)
    return [e.Where(e.Greater(y, zero), inside, zero)]


@gradient("HardSwish", reads="x0 dy0")
def hard_swish(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    """x * max(0, min(1, x / 6 + 1 / 2)): slope 0 below -3, 1 above 3, x / 3 + 1 / 2 between."""
    ramp = e.Mul(dy, e.Add(e.Mul(x, e.like(1 / 3, x)), e.like(0.5, x)))
    below = e.Where(e.Greater(x, e.like(-3, x)), ramp, e.like(0, dy))
    return [e.Where(e.Greater(e.like(3, x), x), below, dy)]


@gradient("Shrink", reads="x0 dy0")
def shrink(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    return [e.Where(e.Greater(e.Abs(x), e.like(op.attrs.get("lambd", 0.5), x)), dy, e.like(0, dy))]


@gradient("Softsign", reads="x0 dy0")
def softsign(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    base = e.Add(e.Abs(x), e.like(1, x))
    return [e.Div(dy, e.Mul(base, base))]


@gradient("Gelu", reads="x0 dy0")
def gelu(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    slope = _gelu_tanh_slope if op.attrs.get("approximate", "none") == "tanh" else _gelu_slope
    return [e.Mul(dy, slope(e, x))]


def _gelu_slope(e: Emitter, x: Value) -> Value:
    """Φ(x) + x φ(x), with Φ and φ of the standard normal distribution."""
    cdf = e.Mul(e.Add(e.Erf(e.Mul(x, e.like(math.sqrt(0.5), x))), e.like(1, x)), e.like(0.5, x))
    pdf = e.Mul(e.Exp(e.Mul(e.Mul(x, x), e.like(-0.5, x))), e.like(1 / math.sqrt(2 * math.pi), x))
    return e.Add(cdf, e.Mul(x, pdf))


def _gelu_tanh_slope(e: Emitter, x: Value) -> Value:
    """y = x (1 + t) / 2, t = tanh(u), u = √(2/π) (x + 0.044715 x³)."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    square = e.Mul(x, x)
    u = e.Mul(e.Mul(x, e.Add(e.Mul(square, e.like(cubic, x)), e.like(1, x))), e.like(scale, x))
    t = e.Tanh(u)
    du = e.Add(e.Mul(square, e.like(3 * cubic * scale, x)), e.like(scale, x))
    half = e.like(0.5, x)
    inner = e.Mul(e.Mul(x, e.Sub(e.like(1, x), e.Mul(t, t))), du)
    return e.Mul(e.Add(e.Add(t, e.like(1, x)), inner), half)


@gradient("Softmax", reads="y0 dy0")
def softmax(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    dot = e.reduce_sum(e.Mul(dy, y), [op.attrs.get("axis", -1)], keepdims=True)
    return [e.Mul(e.Sub(dy, dot), y)]


@gradient("LogSoftmax", reads="y0 dy0")
def log_softmax(e: Emitter, op: Operator, y: Value, dy: Value) -> Grads:
    total = e.reduce_sum(dy, [op.attrs.get("axis", -1)], keepdims=True)
    return [e.Sub(dy, e.Mul(e.Exp(y), total))]


@decomposition("Swish")
def swish(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    alpha = d.number("alpha", 1.0)
    return [d.Mul(x, d.Sigmoid(x if alpha == 1 else d.Mul(x, alpha)))]


@decomposition("SwiGLU")
def swi_glu(d: Parts, op: Operator, gate: Variable, value: Variable) -> list[Variable]:
    return [d.Mul(swish(d, op, gate)[0], value)]


_AS_LARGE = (
    "Celu Elu Gelu HardSwish LeakyRelu Mish PRelu Relu Selu Shrink Softplus Swish ThresholdedRelu".split()  # noqa: SIM905
)
traits(*_AS_LARGE, elementwise=True, carries_large=True)
traits("HardSigmoid", "Sigmoid", elementwise=True, bounded=(0.0, 1.0))
traits("Softsign", "Tanh", elementwise=True, bounded=(-1.0, 1.0))
traits("Softmax", "Hardmax", over="axis", bounded=(0.0, 1.0), ignores="low")
traits("LogSoftmax", over="axis", bounded=(-INF, 0.0), ignores="low")
traits("Sigmoid", "Softplus", ignores="low")
traits("Relu", "ThresholdedRelu", own("ReluGrad"), own("ThresholdedReluGrad"), exact=True)
traits("PRelu", weights=(1,))
traits("SwiGLU", elementwise=True)
no_gradient("Hardmax")

range_rule("Relu")(increasing(lambda x: max(x, 0.0), 0.0))
range_rule("Softplus")(increasing(lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))), 0.0))


def _between(op: Operator, ranges: Ranges, below: float = 1.0, above: float = 1.0) -> Interval:
    """Between multiples of the argument (or -2) where it is negative and where it is positive."""
    found = ranges.bound(op.input(0))
    if found is None:
        return -2.0 * max(below, 1.0), INF
    return min(found[0] * max(below, 1.0), -2.0 * below, 0.0), max(found[1], 0.0) * above


range_rule("Gelu", "HardSwish", "Mish")(_between)


@range_rule("Swish")
def _swish_range(op: Operator, ranges: Ranges) -> Interval | None:
    return _between(op, ranges) if float(op.attrs.get("alpha", 1.0)) == 1.0 else None


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
    return hull([product(found, slope), found, (0.0, 0.0)]) if found and slope else None
