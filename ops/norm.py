"""BatchNormalization: its gradient, and a lowering rule where a place needs one.

Statistics are fp32. Variances are means of squared deviations (never mean of squares less squared mean, which cancels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, biased, product
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import for_test, gradient, lowering_rule, range_rule, traits
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import keep_fp32
from amp_transpiler.ops.channel_rows import by_channel, by_image
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.gpu_kernels import along_rows, on_gpu
from amp_transpiler.ops.gpu_kernels import product as matrix_product
from amp_transpiler.ops.training.rows import products, state_as

_EPSILON = 1e-5


def _epsilon(e: Emitter, op: Operator, value: Value) -> Value:
    return e.like(float(op.attrs.get("epsilon", _EPSILON)), value)


def _mean(e: Emitter, value: Value, axes: Sequence[int]) -> Value:
    return e.op("ReduceMean", value, e.ints(*axes), keepdims=1)


def _statistics(e: Emitter, op: Operator, x: Value, axes: Sequence[int]) -> tuple[Value, Value, Value]:
    """Mean, deviation from it and (biased) variance over ``axes``."""
    mean = _mean(e, x, axes)
    deviation = e.op("Sub", x, mean, shape=x.shape)
    return mean, deviation, _mean(e, e.Mul(deviation, deviation), axes)


def _deviation_and_scale(e: Emitter, op: Operator, x: Value, axes: Sequence[int]) -> tuple[Value, Value]:
    """The deviation from the mean over ``axes``, and 1 / sqrt(variance + epsilon)."""
    _, deviation, variance = _statistics(e, op, x, axes)
    return deviation, _inverse_root(e, op, variance)


def _inverse_root(e: Emitter, op: Operator, variance: Value) -> Value:
    return e.Reciprocal(e.Sqrt(e.Add(variance, _epsilon(e, op, variance))))


def _rank(value: Value) -> int:
    assert value.shape is not None
    return len(value.shape)


# -- BatchNormalization ------------------------------------------------------------------------------
def _trains(op: Operator) -> bool:
    return bool(op.attrs.get("training_mode", 0))


def _mixes_types(op: Operator) -> bool:
    return len({v.dtype for v in op.inputs if v is not None}) > 1


def _per_channel(e: Emitter, value: Value, rank: int) -> Value:
    """A vector over channels, broadcastable to [N, C, ...]."""
    assert value.shape is not None
    return e.reshape(value, (1, value.shape[0], *[1] * (rank - 2)))


@lowering_rule("BatchNormalization", native=True, when=lambda op: _trains(op) or _mixes_types(op))
def batch_normalization(
    e: Emitter, op: Operator, x: Value, scale: Value, bias: Value, mean: Value, var: Value
) -> Sequence[Any]:
    """In training mode, from the batch statistics: CUDA has no kernel for it. Otherwise for 16-bit data with fp32
    statistics: CUDA's kernel wants one type.

    ``running = momentum * input + (1 - momentum) * batch``, with the biased variance (ONNX, BatchNormalization-15).

    On CPU results are rounded, not what GPU places store on the way to them: normalised rows, their correlation,
    slope, mean and bias. Those roundings would double the gradient's time (measured), and nothing there overflows: rows
    of M numbers end at sqrt(M), correlations at 1, slopes at scale / sqrt(epsilon).
    """
    epsilon = float(op.attrs.get("epsilon", _EPSILON))
    momentum = float(op.attrs.get("momentum", 0.9))
    scale, bias, mean, var = (e.f32(v) for v in (scale, bias, mean, var))
    if on_gpu(e):
        if not _trains(op):
            return [_shifted(e, x, e.Mul(scale, _inverse_root(e, op, var)), bias, mean)]
        return _by_rows(e, x, scale, bias, mean, var, epsilon, momentum)
    x = e.f32(x)
    if not _trains(op):
        return [e.BatchNormalization(x, scale, bias, mean, var, epsilon=epsilon)]
    if e.place == "cpu":  # the kernel is more than twice as fast as its parts
        # It writes the new statistics over its inputs, even over those that the caller owns: it gets copies, which the
        # optimiser cannot take away.
        zero = e.cast(e.scalar("zero"), mean.dtype)
        ys = e.op(
            "BatchNormalization",
            x,
            scale,
            bias,
            e.Add(mean, zero),
            e.Add(var, zero),
            outputs=3,
            epsilon=epsilon,
            momentum=momentum,
            training_mode=1,
        )
        return list(ys)
    rank = _rank(x)
    batch_mean, deviation, batch_var = _statistics(e, op, x, [0, *range(2, rank)])
    factor = e.Mul(_inverse_root(e, op, batch_var), _per_channel(e, scale, rank))
    y = e.Add(e.Mul(deviation, factor), _per_channel(e, bias, rank))

    def running(old: Value, new: Value) -> Value:
        new = e.Mul(e.reshape(new, old.shape or ()), e.like(1 - momentum, new))
        return e.Add(e.Mul(old, e.like(momentum, old)), new)

    return [y, running(mean, batch_mean), running(var, batch_var)]


def _by_rows(
    e: Emitter, x: Value, scale: Value, bias: Value, mean: Value, var: Value, epsilon: float, momentum: float
) -> Sequence[Any]:
    """Training mode on a GPU place: LayerNormalization over a row for each channel gives the statistics in fp32, and
    what scale and bias are applied to."""
    normal, batch_mean, r = _standardised(e, x, epsilon)
    e.shared[_LAYERS] = (*e.shared.get(_LAYERS, ()), scale, r)
    channels, count = size_of(normal)
    zeros = e.const(np.zeros(channels), x.dtype)
    rows = _affine(e, e.reshape(normal, (1, channels, count)), scale, bias, zeros)
    y = by_image(e, e.reshape(rows, (channels, count)), size_of(x))

    # 1 / r^2 is the variance plus epsilon. In vectors, so that layers whose statistics are one state are one vector.
    share, excess = (e.const(np.full(size_of(r), (1 - momentum) * n), r.dtype) for n in (1.0, epsilon))
    old_mean, old_var = (e.Mul(old, e.like(momentum, old)) for old in (mean, var))
    new_mean = e.Add(old_mean, e.Mul(batch_mean, e.like(1 - momentum, batch_mean)))
    new_var = e.Sub(e.Add(old_var, e.Div(e.Div(share, r), r)), excess)
    return [y, new_mean, new_var]


#: Where scales and inverse deviations lie of which nobody has asked for the product yet, in turn.
_LAYERS = "scale and inverse deviation of layers"


def _standardised(e: Emitter, x: Value, epsilon: float) -> tuple[Value, Value, Value]:
    """[C, M] of mean 0 and variance 1 from [N, C, ...], with mean and 1 / sqrt(variance + epsilon), fp32 [C].

    The gradient finds what the forward rule made.
    """
    key = f"{x.name} standardised, {epsilon}"
    if key not in e.shared:
        rows = by_channel(e, x)
        channels, count = size_of(rows)
        ones = f"{count} ones, {x.dtype}"
        if ones not in e.shared:  # from a run-time scalar, or a constant of this size would lie in the session
            number = f"one, {x.dtype}"
            if number not in e.shared:
                e.shared[number] = (e.cast(e.Add(e.scalar("zero"), e.const(1.0, "float32")), x.dtype),)
            e.shared[ones] = (e.Expand(e.shared[number][0], e.ints(count), shape=(count,)),)
        kinds = (x.dtype, "float32", "float32")
        normal, mean, r = e.op(
            "LayerNormalization", rows, *e.shared[ones], outputs=3, dtype=kinds, axis=-1, epsilon=epsilon
        )
        vectors = (e.reshape(Value(v.name, v.dtype, (channels, 1)), (channels,)) for v in (mean, r))
        e.shared[key] = (Value(normal.name, x.dtype, (channels, count)), *vectors)
    normal, mean, r = e.shared[key]
    return normal, mean, r


def _slope(e: Emitter, scale: Value, r: Value) -> Value:
    """scale * r. The gradient of the last layer makes those of all layers before it."""
    if _slope_key(scale, r) not in e.shared:
        known = e.shared.pop(_LAYERS, ())
        pairs = list(zip(known[::2], known[1::2], strict=True))
        pairs = pairs if (scale, r) in pairs else [(scale, r)]
        for pair, made in zip(pairs, products(e, pairs), strict=True):
            e.shared[_slope_key(*pair)] = (made,)
    return e.shared[_slope_key(scale, r)][0]


def _slope_key(scale: Value, r: Value) -> str:
    return f"{scale.name} * {r.name}"


def _shifted(e: Emitter, x: Value, slope: Value, bias: Value, mean: Value) -> Value:
    """slope * (x - mean) + bias, with fp32 vectors over channels, in the type of X.

    What the mean loses in this type goes into the bias; the slope's rounding is one more of the size of the result's.
    """
    low_mean = e.cast(mean, x.dtype)
    if x.dtype in HALF:
        row = (1, *size_of(mean))
        held, one = e.reshape(e.f32(low_mean), row), e.const(np.ones(size_of(slope)), "float32")
        bias = e.reshape(e.BatchNormalization(held, slope, bias, mean, one, epsilon=0.0, shape=row), row[1:])
    return _affine(e, x, slope, bias, low_mean)


def _affine(e: Emitter, x: Value, slope: Value, bias: Value, mean: Value) -> Value:
    """The same, with vectors in the type of X, as the kernel wants them."""
    slope, bias, mean = (state_as(e, v, x.dtype) for v in (slope, bias, mean))
    if x.dtype == "bfloat16":  # CUDA has no kernel of BatchNormalization
        slope, bias, mean = (_per_channel(e, v, _rank(x)) for v in (slope, bias, mean))
        return e.Add(e.Mul(e.Sub(x, mean), slope), bias)
    one = e.const(np.ones(size_of(slope)), x.dtype)
    return e.BatchNormalization(x, slope, bias, mean, one, epsilon=0.0, shape=x.shape)


@gradient("BatchNormalization", "x0 x1 x3 x4 dy0", inputs=(0, 1, 2), native=True)
def batch_normalization_gradient(
    e: Emitter, op: Operator, x: Value, scale: Value, mean: Value, var: Value, dy: Value
) -> Sequence[Any]:
    """Through the batch statistics in training mode; with constant statistics otherwise.

    With xhat = (x - mean) * r and r = 1 / sqrt(var + epsilon): dB = sum(dy), dscale = sum(dy * xhat), and in training
    mode dX = scale * r * (dy - dB / M - xhat * dscale / M), sums over the M elements of a channel.
    """
    scale, mean, var = (e.f32(v) for v in (scale, mean, var))
    if on_gpu(e):
        if _trains(op):
            return [*_gradient_by_rows(e, op, x, scale, dy), None, None]
        return [*_frozen_gradient(e, op, x, scale, mean, var, dy), None, None]
    x, dy = e.f32(x), e.f32(dy)
    rank = _rank(x)
    assert x.shape is not None
    axes = [0, *range(2, rank)]
    if _trains(op):
        deviation, r = _deviation_and_scale(e, op, x, axes)
    else:
        deviation = e.Sub(x, _per_channel(e, mean, rank)) if e.wants(1) else x
        r = _inverse_root(e, op, _per_channel(e, var, rank))
    factor = e.Mul(_per_channel(e, scale, rank), r)
    through = _trains(op) and e.wants(0)
    d_bias = e.reduce_sum(dy, axes, keepdims=True) if e.wants(2) or through else None
    d_scale = None
    if e.wants(1) or through:
        d_scale = e.Mul(e.reduce_sum(e.Mul(dy, deviation), axes, keepdims=True), r)
    dx = None
    if through:
        count = e.like(prod(x.shape) // x.shape[1], x)
        along = e.Mul(deviation, e.Div(e.Mul(d_scale, e.Mul(factor, r)), count))
        dx = e.Sub(e.Sub(e.Mul(dy, factor), along), e.Div(e.Mul(factor, d_bias), count))
    elif e.wants(0):
        dx = e.Mul(dy, factor)
    vectors = [None if d is None else e.reshape(d, scale.shape or ()) for d in (d_scale, d_bias)]
    return [dx, *vectors, None, None]


#: Added to the variance of dY: so that numbers of any size that 16 bit has are brought near to 1, and a row of equal
#: numbers, whose mean fp32 may miss by 1e-7 of it, stays far from overflow.
_LEAST_VARIANCE = 1e-10


def _correlation(e: Emitter, normal: Value, x_normal: Value) -> Value:
    """Minus the mean of the products of two standardised rows, fp32 [C]: between -1 and 1, so that 16 bit holds it."""
    channels, count = size_of(normal)
    row, column = e.reshape(normal, (channels, 1, count)), e.reshape(x_normal, (channels, count, 1))
    return e.reshape(e.f32(matrix_product(e, row, column, alpha=-1 / count)), (channels,))


def _gradient_by_rows(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> Sequence[Any]:
    """On a GPU place. With dY standardised too, dy = w / t + mean(dy) and k = mean(w * xhat):
    dB = M mean(dy), dscale = M k / t, dX = scale * r / t * (w - k * xhat), which is one pass over rows."""
    normal, _, r = _standardised(e, x, float(op.attrs.get("epsilon", _EPSILON)))
    w, d_mean, t = _standardised(e, dy, _LEAST_VARIANCE)
    minus_k = _correlation(e, w, normal)
    channels, count = size_of(w)
    dx = d_scale = d_bias = None
    if e.wants(0):
        slope = e.Div(_slope(e, scale, r), t)
        a, b = (e.reshape(v, (channels, 1)) for v in (slope, e.Mul(slope, minus_k)))
        dx = by_image(e, along_rows(e, a, w, b, normal), size_of(x))
    if e.wants(1):
        d_scale = e.Mul(e.Div(minus_k, t), e.like(-count, t))
    if e.wants(2):
        d_bias = e.Mul(d_mean, e.like(count, d_mean))
    return [dx, d_scale, d_bias]


def _frozen_gradient(
    e: Emitter, op: Operator, x: Value, scale: Value, mean: Value, var: Value, dy: Value
) -> Sequence[Any]:
    """On a GPU place, with constant statistics: dX = scale * r * dY; the mean of dy * (x - mean) as of two
    standardised rows."""
    r = _inverse_root(e, op, var)
    dx = d_scale = d_bias = None
    if e.wants(0):
        dx = e.Mul(dy, _per_channel(e, e.cast(_slope(e, scale, r), dy.dtype), _rank(x)))
    if e.wants(1) or e.wants(2):
        w, d_mean, t = _standardised(e, dy, _LEAST_VARIANCE)
        count = e.like(size_of(w)[1], t)
        d_bias = e.Mul(d_mean, count)
        if e.wants(1):
            normal, x_mean, x_t = _standardised(e, x, _LEAST_VARIANCE)
            apart = e.Mul(d_mean, e.Sub(x_mean, mean))
            together = e.Sub(apart, e.Div(_correlation(e, w, normal), e.Mul(t, x_t)))
            d_scale = e.Mul(e.Mul(together, r), count)
    return [dx, d_scale, d_bias]


@for_test("BatchNormalization")
def batch_normalization_for_test(op: Operator) -> None:
    """Use the running statistics, and leave them as they are."""
    if not op.attrs.get("training_mode", 0):
        return
    op.attrs["training_mode"] = 0
    for slot, state in ((2, op.input(4)), (1, op.input(3))):
        new = op.output(slot)
        if new is not None and state is not None:
            op.program.replace_uses(new, state)
            op.set_output(slot, None)


traits("BatchNormalization", weights=(1, 2, 3, 4), statistics=(3, 4), biases=(2, 3, 4))


# Scale, bias and statistics, as PaddlePaddle keeps them (fp16_utils.py).
keep_fp32("BatchNormalization", inputs=(1, 2, 3, 4), outputs=(1, 2))


def normalised_range(op: Operator, ranges: Ranges, axis: int) -> Interval | None:
    """The interval after a norm over the axes from ``axis`` on, with scale and bias.

    No element of n numbers with mean square 1 is larger than the root of n.
    """
    read = op.input(0)
    if read is None or read.shape is None:
        return None
    sizes = read.shape[axis if axis >= 0 else len(read.shape) + axis :]
    if not all(isinstance(size, int) for size in sizes):
        return None
    largest = math.sqrt(prod(int(size or 0) for size in sizes))
    scale = ranges.bound(op.input(1))
    return biased(scale and product((-largest, largest), scale), op, ranges)


@range_rule("BatchNormalization")
def _batch_range(op: Operator, ranges: Ranges) -> Interval | None:
    data = ranges.bound(op.input(0))
    contents = [ranges.content(v) for v in op.inputs[1:5]]
    if data is None or not all(map(math.isfinite, data)) or op.attrs.get("training_mode", 0):
        return None
    if len(contents) < 4 or any(content is None for content in contents):
        return None
    scale, bias, mean, variance = (as_array(content).astype(np.float64) for content in contents)
    factor = scale / np.sqrt(variance + float(op.attrs.get("epsilon", _EPSILON)))
    ends = np.stack([(data[0] - mean) * factor + bias, (data[1] - mean) * factor + bias])
    return (float(ends.min()), float(ends.max())) if np.isfinite(ends).all() and ends.size else None
