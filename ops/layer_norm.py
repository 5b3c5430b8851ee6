"""Layer-, Instance- and GroupNormalization: gradients, and lowering rules where a place needs one.

All of them normalise the rows of a matrix. The normalised rows are computed again in the backward pass by the kernel of
LayerNormalization, which computes in fp32 inside; numbers per row are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges
from amp_transpiler.ir.nodes import Operator, Types
from amp_transpiler.ir.opdef import gradient, lowering_rule, range_rule, traits
from amp_transpiler.lists import keep_fp32
from amp_transpiler.ops.common import LONG, MOST_PRODUCTS, shape_of, size_of, summed_to
from amp_transpiler.ops.gpu_kernels import along_even_rows, along_rows, column_product, product, sums_of_rows
from amp_transpiler.ops.norm import normalised_range
from amp_transpiler.ops.norm_parts import correlation, epsilon_of, made_ones, mixes_types, one_behind, unit_rows

#: Beside the variance of a gradient, of which nothing is known: small enough for the smallest numbers of fp16.
_LEAST = 1e-20


def _normalised(e: Emitter, rows: Value, epsilon: float) -> tuple[Value, Value, Value]:
    """(x - mean) r for each row of a matrix, in its type, the mean and r = 1 / sqrt(variance + epsilon), which are
    [rows, 1] in fp32."""
    if not e.at.runs or rows.dtype == "float64":  # the evaluator computes this operator in fp32, kernels its statistics
        mean = e.ReduceMean(rows, e.ints(1), keepdims=1)
        deviation = e.op("Sub", rows, mean, shape=rows.shape)
        variance = e.ReduceMean(e.Mul(deviation, deviation), e.ints(1), keepdims=1)
        r = e.Reciprocal(e.Sqrt(e.Add(variance, e.like(epsilon, variance))))
        return e.op("Mul", deviation, r, shape=rows.shape), mean, r
    width = size_of(rows)[1]
    ones = e.const(np.ones(width), rows.dtype) if width <= LONG else made_ones(e, width, rows.dtype)
    return unit_rows(e, rows, ones, epsilon)


def _through_statistics(e: Emitter, d_normal: Value, normal: Value, r: Value, along: Value) -> Value:
    """d x of ``normal = (x - mean(x)) r``: ``r (d - mean(d) + normal along)`` with ``along = -mean(d normal)``.

    The kernel that normalises takes the mean from d; what it divides by comes back in the factor. All are matrices,
    r fp32; ``along`` may be of 16 bit.
    """
    centred, _, inverse = _normalised(e, d_normal, _LEAST)
    return along_rows(e, e.Div(r, inverse), centred, column_product(e, along, r), normal)


# -- LayerNormalization ------------------------------------------------------------------------------
def _like_data(op: Operator) -> Types:
    """Y is like X. ONNX's own inference refuses fp32 scales beside 16-bit data, which programs have here."""
    data = op.inputs[0]
    assert data is not None
    return [(data.dtype, data.shape)]


def _layer_types(op: Operator) -> Types:
    """Y is like X; mean and inverse deviation are fp32, of size 1 along the normalised axes."""
    data = op.inputs[0]
    assert data is not None
    shape = data.shape and one_behind(data.shape, int(op.attrs.get("axis", -1)))
    return [(data.dtype, data.shape), ("float32", shape), ("float32", shape)]


@lowering_rule("LayerNormalization", native=True, when=mixes_types, itself=True, infer=_layer_types)
def layer_normalization(e: Emitter, op: Operator, x: Value, scale: Value, bias: Value | None = None) -> Sequence[Any]:
    """The operator itself; scale and bias kept in fp32 are rounded to the type of X, as its schema demands one type."""
    outputs = max(i + 1 for i, v in enumerate(op.outputs) if v is not None)
    return e.op(
        "LayerNormalization",
        x,
        *_as_stored(e, op, scale, bias),
        outputs=outputs,
        dtype=(x.dtype, "float32", "float32")[:outputs],
        axis=op.attrs.get("axis", -1),
        epsilon=epsilon_of(op),
        stash_type=op.attrs.get("stash_type", 1),
    )


def _as_stored(e: Emitter, op: Operator, scale: Value, bias: Value | None) -> list[Value]:
    """Scale and bias rounded to the element type that X has in the program."""
    data = op.inputs[0]
    assert data is not None and data.dtype is not None
    return [e.cast(v, data.dtype) for v in (scale, bias) if v is not None]


@gradient("LayerNormalization", "x0 x1 dy0", inputs=(0, 1, 2), native=True)
def layer_normalization_gradient(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> Sequence[Any]:
    """With xhat = (x - mean) r: dscale = sum(dy xhat), dB = sum(dy), dX as :func:`_through_statistics` says."""
    shape = size_of(x)
    inner = shape[int(op.attrs.get("axis", -1)) % len(shape) :]
    width = prod(inner)
    matrix = (prod(shape) // max(width, 1), width)
    scale_shape, scale = size_of(scale), e.cast(scale, x.dtype)
    wide = shape if set(scale_shape[: -len(inner)]) - {1} else inner  # rows may have scales of their own
    scale = e.reshape(scale, scale_shape[-len(wide) :])
    if size_of(scale) != wide:
        scale = e.Expand(scale, e.ints(*wide), shape=wide)
    dx = d_scale = None
    if e.wants(0) or e.wants(1):
        normal, _, r = _normalised(e, e.reshape(x, matrix), epsilon_of(op))
        rows = e.reshape(dy, matrix)
        weighed = e.Mul(rows, normal)
    if e.wants(0):
        if wide is inner:
            along = product(e, weighed, e.reshape(scale, (width, 1)), alpha=-1 / width)
        else:
            along = sums_of_rows(e, e.Mul(weighed, e.reshape(scale, matrix)), -1 / width)
        factor = e.reshape(scale, (width,) if wide is inner else matrix)
        dx = e.reshape(_through_statistics(e, e.Mul(rows, factor), normal, r, along), shape)
    if e.wants(1):
        d_scale = summed_to(e, e.reshape(weighed, shape), scale_shape, shape)
    return [dx, d_scale, summed_to(e, dy, shape_of(e, 2), shape) if e.wants(2) else None]


# -- InstanceNormalization and GroupNormalization ------------------------------------------------------
@lowering_rule("InstanceNormalization", native=True, when=mixes_types, itself=True, infer=_like_data)
def instance_normalization(e: Emitter, op: Operator, x: Value, scale: Value, bias: Value) -> Sequence[Any]:
    """The operator itself; scale and bias kept in fp32 are rounded to the type of X, as its schema demands one type."""
    epsilon = epsilon_of(op)
    return [e.InstanceNormalization(x, *_as_stored(e, op, scale, bias), epsilon=epsilon)]


@lowering_rule("GroupNormalization", native=True, infer=_like_data)
def group_normalization(e: Emitter, op: Operator, x: Value, scale: Value, bias: Value) -> Sequence[Any]:
    """Composed: no place has a kernel."""
    groups = _groups(op, x)
    normal, *_ = _normalised(e, _as_rows(e, x, groups), epsilon_of(op))
    normal = e.reshape(normal, groups)
    factor, shift = (_channels_of_groups(e, e.cast(v, x.dtype), groups) for v in (scale, bias))
    return [e.reshape(e.Add(e.Mul(normal, factor), shift), size_of(x))]


@gradient("InstanceNormalization", "x0 x1 dy0", inputs=(0, 1, 2), native=True)
def instance_normalization_gradient(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> Sequence[Any]:
    """Of M positions of a channel of an image as BatchNormalization's of a channel. With dY standardised too,
    dy = w / t + mean(dy), and k = mean(w * xhat): dX = scale * r / t * (w - k * xhat), and sums over the images
    dB = sum(M mean(dy)), dscale = sum(M k / t)."""
    images, channels, count = size_of(x)[0], size_of(x)[1], prod(size_of(x)[2:])
    matrix, each, dx, d_scale = (images * channels, count), (images, channels, 1), None, None
    w, d_mean, t = _normalised(e, e.reshape(dy, matrix), _LEAST)
    if e.wants(0) or e.wants(1):
        normal, _, r = _normalised(e, e.reshape(x, matrix), epsilon_of(op))
        minus_k = e.reshape(_minus_correlation(e, w, normal), (matrix[0], 1))
    if e.wants(0):
        known, slope = e.known(op.inputs[1]), e.Div(r, t)
        if known is None or (known != 1).any():
            slope = e.Mul(e.reshape(slope, each), e.reshape(e.f32(scale), (1, channels, 1)), shape=each)
        slope = e.cast(e.reshape(slope, (matrix[0], 1)), w.dtype)
        dx = e.reshape(along_even_rows(e, slope, w, e.Mul(slope, minus_k), normal), size_of(x))
    if e.wants(1):
        d_scale = _over_images(e, e.Div(e.f32(minus_k), t), each, -count)
    return [dx, d_scale, _over_images(e, d_mean, each, count) if e.wants(2) else None]


def _minus_correlation(e: Emitter, normal: Value, x_normal: Value) -> Value:
    """Minus the mean of the products of two standardised rows, in their type, which holds it. A product for each row is
    slow on CPU (ten times, measured), and too many at once for a GPU."""
    if e.at.fused and size_of(normal)[0] <= MOST_PRODUCTS:
        return correlation(e, normal, x_normal)
    products = e.Mul(normal, x_normal) if e.at.fused else e.Mul(e.f32(normal), e.f32(x_normal))
    return e.cast(e.Neg(e.ReduceMean(products, e.ints(1), keepdims=1)), normal.dtype)


def _over_images(e: Emitter, numbers: Value, each: tuple[int, int, int], factor: int) -> Value:
    """The sum over the images of fp32 numbers of their channels, times a number."""
    total = e.ReduceSum(e.reshape(numbers, each), e.ints(0, 2), keepdims=0, shape=each[1:2])
    return e.Mul(total, e.like(factor, total))


@gradient("GroupNormalization", "x0 x1 dy0", inputs=(0, 1, 2), native=True)
def group_normalization_gradient(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> Sequence[Any]:
    """It normalises over the positions of a group of channels."""
    groups = _groups(op, x)
    split = e.reshape(dy, groups)
    dx = d_scale = d_bias = None
    if e.wants(0) or e.wants(1):
        rows, _, r = _normalised(e, _as_rows(e, x, groups), epsilon_of(op))
        weighed = e.Mul(split, e.reshape(rows, groups))
    if e.wants(0):
        factor = _channels_of_groups(e, scale, groups)
        along = e.Mul(e.f32(e.ReduceMean(weighed, e.ints(3), keepdims=1)), e.f32(factor))
        along = e.Neg(e.reshape(e.ReduceMean(along, e.ints(2), keepdims=1), (groups[0] * groups[1], 1)))
        d_normal = _as_rows(e, e.Mul(split, e.cast(factor, x.dtype)), groups)
        dx = e.reshape(_through_statistics(e, d_normal, rows, r, along), size_of(x))
    if e.wants(1):
        d_scale = e.reshape(e.ReduceSum(weighed, e.ints(0, 3), keepdims=0), size_of(scale))
    if e.wants(2):
        d_bias = e.reshape(e.ReduceSum(split, e.ints(0, 3), keepdims=0), size_of(scale))
    return [dx, d_scale, d_bias]


def _groups(op: Operator, x: Value) -> tuple[int, int, int, int]:
    """The shape of [N, C, ...] as [N, groups, channels of a group, positions]."""
    shape = size_of(x)
    groups = int(op.attrs["num_groups"])
    return shape[0], groups, shape[1] // groups, prod(shape[2:])


def _as_rows(e: Emitter, x: Value, groups: tuple[int, int, int, int]) -> Value:
    return e.reshape(x, (groups[0] * groups[1], groups[2] * groups[3]))


def _channels_of_groups(e: Emitter, value: Value, groups: tuple[int, int, int, int]) -> Value:
    """A vector over channels, broadcastable to ``groups``."""
    return e.reshape(value, (1, groups[1], groups[2], 1))


_AFFINE = ("GroupNormalization", "InstanceNormalization", "LayerNormalization")
traits(*_AFFINE, weights=(1, 2), biases=(2,), centres=True)


# Scale, bias and statistics, as PaddlePaddle keeps them (fp16_utils.py).
keep_fp32("LayerNormalization", inputs=(1, 2), outputs=(1, 2))
keep_fp32("InstanceNormalization", "GroupNormalization", inputs=(1, 2))


@range_rule("LayerNormalization")
def _layer_range(op: Operator, ranges: Ranges) -> Interval | None:
    return normalised_range(op, ranges, int(op.attrs.get("axis", -1)))


@range_rule("InstanceNormalization", "GroupNormalization")
def _channel_range(op: Operator, ranges: Ranges) -> Interval | None:
    return normalised_range(op, ranges, 1)
