"""Bodies for places whose kernels fail (see :mod:`.place_bodies`): norms of numbers that lie far from zero.

Such a kernel takes the square of the mean from the mean of the squares. Of numbers that hardly differ beside their size
that leaves nothing of their variance, or less than nothing, and the root is no number. Less one of them they have the
same variance and are near zero; those that are all alike are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.place_bodies import Asked, body


@body("LayerNormalization")
def _layer_norm(e: Emitter, op: Asked, x: Value, *affine: Value | None) -> Sequence[Value] | None:
    """The kernel's, of each row less its first number."""
    axis = int(op.attrs.get("axis", -1))
    if axis >= 0 and x.shape is None:
        return None
    wide = e.f32(x)
    first, near = _near_zero(e, wide, range(axis, 0) if axis < 0 else range(axis, len(x.shape or ())))
    weights = [None if v is None else e.f32(v) for v in affine]
    normal, *vectors = e.op("LayerNormalization", near, *weights, outputs=len(op.results), dtype="float32", **op.attrs)
    means = [e.Add(mean, first) for mean in vectors[:1]]
    return [e.cast(normal, x.dtype), *means, *vectors[1:]]


@body("com.microsoft::SkipLayerNormalization")
def _skip_layer_norm(
    e: Emitter, op: Asked, x: Value, skip: Value, scale: Value, shift: Value | None = None, bias: Value | None = None
) -> Sequence[Value] | None:
    """LayerNormalization of the sum, which is the second result where there are two."""
    if len(op.results) > 2:
        return None
    total = e.Add(e.f32(x), e.f32(skip), shape=x.shape)
    if bias is not None:
        total = e.Add(total, e.f32(bias), shape=x.shape)
    weights = [None if v is None else e.f32(v) for v in (scale, shift)]
    normal = e.LayerNormalization(total, *weights, epsilon=float(op.attrs.get("epsilon", 1e-12)))
    return [e.cast(value, x.dtype) for value in (normal, total)[: len(op.results)]]


@body("InstanceNormalization")
def _instance_norm(e: Emitter, op: Asked, x: Value, scale: Value, bias: Value) -> Sequence[Value] | None:
    """The kernel's, of each channel less its first number."""
    if x.shape is None:
        return None
    _, near = _near_zero(e, e.f32(x), range(2, len(x.shape)))
    return [e.cast(e.InstanceNormalization(near, e.f32(scale), e.f32(bias), **op.attrs), x.dtype)]


@body("BatchNormalization")
def _batch_norm(
    e: Emitter, op: Asked, x: Value, scale: Value, shift: Value, mean: Value, variance: Value
) -> Sequence[Value] | None:
    """By the statistics that are given, of rows."""
    if x.shape is None or len(x.shape) != 2 or op.attrs.get("training_mode", 0):
        return None
    wide, scale, shift, mean, variance = map(e.f32, (x, scale, shift, mean, variance))
    deviation = e.Sqrt(e.Add(variance, e.like(float(op.attrs.get("epsilon", 1e-5)), variance)))
    return [e.cast(e.Add(e.Mul(e.Sub(wide, mean), e.Div(scale, deviation)), shift), x.dtype)]


def _near_zero(e: Emitter, x: Value, axes: Sequence[int]) -> tuple[Value, Value]:
    """The first number along these axes, and X less that."""
    first = e.Slice(x, e.ints(*[0] * len(axes)), e.ints(*[1] * len(axes)), e.ints(*axes))
    return first, e.Sub(x, first, shape=x.shape)
