"""Norms without statistics of their own: Lp, local response, root mean square, mean and variance.

LpNormalization and LRN have gradients; the others are decomposed. Definitions: https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient, range_rule, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import keep_fp32
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.gpu_kernels import along_rows
from amp_transpiler.ops.norm import normalised_range


@gradient("LpNormalization", "x0 y0 dy0", native=True)
def lp_normalization_gradient(e: Emitter, op: Operator, x: Value, y: Value, dy: Value) -> Sequence[Any]:
    """y = x / |x| along an axis. For p = 2, dX = (dy - y * sum(dy * y)) / |x|; for p = 1 the sign of x in place of the
    last y. Where |x| is 0, y is 0 by definition, and so is dX."""
    axis = int(op.attrs.get("axis", -1)) % len(size_of(x))
    at, shape = e.ints(axis), tuple(1 if i == axis else d for i, d in enumerate(size_of(x)))

    def small(reduction: str, value: Value) -> Value:
        return e.f32(e.op(reduction, value, at, keepdims=1, shape=shape))

    dot, first = small("ReduceSum", e.Mul(dy, y)), int(op.attrs.get("p", 2)) == 1
    if x.dtype in HALF:  # a norm may not fit where its mean does, and y tells the rest
        above, below = (small("ReduceMean", e.Abs(v)) for v in (x, y))
        size = e.Div(above, e.Where(e.Equal(below, e.like(0, below)), e.like(1, below), below))
    else:
        size = small("ReduceSum", e.Abs(x)) if first else e.Sqrt(small("ReduceSum", e.Mul(x, x)))
    nothing = e.Equal(size, e.like(0, size))
    inverse = e.Where(nothing, e.like(0, size), e.Reciprocal(e.Where(nothing, e.like(1, size), size)))
    direction = e.Sign(x) if first else y
    if axis == len(shape) - 1:
        return [along_rows(e, inverse, dy, e.Neg(e.Mul(dot, inverse)), direction)]
    return [e.Mul(e.Sub(dy, e.Mul(direction, e.cast(dot, x.dtype))), e.cast(inverse, x.dtype))]


@gradient("LRN", "x0 dy0", native=True)
def lrn_gradient(e: Emitter, op: Operator, x: Value, dy: Value) -> Sequence[Any]:
    """y = x * s**-beta with s = bias + alpha / size * (sum of x² over ``size`` neighbouring channels).

    dX = dy * s**-beta - 2 alpha beta / size * x * t, with t the sum of dy * x * s**(-beta - 1) over the channels whose
    neighbour this one is. The root of alpha / size goes into x, whose square would not fit 16 bit.
    """
    assert x.shape is not None
    size, alpha = int(op.attrs["size"]), float(op.attrs.get("alpha", 1e-4))
    beta, bias = float(op.attrs.get("beta", 0.75)), float(op.attrs.get("bias", 1.0))
    neighbours = _band(x.shape[1], (size - 1) // 2, size // 2)
    flat = (x.shape[0], x.shape[1], prod(x.shape[2:]))
    dy3 = e.reshape(dy, flat)
    share = e.Mul(e.reshape(x, flat), e.like(math.sqrt(alpha / size), x))
    s = e.Add(e.MatMul(e.const(neighbours, x.dtype), e.Mul(share, share)), e.like(bias, x))
    scaled = e.Mul(dy3, e.Pow(s, e.like(-beta, x)))
    around = e.MatMul(e.const(neighbours.T, x.dtype), e.Mul(scaled, e.Div(share, s)))
    dx = e.Sub(scaled, e.Mul(e.Mul(share, around), e.like(2 * beta, x)))
    return [e.reshape(dx, x.shape)]


def _band(size: int, before: int, after: int) -> np.ndarray[Any, Any]:
    """[size, size]: 1 where the column is at most ``before`` below the row or ``after`` above it."""
    distance = np.arange(size)[None, :] - np.arange(size)[:, None]
    return ((distance >= -before) & (distance <= after)).astype(np.float64)


@decomposition("RMSNormalization")
def rms_normalization(d: Parts, op: Operator, x: Variable, scale: Variable) -> list[Variable]:
    """Y = x / sqrt(mean(x²) + epsilon) * scale, the quotient in the type ``stash_type`` (fp32)."""
    axis = d.whole("axis", -1)
    axes = list(range(axis, 0)) if axis < 0 else list(range(axis, d.rank(x)))
    normal = rms(d, x, axes, d.number("epsilon", 1e-5))[0]
    return [d.Mul(d.cast(normal, x.dtype), d.cast(scale, x.dtype))]


def rms(d: Parts, x: Variable, axes: list[int], epsilon: float) -> tuple[Variable, Variable]:
    """x over the root of its mean square, and the inverse of that root, in fp32."""
    with d.fp32(Kind.STATISTICS):
        wide = d.cast(x, "float32") if x.dtype != "float64" else x
        square = d.Add(d.ReduceMean(d.Mul(wide, wide), axes), epsilon)
        inverse = d.Reciprocal(d.Sqrt(square))
        return d.Mul(wide, inverse), inverse


@decomposition("MeanVarianceNormalization")
def mean_variance_normalization(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """(x - mean) / (standard deviation + 1e-9); the variance as the mean of squared deviations, which cannot cancel."""
    axes = [int(axis) for axis in op.attrs.get("axes", [0, 2, 3])]
    deviation = d.Sub(x, d.ReduceMean(x, axes))
    root = d.Sqrt(d.ReduceMean(d.Mul(deviation, deviation), axes))
    return [d.Div(deviation, d.Add(root, 1e-9))]


traits("LRN", "MeanVarianceNormalization", "RMSNormalization")
traits("LpNormalization", over="axis", overflows_inside=Kind.SQUARES_INSIDE)
keep_fp32("RMSNormalization", inputs=(1,))


@range_rule("RMSNormalization")
def _rms_range(op: Operator, ranges: Ranges) -> Interval | None:
    return normalised_range(op, ranges, int(op.attrs.get("axis", -1)))
