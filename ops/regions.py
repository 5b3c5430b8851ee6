"""RoiAlign and MaxRoiPool: what the bins of regions hold.

In RoiAlign each bin is the mean of samples, each of them made of the four elements around its place. Samples of a
region lie on a grid, so that a bin is a sum over rows and columns: ``y = rows . x . columns^T`` with what each row and
each column of x has of the bin. The gradient is two products with the same shares, and adds up whatever regions
overlap. Regions have no gradient, as in torchvision: they are what a detector proposes, cut and sorted. Where a place
has no kernel the bins are made by these two products. Places and borders:
https://onnx.ai/onnx/operators/onnx__RoiAlign.html and ``roialign.cc`` of onnxruntime.

In MaxRoiPool each bin is the largest of its elements, whose edges are whole; the first of equal ones, row by row, has
the gradient. Edges: ``roi_pool.cc`` of onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, traits
from amp_transpiler.ops.common import Grads, comparable, size_of, sliced
from amp_transpiler.ops.place_bodies import Asked, body, in_32_bits
from amp_transpiler.ops.row_sums import added_rows

#: Samples that lie nearer to each other than this lie so far apart: an empty region has them all at one place.
_NEAREST = 1e-6


def _only_means(op: Operator | Asked) -> str:
    mode = op.attrs.get("mode", "avg")
    return "" if mode == "avg" else f"its mode is '{mode}'; means alone ('avg') have a gradient"


@gradient("RoiAlign", "x0 x1 x2 dy0", inputs=[0], stops=[1], refuse=_only_means)
def roi_align(e: Emitter, op: Operator, x: Value, regions: Value, images: Value, dy: Value) -> Grads:
    """Products of the gradient, [regions, channels, bins down, bins across], with the shares of columns and rows."""
    batch, channels, height, width = size_of(x)
    number, _, down, across = size_of(dy)
    left, top, right, bottom = _ends(e, regions)
    columns = _shares(e, op.attrs, left, right, across, width)
    spread = e.MatMul(e.reshape(dy, (number, channels * down, across)), columns)
    spread = e.transpose(e.reshape(spread, (number, channels, down, width)), (0, 2, 1, 3))
    rows = e.transpose(_shares(e, op.attrs, top, bottom, down, height), (2, 0, 1))
    if batch > 1 or e.hangs(batch):
        own = e.reshape(_own(e, images, batch, dy.dtype), (batch, 1, number, 1))
        rows = e.Mul(e.reshape(rows, (1, height, number, down)), own)
    flat = e.reshape(spread, (number * down, channels * width))
    total = e.MatMul(e.reshape(rows, (batch * height, number * down)), flat)
    return [e.transpose(e.reshape(total, (batch, height, channels, width)), (0, 2, 1, 3))]


@body("RoiAlign")
def _by_shares(e: Emitter, op: Asked, x: Value, regions: Value, images: Value) -> Sequence[Value] | None:
    """Products of x with the shares of rows and columns, in fp32; the largest of samples have no form."""
    own_image = in_32_bits(e, images)
    if x.shape is None or regions.shape is None or own_image is None or _only_means(op):
        return None
    (batch, channels, height, width), number = x.shape, regions.shape[0]
    down, across = (int(op.attrs.get(f"output_{name}", 1)) for name in ("height", "width"))
    left, top, right, bottom = _ends(e, e.f32(regions))
    rows = _shares(e, op.attrs, top, bottom, down, height)
    own = e.transpose(_own(e, own_image, batch, "float32"), (1, 0))
    rows = e.Mul(e.reshape(rows, (number, down, 1, height)), e.reshape(own, (number, 1, batch, 1)))
    lines = e.reshape(e.transpose(e.f32(x), (0, 2, 1, 3)), (batch * height, channels * width))
    some = e.MatMul(e.reshape(rows, (number * down, batch * height)), lines)
    columns = e.transpose(_shares(e, op.attrs, left, right, across, width), (0, 2, 1))
    bins = e.MatMul(e.reshape(some, (number, down * channels, width)), columns)
    return [e.cast(e.transpose(e.reshape(bins, (number, down, channels, across)), (0, 2, 1, 3)), x.dtype)]


def _ends(e: Emitter, regions: Value) -> tuple[Value, ...]:
    """Left, top, right and bottom of regions [regions, 4], each [regions, 1, 1]."""
    number = size_of(regions)[0]
    return tuple(e.reshape(sliced(e, regions, 1, side, side + 1), (number, 1, 1)) for side in range(4))


def _own(e: Emitter, images: Value, batch: int, dtype: str) -> Value:
    """1 where a region, of a column, is of the image of a row, else 0: [batch, regions]."""
    numbers = e.const(np.arange(batch)[:, None], images.dtype)
    return e.cast(e.Equal(numbers, e.reshape(images, (1, size_of(images)[0]))), dtype)


def _shares(e: Emitter, attrs: Mapping[str, Any], start: Value, end: Value, bins: int, size: int) -> Value:
    """What each of ``size`` elements along an axis has of each bin, [regions, bins, size], of ends [regions, 1, 1].

    Samples follow each other at even steps, so that those between two elements are counted, and not made: how many
    there are may differ from region to region. A sample has 1 - |distance| of an element, that at the border all of
    what lies up to one element further out, and none beyond.
    """

    def number(value: float) -> Value:
        return e.like(value, start)

    half = attrs.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    first, last = (
        e.Sub(e.Mul(place, number(attrs.get("spatial_scale", 1.0))), number(0.5 if half else 0.0))
        for place in (start, end)
    )
    length = e.Sub(last, first)
    one_bin = e.Div(length if half else e.Max(length, number(1)), number(bins))
    ratio = int(attrs.get("sampling_ratio", 0))
    count = number(ratio) if ratio > 0 else e.Max(e.op("Ceil", one_bin, shape=one_bin.shape), number(0))
    many = e.Max(count, number(1))
    step = e.Div(one_bin, many)
    bin_start = e.Add(first, e.Mul(one_bin, e.const(np.arange(bins)[:, None], start.dtype)))
    place = e.Add(bin_start, e.Mul(step, number(0.5)))
    place = e.Min(place, e.Add(place, e.Mul(step, e.Sub(many, number(1)))))  # an end before the start: the other way
    step = e.Max(e.Abs(step), number(_NEAREST))

    def up_to(element: Value) -> Value:
        found = e.Add(e.Floor(e.Div(e.Sub(element, place), step)), number(1))
        return e.Min(e.Max(found, number(0)), count)

    def indices(some: Value) -> Value:
        """The sum of the first ``some`` indices."""
        return e.Mul(e.Mul(some, e.Sub(some, number(1))), number(0.5))

    at = np.arange(size)
    here = e.const(at, start.dtype)
    before, within, behind = (up_to(e.Add(here, number(offset))) for offset in (-1, 0, 1))
    apart = e.Sub(here, place)
    total: Value | None = None
    for low, high, inner, sign in ((before, within, at > 0, 1), (within, behind, at < size - 1, -1)):
        some = e.Sub(high, low)
        nearer = e.Sub(e.Mul(step, e.Sub(indices(high), indices(low))), e.Mul(some, apart))
        share = e.Add(some, e.Mul(nearer, e.const(sign * inner, start.dtype)))
        total = share if total is None else e.Add(total, share)
    return e.Div(total, many)


@gradient("MaxRoiPool", "x0 x1 dy0", inputs=[0], stops=[1])
def max_roi_pool(e: Emitter, op: Operator, x: Value, regions: Value, dy: Value) -> Grads:
    """dy [regions, channels, bins down, bins across] at the place of each largest element: of the largest of each row
    between two columns that of the rows between two edges."""
    batch, channels, height, width = size_of(x)
    number, _, down, across = size_of(dy)
    image, left, top, right, bottom = (sliced(e, regions, 1, side, side + 1) for side in range(5))
    image = e.cast(image, "int64")
    scale = float(op.attrs.get("spatial_scale", 1.0))
    columns = _within(e, left, right, scale, across, width)
    rows = _within(e, top, bottom, scale, down, height)
    own = e.op("Gather", comparable(e, x), e.reshape(image, (number,)), axis=0, shape=(number, *size_of(x)[1:]))
    of_row, column = _largest(e, own, columns, 3)
    _, row = _largest(e, of_row, rows, 2)
    column = e.GatherElements(column, row, axis=2, shape=size_of(dy))
    place = e.Add(e.Mul(row, e.const(np.int64(width))), column)
    first = e.Add(e.Mul(image, e.const(np.int64(channels))), e.const(np.arange(channels)[None]))
    first = e.reshape(e.Mul(first, e.const(np.int64(height * width))), (number, channels, 1, 1))
    some = e.op(
        "And",
        *(
            e.reshape(e.Greater(_count(e, inside), e.const(0.0, "float32")), (number, 1, *shape))
            for inside, shape in ((rows, (down, 1)), (columns, (1, across)))
        ),
        dtype="bool",
        shape=(number, 1, down, across),
    )
    flat = (batch * channels * height * width,)
    at = e.reshape(e.Add(place, first), (dy_size := math.prod(size_of(dy)), 1))
    kept = e.reshape(e.Where(some, dy, e.like(0, dy), shape=dy.shape), (dy_size,))
    return [e.reshape(added_rows(e, e.zeros(flat, dy.dtype), at, kept), size_of(x))]


def _within(e: Emitter, start: Value, end: Value, scale: float, bins: int, size: int) -> Value:
    """Which of ``size`` elements along an axis are in each bin, [regions, bins, size], of ends [regions, 1]; as
    onnxruntime computes it, in fp32."""

    def number(value: float) -> Value:
        return e.const(value, "float32")

    def whole(place: Value) -> Value:
        """The nearest, of halves that further from 0."""
        scaled = e.Mul(e.cast(place, "float32"), number(scale))
        return e.Mul(e.op("Sign", scaled, shape=scaled.shape), e.Floor(e.Add(e.Abs(scaled), number(0.5))))

    first, last = whole(start), whole(end)
    one_bin = e.Div(e.Max(e.Add(e.Sub(last, first), number(1)), number(1)), number(bins))
    low = e.Add(e.Floor(e.Mul(e.const(np.arange(bins)[None], "float32"), one_bin)), first)
    steps = e.Mul(e.const(np.arange(1, bins + 1)[None], "float32"), one_bin)
    high = e.Add(e.op("Ceil", steps, shape=steps.shape), first)
    low, high = (e.reshape(edge, (size_of(start)[0], bins, 1)) for edge in (low, high))
    at = e.const(np.arange(size), "float32")
    return e.op("And", e.GreaterOrEqual(at, low), e.Less(at, high), dtype="bool")


def _largest(e: Emitter, x: Value, inside: Value, axis: int) -> tuple[Value, Value]:
    """The largest elements of x [regions, channels, .., ..] along an axis in each bin, and their places, the first of
    equal ones."""
    number, bins, size = size_of(inside)
    shape = [number, 1, 1, 1]
    shape[axis] = size
    values, places = [], []
    for i in range(bins):
        here = sliced(e, inside, 1, i, i + 1)
        bin_ = e.Where(e.reshape(here, tuple(shape)), x, e.like(-np.inf, x), shape=x.shape)
        thin = (*size_of(x)[:axis], 1, *size_of(x)[axis + 1 :])
        places.append(e.ArgMax(bin_, axis=axis, keepdims=1, dtype="int64", shape=thin))
        values.append(e.GatherElements(bin_, places[-1], axis=axis, shape=thin))
    made = (*size_of(x)[:axis], bins, *size_of(x)[axis + 1 :])
    return e.op("Concat", *values, axis=axis, shape=made), e.op("Concat", *places, axis=axis, shape=made)


def _count(e: Emitter, inside: Value) -> Value:
    """How many elements are in each bin."""
    return e.op("ReduceSum", e.cast(inside, "float32"), e.ints(2), keepdims=0, shape=size_of(inside)[:2])


traits("MaxRoiPool", carries_large=True, places=(1,))
traits("RoiAlign", carries_large=True, places=(1,))
