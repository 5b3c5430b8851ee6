"""Batch-, Layer-, Instance- and GroupNormalization: gradients, and lowering rules where a place needs one.

Statistics are computed in fp32 from the input; gradients recompute them. Variances are means of squared
deviations (never mean of squares minus squared mean, which cancels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, biased, product
from amp_transpiler.ir.nodes import Operator, Shape
from amp_transpiler.ir.opdef import for_test, gradient, lowering_rule, range_rule, traits
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.lists import keep_fp32

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
_AFFINE = ("GroupNormalization", "InstanceNormalization", "LayerNormalization")
traits("BatchNormalization", weights=(1, 2, 3, 4), statistics=(3, 4), biases=(2, 3, 4))
traits(*_AFFINE, weights=(1, 2), biases=(2,))


# Scale, bias and statistics, as PaddlePaddle keeps them (fp16_utils.py).
keep_fp32("BatchNormalization", inputs=(1, 2, 3, 4), outputs=(1, 2))
keep_fp32("LayerNormalization", inputs=(1, 2), outputs=(1, 2))
keep_fp32("InstanceNormalization", "GroupNormalization", inputs=(1, 2))


@range_rule("LayerNormalization")
def _layer_range(op: Operator, ranges: Ranges) -> Interval | None:
    return normalised_range(op, ranges, int(op.attrs.get("axis", -1)))


@range_rule("InstanceNormalization", "GroupNormalization")
def _channel_range(op: Operator, ranges: Ranges) -> Interval | None:
    return normalised_range(op, ranges, 1)


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
