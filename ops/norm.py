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
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.intervals import Interval, Ranges, biased, product
from amp_transpiler.ir.metadata import SYNCHRONIZED
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import for_test, gradient, lowering_rule, range_rule, traits
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.lists import keep_fp32
from amp_transpiler.ops.batch_statistics import gradient_over_ranks, is_synchronized, normalised_over_ranks
from amp_transpiler.ops.channel_rows import by_image
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.gpu_kernels import along_even_rows, along_rows, plus_rows
from amp_transpiler.ops.norm_parts import (
    LAYERS,
    LEAST_VARIANCE,
    correlation,
    epsilon_of,
    inverse_root,
    mixes_types,
    moments_of_parts,
    over_rows,
    parts_of_rows,
    per_channel,
    remember_slope,
    shifted,
    slope_of,
    standardised,
    statistics,
)


# -- BatchNormalization ------------------------------------------------------------------------------
def _trains(op: Operator) -> bool:
    return bool(op.attrs.get("training_mode", 0))


@lowering_rule("BatchNormalization", native=True, when=lambda op: _trains(op) or mixes_types(op))
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
    epsilon = epsilon_of(op)
    momentum = float(op.attrs.get("momentum", 0.9))
    scale, bias, mean, var = (e.f32(v) for v in (scale, bias, mean, var))
    if _trains(op) and 0 in (x.shape or ()) and not is_synchronized(op):  # nothing has no mean: what runs stays
        return [e.Identity(x), e.Identity(mean), e.Identity(var)]
    if _trains(op) and is_synchronized(op):
        y, *batch = normalised_over_ranks(e, op, x, scale, bias)
        return [y, *(_running(e, old, new, momentum) for old, new in zip((mean, var), batch, strict=True))]
    if e.at.fused:
        if not _trains(op):
            return [shifted(e, x, e.Mul(scale, inverse_root(e, op, var)), bias, mean)]
        return _by_rows(e, x, scale, bias, mean, var, epsilon, momentum)
    x = e.f32(x)
    if not _trains(op):
        return [e.BatchNormalization(x, scale, bias, mean, var, epsilon=epsilon)]
    if e.at.host:  # the kernel is more than twice as fast as its parts
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
    rank = len(size_of(x))
    batch_mean, deviation, batch_var = statistics(e, x, [0, *range(2, rank)])
    factor = e.Mul(inverse_root(e, op, batch_var), per_channel(e, scale, rank))
    y = e.Add(e.Mul(deviation, factor), per_channel(e, bias, rank))
    return [y, _running(e, mean, batch_mean, momentum), _running(e, var, batch_var, momentum)]


def _running(e: Emitter, old: Value, new: Value, momentum: float) -> Value:
    """A running statistic, after a batch that has a ``new`` one."""
    new = e.Mul(e.reshape(new, old.shape or ()), e.like(1 - momentum, new))
    return e.Add(e.Mul(old, e.like(momentum, old)), new)


def _by_rows(
    e: Emitter, x: Value, scale: Value, bias: Value, mean: Value, var: Value, epsilon: float, momentum: float
) -> Sequence[Any]:
    """Training mode on a GPU place: LayerNormalization over a row for each channel, or over parts of it, gives the
    statistics in fp32, and what scale and bias are applied to."""
    channels, parts = size_of(scale)[0], parts_of_rows(e, x, epsilon)
    if parts is None:
        normal, batch_mean, r = standardised(e, x, epsilon)
        e.shared[LAYERS] = (*e.shared.get(LAYERS, ()), scale, r)
        slope, shift = scale, bias
    else:
        normal, means, inverses = parts
        *moments, off = moments_of_parts(e, means, inverses)
        batch_mean, r = (e.reshape(v, (channels,)) for v in moments)
        whole = e.Mul(scale, r)
        remember_slope(e, scale, r, whole)
        whole, column = (e.reshape(v, (channels, 1)) for v in (whole, bias))
        ones = e.const(np.ones(size_of(means)), means.dtype)
        slope, shift = e.Div(whole, inverses, shape=size_of(means)), along_rows(e, whole, off, column, ones)
    rows = over_rows(e, normal, slope, shift)
    y = by_image(e, e.reshape(rows, (channels, prod(size_of(rows)) // channels)), size_of(x))

    # 1 / r^2 is the variance plus epsilon. In vectors, so that layers whose statistics are one state are one vector.
    share, excess = (e.const(np.full(size_of(r), (1 - momentum) * n), r.dtype) for n in (1.0, epsilon))
    old_mean, old_var = (e.Mul(old, e.like(momentum, old)) for old in (mean, var))
    new_mean = e.Add(old_mean, e.Mul(batch_mean, e.like(1 - momentum, batch_mean)))
    new_var = e.Sub(e.Add(old_var, e.Div(e.Div(share, r), r)), excess)
    return [y, new_mean, new_var]


def _of_one_axis(op: Operator) -> str:
    x = op.input(0)
    return "its input has one axis; reshape it to [N, 1]" if x is not None and len(x.shape or (0, 0)) == 1 else ""


@gradient("BatchNormalization", "x0 x1 x3 x4 dy0", native=True, refuse=_of_one_axis)
def batch_normalization_gradient(
    e: Emitter, op: Operator, x: Value, scale: Value, mean: Value, var: Value, dy: Value
) -> Sequence[Any]:
    """Through the batch statistics in training mode, which reads none; with those that it reads otherwise.

    With xhat = (x - mean) * r and r = 1 / sqrt(var + epsilon): dB = sum(dy), dscale = sum(dy * xhat), and in training
    mode dX = scale * r * (dy - dB / M - xhat * dscale / M), sums over the M elements of a channel. Otherwise
    dX = scale * r * dy, dmean = -scale * r * dB and dvar = -scale * r^2 * dscale / 2: exporters write standardised
    weights as a BatchNormalization whose statistics are computed.
    """
    scale, mean, var = (e.f32(v) for v in (scale, mean, var))
    if _trains(op) and is_synchronized(op):
        return [*gradient_over_ranks(e, op, x, scale, dy), *_of_statistics(e, op, scale, var)]
    if e.at.fused:
        if _trains(op):
            return [*_gradient_by_rows(e, op, x, scale, dy), *_of_statistics(e, op, scale, var)]
        return _frozen_gradient(e, op, x, scale, mean, var, dy)
    x, dy = e.f32(x), e.f32(dy)
    rank = len(size_of(x))
    axes = [0, *range(2, rank)]
    scaled, shifts = _wanted_sums(e, op)
    if _trains(op):
        _, deviation, variance = statistics(e, x, axes)
        r = inverse_root(e, op, variance)
    else:
        deviation = e.Sub(x, per_channel(e, mean, rank)) if scaled else x
        r = inverse_root(e, op, per_channel(e, var, rank))
    factor = e.Mul(per_channel(e, scale, rank), r)
    through = _trains(op) and e.wants(0)
    d_bias = e.reduce_sum(dy, axes, keepdims=True) if shifts or through else None
    d_scale = None
    if scaled or through:
        d_scale = e.Mul(e.reduce_sum(e.Mul(dy, deviation), axes, keepdims=True), r)
    dx = None
    if through:
        count = e.like(prod(size_of(x)) // size_of(x)[1], x)
        along = e.Mul(deviation, e.Div(e.Mul(d_scale, e.Mul(factor, r)), count))
        dx = e.Sub(e.Sub(e.Mul(dy, factor), along), e.Div(e.Mul(factor, d_bias), count))
    elif e.wants(0):
        dx = e.Mul(dy, factor)
    vectors = [None if d is None else e.reshape(d, scale.shape or ()) for d in (d_scale, d_bias)]
    return [dx, *vectors, *_of_statistics(e, op, scale, var, *vectors)]


def _wanted_sums(e: Emitter, op: Operator) -> tuple[bool, bool]:
    """Whether the gradient of the scale, and that of the bias, is asked for or part of one that is."""
    reads = not _trains(op)
    return e.wants(1) or (reads and e.wants(4)), e.wants(2) or (reads and e.wants(3))


def _of_statistics(
    e: Emitter, op: Operator, scale: Value, var: Value, d_scale: Value | None = None, d_bias: Value | None = None
) -> list[Value | None]:
    """The gradients of the mean and the variance, from those of scale and bias; zero in training mode."""
    if not (e.wants(3) or e.wants(4)):
        return [None, None]
    if _trains(op):
        return [e.zeros(size_of(var), var.dtype) if e.wants(slot) else None for slot in (3, 4)]
    r = inverse_root(e, op, var)
    slope = e.Mul(scale, r)
    d_mean = e.Neg(e.Mul(slope, d_bias)) if e.wants(3) else None
    return [d_mean, e.Mul(e.Mul(slope, e.Mul(r, e.like(-0.5, r))), d_scale) if e.wants(4) else None]


def _gradient_by_rows(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> Sequence[Any]:
    """On a GPU place. With dY standardised too, dy = w / t + mean(dy) and k = mean(w * xhat):
    dB = M mean(dy), dscale = M k / t, dX = scale * r / t * (w - k * xhat)."""
    dx: Value | None = None
    d_scale: Value | None = None
    d_bias: Value | None = None
    channels, count = size_of(scale)[0], prod(size_of(x)) // size_of(scale)[0]
    parts, d_parts = parts_of_rows(e, x, epsilon_of(op)), parts_of_rows(e, dy, LEAST_VARIANCE)
    if parts is not None and d_parts is not None:
        dx, d_scale, d_bias = _gradient_by_parts(e, scale, *parts, *d_parts)
    else:
        (normal, _, r), (w, d_mean, t) = standardised(e, x, epsilon_of(op)), standardised(e, dy, LEAST_VARIANCE)
        minus_k = correlation(e, w, normal)
        if e.wants(0):
            slope = e.cast(e.Div(slope_of(e, scale, r), t), w.dtype)
            a, b = (e.reshape(v, (channels, 1)) for v in (slope, e.Mul(slope, minus_k)))
            dx = along_even_rows(e, a, w, b, normal)
        if e.wants(1):
            d_scale = e.Mul(e.Div(e.f32(minus_k), t), e.like(-count, t))
        if e.wants(2):
            d_bias = e.Mul(d_mean, e.like(count, d_mean))
    if dx is not None:
        dx = by_image(e, e.reshape(dx, (channels, count)), size_of(x))
    return [dx, d_scale, d_bias]


def _gradient_by_parts(
    e: Emitter, scale: Value, normal: Value, means: Value, s: Value, w: Value, d_means: Value, d: Value
) -> tuple[Value, Value, Value]:
    """The same of parts of rows, as :func:`parts_of_rows` gives them: normal and w [C n, M / n], the others [C, n].

    With xhat of a part (normal / s + off) r, dY of it w / d + off' beside its mean over the channel, k = mean(w normal)
    and q = mean(dY * xhat) = r mean over parts(k / (s d) + off off'):
    dX = slope (w / d - q r normal / s + (off' - q r off)).
    """
    (channels, n), (rows, length) = size_of(s), size_of(w)
    count = rows * length // channels
    column, each = (channels, 1), (channels, n)
    minus_k = e.f32(e.reshape(correlation(e, w, normal), each))
    _, r, off = moments_of_parts(e, means, s)
    d_mean = e.ReduceMean(d_means, e.ints(1), keepdims=1, shape=column)
    d_off = e.Sub(d_means, d_mean, shape=each)
    products = e.Sub(e.Div(minus_k, e.Mul(s, d)), e.Mul(off, d_off))
    minus_q = e.Mul(e.ReduceMean(products, e.ints(1), keepdims=1, shape=column), r)
    slope = e.reshape(slope_of(e, scale, e.reshape(r, (channels,))), column)
    along = e.Mul(minus_q, e.Mul(slope, r))
    b, c = e.Div(along, s, shape=each), along_rows(e, slope, d_off, along, off)
    a = e.Div(slope, d, shape=each)
    dx = plus_rows(e, over_rows(e, normal, b, c), e.reshape(a, (rows, 1)), w)
    d_scale, d_bias = (e.Mul(v, e.like(number, v)) for v, number in ((minus_q, -count), (d_mean, count)))
    return dx, e.reshape(d_scale, (channels,)), e.reshape(d_bias, (channels,))


def _frozen_gradient(
    e: Emitter, op: Operator, x: Value, scale: Value, mean: Value, var: Value, dy: Value
) -> Sequence[Any]:
    """On a GPU place, with statistics that are read: dX = scale * r * dY; the mean of dy * (x - mean) as of two
    standardised rows."""
    r = inverse_root(e, op, var)
    dx = d_scale = d_bias = None
    scaled, shifts = _wanted_sums(e, op)
    if e.wants(0):
        dx = e.Mul(dy, per_channel(e, e.cast(slope_of(e, scale, r), dy.dtype), len(size_of(x))))
    if scaled or shifts:
        w, d_mean, t = standardised(e, dy, LEAST_VARIANCE)
        count = e.like(size_of(w)[1], t)
        d_bias = e.Mul(d_mean, count)
        if scaled:
            normal, x_mean, x_t = standardised(e, x, LEAST_VARIANCE)
            apart = e.Mul(d_mean, e.Sub(x_mean, mean))
            together = e.Sub(apart, e.Div(e.f32(correlation(e, w, normal)), e.Mul(t, x_t)))
            d_scale = e.Mul(e.Mul(together, r), count)
    return [dx, d_scale, d_bias, *_of_statistics(e, op, scale, var, d_scale, d_bias)]


@for_test("BatchNormalization")
def batch_normalization_for_test(op: Operator) -> None:
    """Use the running statistics, and leave them as they are. Before opset 14 one trains that has five outputs."""
    if not op.attrs.get("training_mode", 0) and len(op.outputs) <= 3:
        return
    if "training_mode" in op.attrs:
        op.attrs["training_mode"] = 0
    op.metadata.pop(SYNCHRONIZED, None)
    for slot, state in ((4, op.input(4)), (3, op.input(3)), (2, op.input(4)), (1, op.input(3))):
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
    sizes = static(read.shape[axis if axis >= 0 else len(read.shape) + axis :])
    if sizes is None:
        return None
    largest = math.sqrt(prod(sizes))
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
    factor = scale / np.sqrt(variance + epsilon_of(op))
    ends = np.stack([(data[0] - mean) * factor + bias, (data[1] - mean) * factor + bias])
    return (float(ends.min()), float(ends.max())) if np.isfinite(ends).all() and ends.size else None
