"""DeformConv: a convolution whose taps lie between elements, each where an offset moves it, and each weighed by a mask.

The gradient samples x as the convolution does. It is that of a product of weights with columns of samples, passed on to
the mask, and through the places of the samples, as in :mod:`~amp_transpiler.ops.grid`, to x and the offsets. Where a
place has no kernel, that product is the convolution. Layout of offsets and masks:
https://onnx.ai/onnx/operators/onnx__DeformConv.html.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, traits
from amp_transpiler.ops.common import Grads, size_of
from amp_transpiler.ops.grid import Tap, between, flat_indices, product_of, sampled, to_elements, to_places
from amp_transpiler.ops.place_bodies import Asked, body


def _flat_images_alone(op: Operator) -> str:
    x = op.input(0)
    return "" if x is None or x.shape is None or len(x.shape) == 4 else "images alone, [N, C, H, W], have a gradient"


@gradient("DeformConv", "x0 x1 x2 x3 x4 dy0", inputs=[0, 1, 2, 3, 4], refuse=_flat_images_alone)
def deform_conv(
    e: Emitter, op: Operator, x: Value, w: Value, offset: Value, b: Value | None, mask: Value | None, dy: Value
) -> Grads:
    """Points are ordered by image, offset group, tap of the kernel and place of the result."""
    batch, channels, height, width = size_of(x)
    filters, _, *kernel = size_of(w)
    down, across = size_of(dy)[2:]
    groups, moved = _groups(op)
    taps_of_kernel, places = math.prod(kernel), down * across
    images, some = batch * moved, channels // moved
    points = images * taps_of_kernel * places

    taps, flat, read, samples = _samples(e, op, x, offset, kernel, (down, across))
    share = None if mask is None else e.reshape(mask, (points, 1))

    by_group = (groups, filters // groups, channels // groups * taps_of_kernel)
    d_result = e.reshape(dy, (batch, groups, by_group[1], places))
    turned = e.transpose(e.reshape(w, by_group), (0, 2, 1))
    rows = e.reshape(e.MatMul(turned, d_result), (images, some, taps_of_kernel * places))
    rows = e.reshape(e.transpose(rows, (0, 2, 1)), (points, some))
    d_samples = rows if share is None else e.Mul(rows, share)

    grads: list[Value | None] = [None] * 5
    if e.wants(0):
        dx = to_elements(e, d_samples, taps, flat, (images, some, height, width))
        grads[0] = e.reshape(dx, size_of(x))
    if e.wants(1):
        columns = _columns(e, samples, share, (batch, groups, by_group[2], places), images)
        columns = e.reshape(e.transpose(columns, (1, 0, 3, 2)), (groups, batch * places, by_group[2]))
        d_rows = e.reshape(e.transpose(d_result, (1, 2, 0, 3)), (*by_group[:2], batch * places))
        grads[1] = e.reshape(e.MatMul(d_rows, columns), size_of(w))
    if e.wants(2):
        slopes = [e.reshape(s, (images * taps_of_kernel, 1, places)) for s in to_places(e, d_samples, taps, read, 2)]
        grads[2] = e.reshape(e.Concat(*slopes, axis=1), size_of(offset))
    if e.wants(3):
        grads[3] = e.reduce_sum(dy, [0, 2, 3])
    if mask is not None and e.wants(4):
        grads[4] = e.reshape(e.reduce_sum(e.Mul(rows, samples), [1]), size_of(mask))
    return grads


@body("DeformConv")
def _of_samples(
    e: Emitter, op: Asked, x: Value, w: Value, offset: Value, b: Value | None = None, mask: Value | None = None
) -> Sequence[Value] | None:
    """A product of the weights with columns of samples, in fp32."""
    if None in (x.shape, w.shape, offset.shape) or len(size_of(x)) != 4:
        return None
    batch, (filters, of_group, *kernel), result = size_of(x)[0], size_of(w), size_of(offset)[2:]
    groups, moved = _groups(op)
    taps_of_kernel, places = math.prod(kernel), math.prod(result)
    samples = _samples(e, op, e.f32(x), e.f32(offset), kernel, (result[0], result[1])).found
    share = None if mask is None else e.reshape(e.f32(mask), (batch * moved * taps_of_kernel * places, 1))
    shape = batch, groups, of_group * taps_of_kernel, places
    columns = _columns(e, samples, share, shape, batch * moved)
    y = e.MatMul(e.reshape(e.f32(w), (groups, filters // groups, shape[2])), columns)
    y = e.reshape(y, (batch, filters, *result))
    return [e.cast(y if b is None else e.Add(y, e.reshape(e.f32(b), (filters, 1, 1))), x.dtype)]


class _Samples(NamedTuple):
    """What x has where the offsets say: taps around each point, rows of them in x, what stands there, the samples."""

    taps: list[tuple[Tap, ...]]
    flat: list[Value]
    read: list[Value]
    found: Value


def _samples(
    e: Emitter, op: Operator | Asked, x: Value, offset: Value, kernel: Sequence[int], result: tuple[int, int]
) -> _Samples:
    """The samples [points, channels of an offset group]."""
    batch, channels, *image = size_of(x)
    _, moved = _groups(op)
    images, taps_of_kernel, places = batch * moved, math.prod(kernel), math.prod(result)
    points = images * taps_of_kernel * places
    moves = e.transpose(e.reshape(offset, (images * taps_of_kernel, 2, places)), (1, 0, 2))
    axes = []
    for axis, (unmoved, size) in enumerate(zip(_places(op, kernel, result), image, strict=True)):
        move = e.Gather(moves, e.const(axis, "int64"), axis=0, shape=(images * taps_of_kernel, places))
        move = e.reshape(move, (images, taps_of_kernel * places))
        place = e.reshape(e.Add(move, e.const(unmoved.reshape(1, -1), offset.dtype)), (points,))
        axes.append(between(e, place, e.like(1, place), size))
    taps = list(itertools.product(*axes))
    flat = flat_indices(e, taps, images, image)
    read = sampled(e, e.reshape(x, (images, channels // moved, *image)), flat)
    weights = [e.reshape(product_of(e, [t.weight for t in tap]), (points, 1)) for tap in taps]
    return _Samples(taps, flat, read, e.Sum(*map(e.Mul, weights, read)))


def _columns(e: Emitter, samples: Value, share: Value | None, shape: tuple[int, int, int, int], images: int) -> Value:
    """Samples, each times its share, as columns [batch, groups, channels and taps of a group, places]."""
    columns = samples if share is None else e.Mul(samples, share)
    points, some = size_of(samples)
    return e.reshape(e.transpose(e.reshape(columns, (images, points // images, some)), (0, 2, 1)), shape)


def _groups(op: Operator | Asked) -> tuple[int, int]:
    """Into how many groups the channels are split for the weights, and for the offsets."""
    return int(op.attrs.get("group", 1)), int(op.attrs.get("offset_group", 1))


def _places(op: Operator | Asked, kernel: Sequence[int], result: tuple[int, int]) -> list[np.ndarray]:
    """Where each tap of the kernel lies for each place of the result without offsets, by axis: [taps, places]."""
    strides, dilations = op.attrs.get("strides", [1, 1]), op.attrs.get("dilations", [1, 1])
    pads = op.attrs.get("pads", [0] * 4)
    along = [
        np.arange(kernel[i])[:, None] * dilations[i] + np.arange(result[i])[None] * strides[i] - pads[i]
        for i in range(2)
    ]
    whole = (*kernel, *result)
    rows = np.broadcast_to(along[0][:, None, :, None], whole)
    columns = np.broadcast_to(along[1][None, :, None, :], whole)
    return [rows.reshape(math.prod(kernel), -1), columns.reshape(math.prod(kernel), -1)]


traits("DeformConv")
