"""Functions that kernels of some places compute in 16 bit, with their roundings: what emulates them on CPU.

Found by comparing bits with WebGPU's kernels (``tests/webgpu/test_roundings.py``).
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import padded, size_of
from amp_transpiler.ops.norm_parts import epsilon_of
from amp_transpiler.ops.rounded_sums import Summed, in_lanes, in_turn, rounded_sum

#: Lanes that share a softmax.
_LANES = 64


def _power(e: Emitter, x: Value) -> Value:
    """exp(x) as the power of 2 of a rounded product."""
    return _power_of_2(e, e.Mul(x, e.like(math.log2(math.e), x), shape=x.shape))


def _power_of_2(e: Emitter, x: Value) -> Value:
    exponent = e.cast(x, "float32")
    return e.cast(e.Exp(e.Mul(exponent, e.const(math.log(2), "float32"), shape=x.shape), shape=x.shape), x.dtype)


@rounded_sum("Exp")
def _exp(e: Emitter, op: Summed, x: Value) -> Value:
    return _power(e, x)


@rounded_sum("Log")
def _log(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    wide = e.Mul(e.Log(e.cast(x, "float32"), shape=shape), e.const(math.log2(math.e), "float32"), shape=shape)
    power = e.cast(wide, x.dtype)
    return e.Mul(power, e.like(math.log(2), power), shape=shape)


@rounded_sum("Sigmoid")
def _sigmoid(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    return e.Div(e.like(1, x), e.Add(e.like(1, x), _power(e, e.Neg(x, shape=shape)), shape=shape), shape=shape)


@rounded_sum("Tanh")
def _tanh(e: Emitter, op: Summed, x: Value) -> Value:
    return _tangent(e, x, op.shape)


def _tangent(e: Emitter, x: Value, shape: tuple[int, ...]) -> Value:
    power, one = _power(e, e.Mul(e.Abs(x, shape=shape), e.like(-2, x), shape=shape)), e.like(1, x)
    size = e.Div(e.Sub(one, power, shape=shape), e.Add(one, power, shape=shape), shape=shape)
    return e.Mul(e.Sign(x, shape=shape), size, shape=shape)


@rounded_sum("Erf")
def _erf(e: Emitter, op: Summed, x: Value) -> Value:
    return _error_function(e, x, op.shape)


def _error_function(e: Emitter, x: Value, shape: tuple[int, ...]) -> Value:
    """Formula 7.1.26 of Abramowitz and Stegun: Handbook of Mathematical Functions."""
    size, one = e.Abs(x, shape=shape), e.like(1, x)
    below = e.Add(one, e.Mul(_cut(e, 0.3275911, x), size, shape=shape), shape=shape)
    t = e.Div(one, below, shape=shape)
    total = _cut(e, 1.061405429, x)
    for number in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = e.Add(e.Mul(total, t, shape=shape), _cut(e, number, x), shape=shape)
    exponent = e.Mul(size, e.Mul(size, e.like(math.log2(math.e), x), shape=shape), shape=shape)
    power = _power_of_2(e, e.Neg(exponent, shape=shape))
    rest = e.Mul(e.Mul(total, t, shape=shape), power, shape=shape)
    return e.Mul(e.Sign(x, shape=shape), e.Sub(one, rest, shape=shape), shape=shape)


def _cut(e: Emitter, number: float, x: Value) -> Value:
    """A number of a shader in a 16-bit type: rounded towards 0."""
    held = np.float16(number)
    return e.like(float(np.nextafter(held, np.float16(0)) if abs(float(held)) > abs(number) else held), x)


@rounded_sum("Gelu", f"{DOMAIN}::Gelu")
def _gelu(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    half = e.like(0.5, x)
    if op.attrs.get("approximate", "none") == "tanh":
        cubic = e.Mul(e.Mul(_cut(e, 0.035677408136300125, x), x, shape=shape), x, shape=shape)
        inner = e.Mul(x, e.Add(cubic, _cut(e, 0.7978845608028654, x), shape=shape), shape=shape)
        return e.Mul(x, e.Add(half, e.Mul(half, _tangent(e, inner, shape), shape=shape), shape=shape), shape=shape)
    share = _error_function(e, e.Mul(x, _cut(e, 0.7071067811865475, x), shape=shape), shape)
    return e.Mul(e.Mul(half, x, shape=shape), e.Add(e.like(1, x), share, shape=shape), shape=shape)


@rounded_sum("Softmax")
def _softmax(e: Emitter, op: Summed, x: Value) -> Value | None:
    """Of rows of whole vectors of four each component has a sum of its own."""
    shape = op.shape
    rank = len(shape)
    axis = int(op.attrs.get("axis", -1)) % rank
    count, vector = shape[axis], 1 if shape[axis] % 4 else 4
    largest = e.ReduceMax(x, e.ints(axis), keepdims=1, shape=[1 if i == axis else n for i, n in enumerate(shape)])
    power = _power(e, e.Sub(x, largest, shape=shape))
    others = [i for i in range(rank) if i != axis]
    rows, lanes = math.prod(shape[i] for i in others), -(-count // (vector * _LANES)) * _LANES
    across = e.reshape(e.transpose(power, [axis, *others]), (count // vector, vector * rows))
    sums = in_lanes(e, padded(e, across, [0, 0], [lanes - count // vector, 0]))
    total = in_turn(e, [e.reshape(sums, (vector, rows))], lambda part: part, (rows,))
    return e.Div(power, e.reshape(total, size_of(largest)), shape=shape)


def _normed(e: Emitter, op: Summed, x: Value, scale: Value, bias: Value | None, centred: bool) -> Value | None:
    """Statistics in fp32, each rounded; the rest in 16 bit."""
    if {v.dtype for v in (x, scale, bias) if v is not None} != {x.dtype}:
        return None
    shape = op.shape
    axes = range(int(op.attrs.get("axis", -1)) % len(shape), len(shape))
    over, wide = e.ints(*axes), e.cast(x, "float32")
    kept = [1 if i in axes else n for i, n in enumerate(shape)]
    squares = e.ReduceMean(e.Mul(wide, wide, shape=shape), over, keepdims=1, shape=kept)
    if centred:
        mean = e.ReduceMean(wide, over, keepdims=1, shape=kept)
        squares = e.Sub(squares, e.Mul(mean, mean, shape=kept), shape=kept)
        x = e.Sub(x, e.cast(mean, x.dtype), shape=shape)
    epsilon = e.const(np.float32(epsilon_of(op)))
    inverse = e.Div(e.const(1, "float32"), e.Sqrt(e.Add(squares, epsilon, shape=kept), shape=kept), shape=kept)
    scaled = e.Mul(e.Mul(x, e.cast(inverse, x.dtype), shape=shape), scale, shape=shape)
    return scaled if bias is None else e.Add(scaled, bias, shape=shape)


@rounded_sum("LayerNormalization")
def _layer_norm(e: Emitter, op: Summed, x: Value, scale: Value, bias: Value | None = None) -> Value | None:
    return _normed(e, op, x, scale, bias, centred=True)


@rounded_sum("SimplifiedLayerNormalization")
def _simplified_layer_norm(e: Emitter, op: Summed, x: Value, scale: Value, bias: Value | None = None) -> Value | None:
    return _normed(e, op, x, scale, bias, centred=False)


@rounded_sum("BatchNormalization")
def _batch_norm(e: Emitter, op: Summed, x: Value, *rest: Value) -> Value | None:
    """All in 16 bit."""
    shape = op.shape
    if op.attrs.get("training_mode") or any(v.dtype != x.dtype for v in rest):
        return None
    column = (size_of(rest[0])[0], *[1] * (len(shape) - 2))
    scale, bias, mean, variance = (e.reshape(v, column) for v in rest)
    spread = e.Sqrt(e.Add(variance, _cut(e, epsilon_of(op), x), shape=column), shape=column)
    inverse = e.Div(e.like(1, x), spread, shape=column)
    scaled = e.Mul(e.Mul(e.Sub(x, mean, shape=shape), inverse, shape=shape), scale, shape=shape)
    return e.Add(scaled, bias, shape=shape)


@rounded_sum("InstanceNormalization")
def _instance_norm(e: Emitter, op: Summed, x: Value, scale: Value, bias: Value) -> Value | None:
    """A multiple and a shift of each channel in fp32, each rounded; the rest in 16 bit."""
    shape = op.shape
    if {v.dtype for v in (x, scale, bias)} != {x.dtype}:
        return None
    over, wide = e.ints(*range(2, len(shape))), e.cast(x, "float32")
    kept, column = (*shape[:2], *[1] * (len(shape) - 2)), (shape[1], *[1] * (len(shape) - 2))
    mean = e.ReduceMean(wide, over, keepdims=1, shape=kept)
    squares = e.ReduceMean(e.Mul(wide, wide, shape=shape), over, keepdims=1, shape=kept)
    epsilon = e.const(np.float32(epsilon_of(op)))
    spread = e.Add(e.Sub(squares, e.Mul(mean, mean, shape=kept), shape=kept), epsilon, shape=kept)
    inverse = e.Div(e.const(1, "float32"), e.Sqrt(spread, shape=kept), shape=kept)
    factor, shift = (e.reshape(e.cast(v, "float32"), column) for v in (scale, bias))
    factor = e.Mul(inverse, factor, shape=kept)
    shift = e.Sub(shift, e.Mul(mean, factor, shape=kept), shape=kept)
    return e.Add(e.Mul(x, e.cast(factor, x.dtype), shape=shape), e.cast(shift, x.dtype), shape=shape)


@rounded_sum("LogSoftmax")
def _log_softmax(e: Emitter, op: Summed, x: Value) -> Value:
    """Without a kernel of its own onnxruntime makes it up of others, each of which rounds."""
    shape = op.shape
    axis = int(op.attrs.get("axis", -1)) % len(shape)
    over, kept = e.ints(axis), [1 if i == axis else n for i, n in enumerate(shape)]
    apart = e.Sub(x, e.ReduceMax(x, over, keepdims=1, shape=kept), shape=shape)
    total = e.ReduceSum(e.Exp(apart, shape=shape), over, keepdims=1, shape=kept)
    return e.Sub(apart, e.Log(total, shape=kept), shape=shape)
