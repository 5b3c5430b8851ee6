"""BatchNormalization: its gradient, and a lowering rule where a place needs one.

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
from amp_transpiler.ir.nodes import Operator
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
