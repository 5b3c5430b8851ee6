"""Norms without statistics of their own: Lp, local response, root mean square, mean and variance.

LpNormalization, LRN and SimplifiedLayerNormalization, onnxruntime's RMSNormalization of any opset, have
gradients; the others are decomposed. Definitions: https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.intervals import Interval, Ranges
from amp_transpiler.ir.nodes import Operator, Types, Variable
from amp_transpiler.ir.opdef import gradient, lowering_rule, range_rule, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import keep_fp32
from amp_transpiler.ops.common import Grads, size_of, summed_to
from amp_transpiler.ops.gpu_kernels import along_rows, column_product, product
from amp_transpiler.ops.norm import normalised_range
from amp_transpiler.ops.norm_parts import epsilon_of, mixes_types, one_behind
from amp_transpiler.ops.place_bodies import Asked, body


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


class _Neighbours(NamedTuple):
    """Of an LRN, y = x * s**-beta with s = bias + alpha / size * (sum of x² over ``size`` neighbouring channels)."""

    band: np.ndarray[Any, Any]
    flat: tuple[int, int, int]
    share: Value
    s: Value
    beta: float

    @classmethod
    def of(cls, e: Emitter, attrs: Mapping[str, Any], x: Value) -> _Neighbours:
        """The root of alpha / size goes into x, whose square would not fit 16 bit."""
        batch, channels, *sizes = size_of(x)
        size, alpha = int(attrs["size"]), float(attrs.get("alpha", 1e-4))
        band, flat = _band(channels, (size - 1) // 2, size // 2), (batch, channels, prod(sizes))
        share = e.Mul(e.reshape(x, flat), e.like(math.sqrt(alpha / size), x))
        s = e.Add(e.MatMul(e.const(band, x.dtype), e.Mul(share, share)), e.like(float(attrs.get("bias", 1.0)), x))
        return cls(band, flat, share, s, float(attrs.get("beta", 0.75)))


@body("LRN")
def _lrn(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    """In fp32."""
    if x.shape is None:
        return None
    wide = e.f32(x)
    near = _Neighbours.of(e, op.attrs, wide)
    scaled = e.Mul(e.reshape(wide, near.flat), e.Pow(near.s, e.like(-near.beta, wide)))
    return [e.cast(e.reshape(scaled, size_of(x)), x.dtype)]


@gradient("LRN", "x0 dy0", native=True)
def lrn_gradient(e: Emitter, op: Operator, x: Value, dy: Value) -> Sequence[Any]:
    """dX = dy * s**-beta - 2 alpha beta / size * x * t, with t the sum of dy * x * s**(-beta - 1) over the channels
    whose neighbour this one is."""
    near = _Neighbours.of(e, op.attrs, x)
    scaled = e.Mul(e.reshape(dy, near.flat), e.Pow(near.s, e.like(-near.beta, x)))
    around = e.MatMul(e.const(near.band.T, x.dtype), e.Mul(scaled, e.Div(near.share, near.s)))
    dx = e.Sub(scaled, e.Mul(e.Mul(near.share, around), e.like(2 * near.beta, x)))
    return [e.reshape(dx, size_of(x))]


def _band(size: int, before: int, after: int) -> np.ndarray[Any, Any]:
    """[size, size]: 1 where the column is at most ``before`` below the row or ``after`` above it."""
    distance = np.arange(size)[None, :] - np.arange(size)[:, None]
    return ((distance >= -before) & (distance <= after)).astype(np.float64)


@decomposition("RMSNormalization")
def rms_normalization(d: Parts, op: Operator, x: Variable, scale: Variable) -> list[Variable]:
    """Y = x / sqrt(mean(x²) + epsilon) * scale, the quotient in the type ``stash_type`` (fp32)."""
    normal, _ = _along_last_axes(d, op, x)
    return [d.Mul(d.cast(normal, x.dtype), d.cast(scale, x.dtype))]


def rms(d: Parts, x: Variable, axes: list[int], epsilon: float) -> tuple[Variable, Variable]:
    """x over the root of its mean square, and the inverse of that root, in fp32."""
    with d.fp32(Kind.STATISTICS):
        wide = d.cast(x, "float32") if x.dtype != "float64" else x
        square = d.Add(d.ReduceMean(d.Mul(wide, wide), axes), epsilon)
        inverse = d.Reciprocal(d.Sqrt(square))
        return d.Mul(wide, inverse), inverse


def _along_last_axes(d: Parts, op: Operator, x: Variable) -> tuple[Variable, Variable]:
    axis = d.whole("axis", -1)
    return rms(d, x, list(range(axis, 0) if axis < 0 else range(axis, d.rank(x))), epsilon_of(op))


@decomposition("SimplifiedLayerNormalization", f"{DOMAIN}::SimplifiedLayerNormalization")
def simplified_layer_normalization(d: Parts, op: Operator, x: Variable, scale: Variable) -> list[Variable]:
    """RMSNormalization by its older name; the inverse root is its second output."""
    normal, inverse = _along_last_axes(d, op, x)
    return [d.Mul(d.cast(normal, x.dtype), scale), inverse]


def _rms_types(op: Operator) -> Types:
    """Y is like X; the inverse root is fp32, of size 1 along the normalised axes."""
    data = op.inputs[0]
    assert data is not None
    shape, axis = data.shape, int(op.attrs.get("axis", -1))
    return [(data.dtype, shape), ("float32", shape and one_behind(shape, axis))]


def _needs_rule(op: Operator) -> bool:
    return op.output(1) is not None or mixes_types(op)


@lowering_rule("SimplifiedLayerNormalization", native=True, when=_needs_rule, infer=_rms_types)
def simplified_layer_normalization_rule(e: Emitter, op: Operator, x: Value, scale: Value) -> Sequence[Value]:
    """The operator itself, with a scale of the type of X."""
    outputs = max(i + 1 for i, v in enumerate(op.outputs) if v is not None)
    shape, axis, epsilon = size_of(x), int(op.attrs.get("axis", -1)), epsilon_of(op)
    rows, scale = one_behind(shape, axis), e.cast(scale, x.dtype)
    if outputs > 1 and not _gives_roots(e):
        normal, r = _over_root(e, e.reshape(x, (prod(rows), prod(shape[axis:]))), epsilon)
        return [e.Mul(e.reshape(normal, shape), scale, shape=shape), e.reshape(r, rows)]
    return _kernel(e, x, scale, axis, epsilon, outputs)


def _scaled_otherwise(op: Operator) -> str:
    """Why an operator is taken apart to be trained; "" where its scale has a number for each of those in a row."""
    x, scale = (None if v is None else static(v.shape) for v in op.inputs[:2])
    axis = int(op.attrs.get("axis", -1))
    odd = x is not None and scale is not None and prod(scale) != prod(x[axis:])
    return "its scale is not of the axes that it normalises over" if odd else ""


@gradient("SimplifiedLayerNormalization", "x0 x1 dy0", inputs=(0, 1), native=True, refuse=_scaled_otherwise)
def simplified_layer_normalization_gradient(e: Emitter, op: Operator, x: Value, scale: Value, dy: Value) -> Grads:
    """With r = 1 / sqrt(mean(x²) + epsilon) and n = x r: dscale = sum(dy n), dx = r (d - n mean(d n)), d = dy scale."""
    shape, axis = size_of(x), int(op.attrs.get("axis", -1))
    matrix = (prod(shape[:axis]), width := prod(shape[axis:]))
    normal, r = _over_root(e, e.reshape(x, matrix), epsilon_of(op))
    rows, factor = e.reshape(dy, matrix), e.reshape(e.cast(scale, x.dtype), (width,))
    weighed, dx = e.Mul(rows, normal), None
    if e.wants(0):
        along = product(e, weighed, e.reshape(factor, (width, 1)), alpha=-1 / width)
        dx = e.reshape(along_rows(e, r, e.Mul(rows, factor), column_product(e, along, r), normal), shape)
    return [dx, summed_to(e, e.reshape(weighed, shape), size_of(scale), shape) if e.wants(1) else None]


def _gives_roots(e: Emitter) -> bool:
    """Whether a place has the operator with its second result: that of WebGPU's kernel is wrong (measured)."""
    return e.at.host or e.at.fused


def _over_root(e: Emitter, rows: Value, epsilon: float) -> tuple[Value, Value]:
    """Each row of a matrix over the root of its mean square, in its type, and the inverse of the root, fp32."""
    shape = size_of(rows)
    if not _gives_roots(e) or rows.dtype == "float64":
        wide = e.f32(rows)
        mean = e.ReduceMean(e.Mul(wide, wide), e.ints(1), keepdims=1)
        r = e.Reciprocal(e.Sqrt(e.Add(mean, e.like(epsilon, mean))))
        return e.cast(e.op("Mul", wide, r, shape=shape), rows.dtype), Value(r.name, r.dtype, (shape[0], 1))
    normal, r = _kernel(e, rows, e.const(np.ones(shape[1]), rows.dtype), -1, epsilon, 2)
    return normal, r


def _kernel(e: Emitter, x: Value, scale: Value, axis: int, epsilon: float, outputs: int) -> list[Value]:
    """The results of the operator, of which ONNX's inference knows nothing."""
    shape, kinds = size_of(x), (x.dtype, "float32")[:outputs]
    attrs: dict[str, Any] = {"axis": axis, "epsilon": epsilon, "shape": shape}
    normal, *roots = e.op("SimplifiedLayerNormalization", x, scale, outputs=outputs, dtype=kinds, **attrs)
    roots = [Value(r.name, r.dtype, one_behind(shape, axis)) for r in roots]
    e.foreign += roots
    return [normal, *roots]


@decomposition("MeanVarianceNormalization")
def mean_variance_normalization(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """(x - mean) / (standard deviation + 1e-9); the variance as the mean of squared deviations, which cannot cancel."""
    axes = [int(axis) for axis in op.attrs.get("axes", [0, 2, 3])]
    deviation = d.Sub(x, d.ReduceMean(x, axes))
    root = d.Sqrt(d.ReduceMean(d.Mul(deviation, deviation), axes))
    return [d.Div(deviation, d.Add(root, 1e-9))]


traits("LRN", "MeanVarianceNormalization", "RMSNormalization")
traits("MeanVarianceNormalization", centres=True)
traits("SimplifiedLayerNormalization", weights=(1,))
traits("LpNormalization", over="axis", overflows_inside=Kind.SQUARES_INSIDE)
keep_fp32("RMSNormalization", inputs=(1,))


@range_rule("RMSNormalization")
def _rms_range(op: Operator, ranges: Ranges) -> Interval | None:
    return normalised_range(op, ranges, int(op.attrs.get("axis", -1)))
