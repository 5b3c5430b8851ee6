"""Statistics over the batches of all ranks, for a BatchNormalization that is synchronised (torch's SyncBatchNorm).

They are those of the whole batch, whatever share of it a rank has. The running variance takes the variance over all N
elements, as that of one rank does here and in PaddlePaddle; torch's takes that over N - 1.
"""

from __future__ import annotations

from math import prod

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.metadata import BY_RANKS, SYNCHRONIZED
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ops.channel_rows import by_image
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.gpu_kernels import along_even_rows
from amp_transpiler.ops.norm_parts import (
    LEAST_VARIANCE,
    correlation,
    epsilon_of,
    inverse_root,
    per_channel,
    shifted,
    standardised,
    statistics,
)
from amp_transpiler.ops.training.all_reduce import ALL_REDUCE
from amp_transpiler.ops.training.exchange import exchanged


def is_synchronized(op: Operator) -> bool:
    """Whether ranks exchange the statistics of this operator, or sums of its gradient."""
    return op.metadata.get(SYNCHRONIZED) == BY_RANKS


def normalised_over_ranks(e: Emitter, op: Operator, x: Value, scale: Value, bias: Value) -> tuple[Value, Value, Value]:
    """The output in training mode, and the mean and variance that it is normalised by."""
    mean, var, _ = _statistics_of_all(e, op, x)
    if e.at.fused:
        return shifted(e, x, e.Mul(scale, inverse_root(e, op, var)), bias, mean), mean, var
    x = e.f32(x)
    y = e.BatchNormalization(x, scale, bias, mean, var, epsilon=epsilon_of(op), shape=x.shape)
    return y, mean, var


def gradient_over_ranks(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> list[Value]:
    """dX, dscale and dB. The latter two are sums over this rank's elements, as other gradients of parameters; through
    mean and variance dX depends on those of all ranks: with S and B the sums over all, of n elements in all, it is
    scale * r * (dy - B / n - xhat * S / n)."""
    mean, var, count = _statistics_of_all(e, op, x)
    r = inverse_root(e, op, var)
    factor = e.Mul(scale, r)
    if e.at.fused:
        return _gradient_by_rows(e, op, x, factor, dy, (mean, r, count))
    x, dy = e.f32(x), e.f32(dy)
    rank = len(size_of(x))
    axes = [0, *range(2, rank)]
    normal = e.Mul(e.Sub(x, per_channel(e, mean, rank)), per_channel(e, r, rank))
    sums = (e.reduce_sum(v, axes) for v in (e.Mul(dy, normal), dy))
    d_scale, d_bias = (e.reshape(v, size_of(mean)) for v in sums)
    along, shift = (per_channel(e, e.Div(v, count), rank) for v in _sums_of_all(e, d_scale, d_bias))
    dx = e.Mul(e.Sub(e.Sub(dy, e.Mul(normal, along)), shift), per_channel(e, factor, rank))
    return [dx, d_scale, d_bias]


def _gradient_by_rows(
    e: Emitter, op: Operator, x: Value, factor: Value, dy: Value, of_all: tuple[Value, Value, Value]
) -> list[Value]:
    """On a GPU place, of rows that are standardised by this rank's statistics: dy = w / t + d_mean, and
    xhat = normal * (r / own_r) + (own_mean - mean) * r."""
    mean, r, count = of_all
    normal, own_mean, own_r = standardised(e, x, epsilon_of(op))
    w, d_mean, t = standardised(e, dy, LEAST_VARIANCE)
    channels, width = size_of(w)
    spread, apart = e.Div(r, own_r), e.Mul(e.Sub(own_mean, mean), r)
    d_bias = e.Mul(d_mean, e.like(width, d_mean))
    minus_k = e.f32(correlation(e, w, normal))
    together = e.Div(e.Mul(spread, minus_k), t)  # minus the mean of (dy - d_mean) (xhat - apart)
    d_scale = e.Mul(e.Sub(e.Mul(d_mean, apart), together), e.like(width, d_mean))
    along, shift = (e.Div(v, count) for v in _sums_of_all(e, d_scale, d_bias))
    a, b = e.Div(factor, t), e.Neg(e.Mul(e.Mul(factor, spread), along))
    c = e.Mul(factor, e.Sub(e.Sub(d_mean, shift), e.Mul(apart, along)))
    a, b, c = (e.reshape(v, (channels, 1)) for v in (a, b, c))
    dx = e.Add(along_even_rows(e, a, w, b, normal), e.cast(c, w.dtype))
    return [by_image(e, Value(dx.name, dx.dtype, size_of(w)), size_of(x)), d_scale, d_bias]


def _statistics_of_all(e: Emitter, op: Operator, x: Value) -> tuple[Value, Value, Value]:
    """Mean and (biased) variance over what all ranks have, vectors over channels, and the elements of a channel, of
    size 1. The gradient finds what the forward rule made.

    Sums in float64 travel: of squares less the squared mean nothing is lost there that fp32 has.
    """
    key = f"{x.name} over ranks"
    if key not in e.shared:
        channels = size_of(x)[1]
        if e.at.fused:
            _, mean, r = standardised(e, x, epsilon_of(op))
            one = e.like(1, r)
            var = e.Sub(e.Div(e.Div(one, r), r), e.like(epsilon_of(op), r))
        else:
            both = statistics(e, e.f32(x), [0, *range(2, len(size_of(x)))])[::2]
            mean, var = (e.reshape(v, (channels,)) for v in both)
        own = e.const(np.full(1, prod(size_of(x)) // channels), "float64")
        wide, spread = (e.cast(v, "float64") for v in (mean, var))
        squares = e.Add(spread, e.Mul(wide, wide))
        row = e.Concat(own, e.Mul(wide, own), e.Mul(squares, own), axis=0, shape=(1 + 2 * channels,))
        (total,) = exchanged(e, ALL_REDUCE, [row], op="sum")
        number, first, second = _taken_apart(e, total, [1, channels, channels])
        center = e.Div(first, number)
        around = e.Sub(e.Div(second, number), e.Mul(center, center))
        zero = e.const(np.zeros(1), "float64")
        around = e.Where(e.Less(around, zero), zero, around)
        e.shared[key] = tuple(e.cast(v, mean.dtype) for v in (center, around, number))
    mean, var, count = e.shared[key]
    return mean, var, count


def _sums_of_all(e: Emitter, *sums: Value) -> list[Value]:
    """The sums over the ranks of vectors over channels."""
    sizes = [size_of(v)[0] for v in sums]
    row = e.Concat(*sums, axis=0, shape=(sum(sizes),))
    (total,) = exchanged(e, ALL_REDUCE, [row], op="sum")
    return _taken_apart(e, total, sizes)


def _taken_apart(e: Emitter, row: Value, sizes: list[int]) -> list[Value]:
    parts = e.op("Split", row, e.ints(*sizes), outputs=len(sizes), axis=0)
    return [Value(part.name, part.dtype, (size,)) for part, size in zip(parts, sizes, strict=True)]
