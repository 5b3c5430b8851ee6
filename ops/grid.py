"""GridSample: each element of the result is a weighted sum of the elements around a place that the grid gives.

The gradient adds the shares back where they came from, and moves the place by the slope of the weights. Places,
padding and weights: https://onnx.ai/onnx/operators/onnx__GridSample.html; where that leaves a choice (what happens
at a border itself, which way a tie is rounded), onnxruntime's and PyTorch's (``aten/src/ATen/native/GridSampler.h``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ops.common import Grads, size_of
from amp_transpiler.ops.place_bodies import Asked, body
from amp_transpiler.ops.row_sums import added_rows

#: The coefficient of the cubic kernel.
_CUBIC = -0.75


@dataclass
class Tap:
    """One of the elements along an axis that a result is made of: index, weight and the weight's slope, each [points].

    Index and weight are where the padding puts them; what lies outside weighs nothing. ``slope``: by the coordinate of
    the grid; None where it is zero everywhere.
    """

    index: Value
    weight: Value
    slope: Value | None


@gradient("GridSample", reads="x0 x1 dy0", inputs=[0, 1])
def grid_sample(e: Emitter, op: Operator, x: Value, grid: Value, dy: Value) -> Grads:
    batch, channels, *sizes = size_of(x)
    places = math.prod(size_of(dy)[2:])
    rows = e.reshape(e.transpose(e.reshape(dy, (batch, channels, places)), (0, 2, 1)), (batch * places, channels))
    taps = _of_grid(e, op, grid, sizes)
    flat = flat_indices(e, taps, batch, sizes)
    dx = to_elements(e, rows, taps, flat, (batch, channels, *sizes)) if e.wants(0) else None
    return [dx, _to_grid(e, x, rows, taps, flat, size_of(grid)) if e.wants(1) else None]


@body("GridSample")
def _by_taps(e: Emitter, op: Asked, x: Value, grid: Value) -> Sequence[Value] | None:
    """The weighted sum of the taps, in fp32."""
    if x.shape is None or grid.shape is None:
        return None
    batch, channels, *sizes = size_of(x)
    shape, wide = size_of(grid)[1:-1], e.f32(x)
    taps = _of_grid(e, op, e.f32(grid), sizes)
    weights = [e.reshape(product_of(e, [t.weight for t in tap]), (batch * math.prod(shape), 1)) for tap in taps]
    shares = map(e.Mul, sampled(e, wide, flat_indices(e, taps, batch, sizes)), weights)
    rows = e.reshape(reduce(e.Add, shares), (batch, math.prod(shape), channels))
    return [e.cast(e.reshape(e.transpose(rows, (0, 2, 1)), (batch, channels, *shape)), x.dtype)]


def to_elements(
    e: Emitter, rows: Value, taps: list[tuple[Tap, ...]], flat: list[Value], shape: tuple[int, ...]
) -> Value:
    """The gradient of what is sampled: every share of ``rows``, [points, channels], added where it came from."""
    batch, channels, *sizes = shape
    points, elements = size_of(rows)[0], math.prod(sizes)
    shares = [e.Mul(rows, e.reshape(product_of(e, [t.weight for t in tap]), (points, 1))) for tap in taps]
    at = e.reshape(e.Concat(*flat, axis=0), (len(taps) * points, 1))
    together = e.Concat(*shares, axis=0)
    zeros = e.zeros((batch * elements, channels), rows.dtype)
    total = added_rows(e, zeros, at, together)
    return e.reshape(e.transpose(e.reshape(total, (batch, elements, channels)), (0, 2, 1)), shape)


def _to_grid(
    e: Emitter, x: Value, rows: Value, taps: list[tuple[Tap, ...]], flat: list[Value], shape: tuple[int, ...]
) -> Value:
    """The gradient of the grid, coordinates in its order: the last axis first."""
    slopes = to_places(e, rows, taps, sampled(e, x, flat), len(size_of(x)) - 2)
    return e.reshape(e.Concat(*(e.reshape(s, (size_of(rows)[0], 1)) for s in reversed(slopes)), axis=1), shape)


def sampled(e: Emitter, x: Value, flat: list[Value]) -> list[Value]:
    """What x, [batch, channels, ...], has at the rows of each tap: each [points, channels]."""
    batch, channels, *sizes = size_of(x)
    elements = math.prod(sizes)
    table = e.reshape(e.transpose(e.reshape(x, (batch, channels, elements)), (0, 2, 1)), (batch * elements, channels))
    return [e.Gather(table, index, axis=0, shape=(size_of(index)[0], channels)) for index in flat]


def to_places(e: Emitter, rows: Value, taps: list[tuple[Tap, ...]], read: list[Value], axes: int) -> list[Value]:
    """The gradient of the places along each axis, [points]; ``read``: what was sampled at each tap."""
    points = size_of(rows)[0]
    terms: list[list[Value]] = [[] for _ in range(axes)]
    for tap, found in zip(taps, read, strict=True):
        if all(t.slope is None for t in tap):
            continue
        share = e.reshape(e.reduce_sum(e.Mul(rows, found), [1]), (points,))
        for axis, along in enumerate(tap):
            if along.slope is not None:
                others = [t.weight for i, t in enumerate(tap) if i != axis]
                terms[axis].append(product_of(e, [share, along.slope, *others]))
    return [e.Sum(*found) if found else e.zeros((points,), rows.dtype) for found in terms]


def product_of(e: Emitter, factors: list[Value]) -> Value:
    result = factors[0]
    for factor in factors[1:]:
        result = e.Mul(result, factor)
    return result


def flat_indices(e: Emitter, taps: list[tuple[Tap, ...]], batch: int, sizes: Sequence[int]) -> list[Value]:
    """For each tap the rows of its elements, [points], in a table of all elements of the batch."""
    points, elements = size_of(taps[0][0].index)[0], math.prod(sizes)
    offset = e.const(np.repeat(np.arange(batch) * elements, points // max(batch, 1)), "int64")
    found = []
    for tap in taps:
        row, stride = offset, 1
        for along, size in reversed(list(zip(tap, sizes, strict=True))):
            row = e.Add(row, e.Mul(along.index, e.like(stride, along.index)) if stride > 1 else along.index)
            stride *= size
        found.append(row)
    return found


def _of_grid(e: Emitter, op: Operator | Asked, grid: Value, sizes: Sequence[int]) -> list[tuple[Tap, ...]]:
    """What each result is made of, a tap along each axis."""
    axes = [_taps(e, op.attrs, _coordinate(e, grid, len(sizes) - 1 - axis), size) for axis, size in enumerate(sizes)]
    return list(itertools.product(*axes))


def _coordinate(e: Emitter, grid: Value, component: int) -> Value:
    """One coordinate of every point, [points]."""
    shape = size_of(grid)
    column = e.Gather(grid, e.const(component, "int64"), axis=len(shape) - 1, shape=shape[:-1])
    return e.reshape(column, (math.prod(shape[:-1]),))


# -- one axis ----------------------------------------------------------------------------------------------
def _taps(e: Emitter, attrs: Mapping[str, Any], g: Value, size: int) -> list[Tap]:
    """What one axis contributes, for the coordinate ``g`` in [-1, 1]."""
    mode, padding = attrs.get("mode", "linear"), attrs.get("padding_mode", "zeros")
    aligned = bool(attrs.get("align_corners", 0))
    factor = (size - 1) / 2 if aligned else size / 2
    place = e.Add(e.Mul(g, e.like(factor, g)), e.like((size - 1) / 2, g))
    if mode in ("cubic", "bicubic"):
        return _cubic(e, place, factor, size, padding, aligned)
    place, slope = _padded(e, place, factor, size, padding, aligned)
    if mode == "nearest":
        near = e.op("Round", place, shape=place.shape)
        return [Tap(_index(e, near, size), _inside(e, near, size), None)]
    return between(e, place, slope, size)


def between(e: Emitter, place: Value, slope: Value, size: int) -> list[Tap]:
    """The elements before and behind a place; ``slope`` is that of the place. What lies outside weighs nothing."""
    low = e.Floor(place)
    after = e.Sub(place, low)
    high = e.Add(low, e.like(1, low))
    weights = (e.Sub(e.like(1, after), after), after)
    return [
        Tap(_index(e, at, size), e.Mul(weight, inside), e.Mul(inside, e.Neg(slope) if at is low else slope))
        for at, weight, inside in zip(
            (low, high), weights, (_inside(e, low, size), _inside(e, high, size)), strict=True
        )
    ]


def _padded(e: Emitter, place: Value, factor: float, size: int, padding: str, aligned: bool) -> tuple[Value, Value]:
    """The place after padding by "border" or "reflection", and its slope by the grid's coordinate."""
    slope = e.like(factor, place)
    if padding == "zeros":
        return place, slope
    if padding == "reflection":
        place, turned = _reflected(e, place, size, aligned)
        slope = e.Mul(slope, turned)
    bottom, top = e.like(0, place), e.like(size - 1, place)
    within = e.And(e.Greater(place, bottom), e.Less(place, top))
    return e.Min(e.Max(place, bottom), top), e.Where(within, slope, bottom)


def _reflected(e: Emitter, place: Value, size: int, aligned: bool) -> tuple[Value, Value]:
    """The place, reflected at the borders as often as it takes, and 1 or -1 as its direction."""
    low, span = (0.0, size - 1.0) if aligned else (-0.5, float(size))
    if span == 0:
        return e.Mul(place, e.like(0, place)), e.Mul(place, e.like(0, place))
    one = e.like(1, place)
    shifted = e.Sub(place, e.like(low, place))
    sign = e.Where(e.Less(shifted, e.like(0, place)), e.Neg(one), one)
    distance = e.Abs(shifted)
    turns = e.Floor(e.Div(distance, e.like(span, place)))
    rest = e.Sub(distance, e.Mul(turns, e.like(span, place)))
    half = e.Mul(turns, e.like(0.5, place))
    even = e.Equal(half, e.Floor(half))
    back = e.Add(e.Where(even, rest, e.Sub(e.like(span, rest), rest)), e.like(low, rest))
    return back, e.Mul(sign, e.Where(even, one, e.Neg(one)))


def _cubic(e: Emitter, place: Value, factor: float, size: int, padding: str, aligned: bool) -> list[Tap]:
    """Four taps, each padded by itself."""
    low = e.Floor(place)
    after = e.Sub(place, low)
    taps: list[Tap] = []
    for step in (-1, 0, 1, 2):
        distance = e.Sub(after, e.like(step, after))  # of the place from the tap
        weight, slope = _kernel(e, distance, near=step in (0, 1), sign=1 if step <= 0 else -1)
        at = e.Add(low, e.like(step, low))
        slope = e.Mul(slope, e.like(factor, slope))
        if padding == "zeros":
            inside = _inside(e, at, size)
            weight, slope = e.Mul(weight, inside), e.Mul(slope, inside)
        elif padding == "reflection":
            at, _ = _reflected(e, at, size, aligned)
            at = e.op("Round", at, shape=at.shape)
        taps.append(Tap(_index(e, at, size), weight, slope))
    return taps


def _kernel(e: Emitter, distance: Value, near: bool, sign: int) -> tuple[Value, Value]:
    """The cubic convolution's weight at a distance whose sign is known, and its slope."""
    d = distance if sign > 0 else e.Neg(distance)
    a = _CUBIC
    powers = (a + 2, -(a + 3), 0.0, 1.0) if near else (a, -5 * a, 8 * a, -4 * a)
    weight, slope = e.like(powers[0], d), e.like(3 * powers[0] * sign, d)
    for coefficient in powers[1:]:
        weight = e.Add(e.Mul(weight, d), e.like(coefficient, d))
    for coefficient in (2 * powers[1], powers[2]):
        slope = e.Add(e.Mul(slope, d), e.like(coefficient * sign, d))
    return weight, slope


def _index(e: Emitter, at: Value, size: int) -> Value:
    """A whole place as an index that there is."""
    return e.cast(e.Min(e.Max(at, e.like(0, at)), e.like(size - 1, at)), "int64")


def _inside(e: Emitter, at: Value, size: int) -> Value:
    """1 where a whole place is an element, else 0."""
    there = e.And(e.Greater(at, e.like(-0.5, at)), e.Less(at, e.like(size - 0.5, at)))
    return e.cast(there, at.dtype)


@decomposition("AffineGrid")
def affine_grid(d: Parts, op: Operator, theta: Variable, size: Variable) -> list[Variable]:
    """The places [-1, 1] of all elements, by theta [N, 2, 3] or [N, 3, 4]: to [N, H, W, 2] or [N, D, H, W, 3].

    https://onnx.ai/onnx/operators/onnx__AffineGrid.html
    """
    rank = d.size(theta, 1)
    known, y = constant_array(size), op.output(0)
    if rank is None or y is None or (known is None and (y.shape is None or len(y.shape) != rank + 2)):
        raise d.error("the size of its grid is not known")
    sizes = [d.size(y, 1 + axis) for axis in range(rank)] if known is None else [int(n) for n in known[2:]]
    if None in sizes:
        raise d.open_size("the size of its grid")
    ends = d.whole("align_corners", 0)
    axes = [np.linspace(-1, 1, n) if ends else (2 * np.arange(n) + 1) / n - 1 for n in sizes if n is not None]
    places = np.stack([*reversed(np.meshgrid(*axes, indexing="ij")), np.ones([len(axis) for axis in axes])], -1)
    with d.fp32(Kind.PLACES):
        moved = d.MatMul(d.const(places.reshape(-1, rank + 1), theta.dtype), d.Transpose(theta, perm=[0, 2, 1]))
        return [d.Reshape(moved, [0, *sizes, rank])]


traits("AffineGrid", places=(0,))
traits("GridSample", carries_large=True, places=(1,))
