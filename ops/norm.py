"""Batch-, Layer-, Instance-, Group- and LpNormalization and LRN: gradients, and lowering rules where a place needs one.

Statistics are computed in fp32 from the input; gradients recompute them. Variances are means of squared
deviations (never mean of squares minus squared mean, which cancels).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Shape
from amp_transpiler.ir.opdef import gradient, lowering_rule, traits

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


@lowering_rule("BatchNormalization", when=lambda op: _trains(op) or _mixes_types(op))
def batch_normalization(
    e: Emitter, op: Operator, x: Value, scale: Value, bias: Value, mean: Value, var: Value
) -> Sequence[Any]:
    """In training mode, from the batch statistics: CUDA has no kernel for it. Otherwise in fp32 for 16-bit data with
    fp32 statistics: CUDA's kernel wants one type.

    ``running = momentum * input + (1 - momentum) * batch``, with the biased variance (ONNX, BatchNormalization-15).
    """
    epsilon = float(op.attrs.get("epsilon", _EPSILON))
    if not _trains(op):
        return [e.BatchNormalization(x, scale, bias, mean, var, epsilon=epsilon)]
    momentum = float(op.attrs.get("momentum", 0.9))
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


@gradient("BatchNormalization", "x0 x1 x3 x4 dy0", inputs=(0, 1, 2))
def batch_normalization_gradient(
    e: Emitter, op: Operator, x: Value, scale: Value, mean: Value, var: Value, dy: Value
) -> Sequence[Any]:
    """Through the batch statistics in training mode; with constant statistics otherwise.

    With xhat = (x - mean) * r and r = 1 / sqrt(var + epsilon): dB = sum(dy), dscale = sum(dy * xhat), and in training
    mode dX = scale * r * (dy - dB / M - xhat * dscale / M), sums over the M elements of a channel.
    """
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


# -- LayerNormalization ------------------------------------------------------------------------------
def _like_data(op: Operator) -> list[tuple[str | None, Shape | None] | None]:
    """Y is like X. ONNX's own inference refuses fp32 scales beside 16-bit data, which programs have here."""
    data = op.inputs[0]
    assert data is not None
    return [(data.dtype, data.shape)]


def _layer_types(op: Operator) -> list[tuple[str | None, Shape | None] | None]:
    """Y is like X; mean and inverse deviation are fp32, of size 1 along the normalised axes."""
    data = op.inputs[0]
    assert data is not None
    shape = data.shape
    if shape is not None:
        axis = int(op.attrs.get("axis", -1)) % len(shape)
        shape = (*shape[:axis], *[1] * (len(shape) - axis))
    return [(data.dtype, data.shape), ("float32", shape), ("float32", shape)]


@lowering_rule("LayerNormalization", native=True, when=_mixes_types, infer=_layer_types)
def layer_normalization(e: Emitter, op: Operator, x: Value, scale: Value, bias: Value | None = None) -> Sequence[Any]:
    """The operator itself; scale and bias kept in fp32 are rounded to the type of X, as its schema demands one type."""
    outputs = max(i + 1 for i, v in enumerate(op.outputs) if v is not None)
    ys = e.op(
        "LayerNormalization",
        x,
        *_as_stored(e, op, scale, bias),
        outputs=outputs,
        axis=op.attrs.get("axis", -1),
        epsilon=float(op.attrs.get("epsilon", _EPSILON)),
        stash_type=op.attrs.get("stash_type", 1),
    )
    return [ys[0], *(Value(v.name, "float32", v.shape) for v in ys[1:])]


def _as_stored(e: Emitter, op: Operator, scale: Value, bias: Value | None) -> list[Value]:
    """Scale and bias rounded to the element type that X has in the program."""
    data = op.inputs[0]
    assert data is not None and data.dtype is not None
    return [e.stored(v, data.dtype) for v in (scale, bias) if v is not None]


@gradient("LayerNormalization", "x0 x1 dy0", inputs=(0, 1, 2))
def layer_normalization_gradient(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> Sequence[Any]:
    """With xhat = (x - mean) * r: dscale = sum(dy * xhat), dB = sum(dy), dX as :func:`_through_statistics` says."""
    assert x.shape is not None and scale.shape is not None
    axis = int(op.attrs.get("axis", -1)) % _rank(x)
    axes = list(range(axis, _rank(x)))
    deviation, r = _deviation_and_scale(e, op, x, axes)
    normal = e.op("Mul", deviation, r, shape=x.shape)
    dx = _through_statistics(e, e.Mul(dy, scale), normal, r, axes) if e.wants(0) else None
    d_scale = e.sum_to(e.Mul(dy, normal), scale.shape, x.shape) if e.wants(1) else None
    d_bias = None
    if e.wants(2):
        shape = e.output_shapes[2]
        assert shape is not None
        d_bias = e.sum_to(dy, shape, x.shape)
    return [dx, d_scale, d_bias]


def _through_statistics(e: Emitter, d_normal: Value, normal: Value, r: Value, axes: Sequence[int]) -> Value:
    """d x of ``normal = (x - mean(x)) * r``: ``r * (d - mean(d) - normal * mean(d * normal))``."""
    along = e.Mul(normal, _mean(e, e.Mul(d_normal, normal), axes))
    return e.Mul(e.Sub(e.Sub(d_normal, _mean(e, d_normal, axes)), along), r)


# -- InstanceNormalization and GroupNormalization ------------------------------------------------------
@lowering_rule("InstanceNormalization", native=True, when=_mixes_types, infer=_like_data)
def instance_normalization(e: Emitter, op: Operator, x: Value, scale: Value, bias: Value) -> Sequence[Any]:
    """The operator itself; scale and bias kept in fp32 are rounded to the type of X, as its schema demands one type."""
    epsilon = float(op.attrs.get("epsilon", _EPSILON))
    return [e.InstanceNormalization(x, *_as_stored(e, op, scale, bias), epsilon=epsilon)]


@lowering_rule("GroupNormalization", infer=_like_data)
def group_normalization(e: Emitter, op: Operator, x: Value, scale: Value, bias: Value) -> Sequence[Any]:
    """Composed, in fp32: no place has a kernel."""
    split = _grouped(e, op, x)
    deviation, r = _deviation_and_scale(e, op, split, (2, 3))
    factor = e.Mul(r, _channels_of_groups(e, scale, split))
    y = e.Add(e.Mul(deviation, factor), _channels_of_groups(e, bias, split))
    return [e.reshape(y, x.shape or ())]


@gradient("InstanceNormalization", "x0 x1 dy0", inputs=(0, 1, 2))
@gradient("GroupNormalization", "x0 x1 dy0", inputs=(0, 1, 2))
def group_normalization_gradient(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> Sequence[Any]:
    """Both normalise over the positions of a group of channels (one channel for InstanceNormalization)."""
    split = _grouped(e, op, x)
    dy = e.reshape(dy, split.shape or ())
    dx = d_scale = d_bias = None
    if e.wants(0) or e.wants(1):
        deviation, r = _deviation_and_scale(e, op, split, (2, 3))
        normal = e.Mul(deviation, r)
        if e.wants(0):
            d_normal = e.Mul(dy, _channels_of_groups(e, scale, split))
            dx = e.reshape(_through_statistics(e, d_normal, normal, r, (2, 3)), x.shape or ())
        if e.wants(1):
            d_scale = e.reshape(e.reduce_sum(e.Mul(dy, normal), (0, 3)), scale.shape or ())
    if e.wants(2):
        d_bias = e.reshape(e.reduce_sum(dy, (0, 3)), scale.shape or ())
    return [dx, d_scale, d_bias]


def _grouped(e: Emitter, op: Operator, x: Value) -> Value:
    """[N, C, ...] as [N, groups, channels of a group, positions]."""
    assert x.shape is not None
    groups = int(op.attrs.get("num_groups", x.shape[1]))
    return e.reshape(x, (x.shape[0], groups, x.shape[1] // groups, prod(x.shape[2:])))


def _channels_of_groups(e: Emitter, value: Value, split: Value) -> Value:
    """A vector over channels, broadcastable to ``split``."""
    assert split.shape is not None
    return e.reshape(value, (1, split.shape[1], split.shape[2], 1))


# -- LpNormalization and LRN -----------------------------------------------------------------------------
@gradient("LpNormalization", "x0 y0 dy0")
def lp_normalization_gradient(e: Emitter, op: Operator, x: Value, y: Value, dy: Value) -> Sequence[Any]:
    """y = x / |x| along an axis. For p = 2, dX = (dy - y * sum(dy * y)) / |x|; for p = 1 the sign of x in place of the
    last y. Where |x| is 0, y is 0 by definition, and so is dX."""
    axis = [int(op.attrs.get("axis", -1)) % _rank(x)]
    dot = e.reduce_sum(e.Mul(dy, y), axis, keepdims=True)
    if int(op.attrs.get("p", 2)) == 1:
        size, direction = e.reduce_sum(e.Abs(x), axis, keepdims=True), e.Sign(x)
    else:
        size, direction = e.Sqrt(e.reduce_sum(e.Mul(x, x), axis, keepdims=True)), y
    zero = e.like(0, x)
    nothing = e.Equal(size, zero)
    dx = e.Div(e.Sub(dy, e.Mul(direction, dot)), e.Where(nothing, e.like(1, x), size))
    return [e.Where(nothing, zero, dx)]


@gradient("LRN", "x0 dy0")
def lrn_gradient(e: Emitter, op: Operator, x: Value, dy: Value) -> Sequence[Any]:
    """y = x * s**-beta with s = bias + alpha / size * (sum of x² over ``size`` neighbouring channels).

    dX = dy * s**-beta - 2 alpha beta / size * x * t, with t the sum of dy * x * s**(-beta - 1) over the channels whose
    neighbour this one is.
    """
    assert x.shape is not None
    size, alpha = int(op.attrs["size"]), float(op.attrs.get("alpha", 1e-4))
    beta, bias = float(op.attrs.get("beta", 0.75)), float(op.attrs.get("bias", 1.0))
    neighbours = _band(x.shape[1], (size - 1) // 2, size // 2)
    flat = (x.shape[0], x.shape[1], prod(x.shape[2:]))
    x3, dy3 = e.reshape(x, flat), e.reshape(dy, flat)
    squares = e.MatMul(e.const(neighbours, x.dtype), e.Mul(x3, x3))
    s = e.Add(e.Mul(squares, e.like(alpha / size, x)), e.like(bias, x))
    scaled = e.Mul(dy3, e.Pow(s, e.like(-beta, x)))
    around = e.MatMul(e.const(neighbours.T, x.dtype), e.Div(e.Mul(scaled, x3), s))
    dx = e.Sub(scaled, e.Mul(e.Mul(x3, around), e.like(2 * alpha * beta / size, x)))
    return [e.reshape(dx, x.shape)]


def _band(size: int, before: int, after: int) -> np.ndarray[Any, Any]:
    """[size, size]: 1 where the column is at most ``before`` below the row or ``after`` above it."""
    distance = np.arange(size)[None, :] - np.arange(size)[:, None]
    return ((distance >= -before) & (distance <= after)).astype(np.float64)


traits("BatchNormalization", biases=(2, 3, 4))
traits("GroupNormalization", "InstanceNormalization", "LayerNormalization", biases=(2,))
traits("LpNormalization", "LRN")
