"""Pooling: gradients of MaxPool, AveragePool, their global forms and MaxUnpool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import INF, Interval, Ranges, magnitude, same, same_or_zero, terms
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, lowering_rule, own, range_rule, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ops.common import comparable, given_attributes, shape_of, size_of
from amp_transpiler.ops.window import Window, window_by

traits("MaxPool", "GlobalMaxPool", over="spatial", reduces="max", ignores="low", carries_large=True)
traits("AveragePool", "GlobalAveragePool", over="spatial", reduces="mean", carries_large=True)
_POWERS = ("LpPool", "GlobalLpPool")
traits(*_POWERS, over="spatial", reduces="powers", carries_large=True, overflows_inside=Kind.POWERS_INSIDE)
traits("MaxPool", "GlobalMaxPool", "MaxUnpool", own("MaxUnpoolGrad"), exact=True)
traits("MaxUnpool", carries_large=True)
range_rule("MaxPool", "GlobalMaxPool", "GlobalAveragePool")(same)
range_rule("AveragePool")(same_or_zero)

#: Tiles of more elements than this have their maximum found by MaxPool itself.
_LARGEST_TILE = 9
#: Positions inside one channel are computed in fp32, which counts no further.
_MOST_POSITIONS = 2**24


@gradient("MaxPool", "x0 y0 dy0", native=True)
def max_pool(e: Emitter, op: Operator, x: Value, y: Value, dy: Value) -> Sequence[Any]:
    """Each dy goes to the first maximum of its window, in row-major order, as MaxPool's indices have it."""
    window = window_by(op.attrs, op.attrs["kernel_shape"], size_of(x)[2:], size_of(dy)[2:])
    if e.at.host:
        return [_max_pool_on_cpu(e, op, window, x, y, dy)]
    if window.is_tiling and prod(window.kernel) <= _LARGEST_TILE:
        maxima = _firsts_of_tiles(e, window, x, y)
    else:
        maxima = _max_pool_indices(e, op, x)
    dx = _at_maxima(e, dy, maxima, size_of(x), window.overlaps)
    e.shared[_shared(dx)] = (x, y, dy, maxima, *[dx] * window.overlaps)
    return [dx]


def _firsts_of_tiles(e: Emitter, window: Window, x: Value, y: Value) -> Value:
    """Whether each element is the first maximum of its tile; of one with NaN none is. As [N * C, tiles, taps, ...].

    Positions would be 64-bit numbers on a GPU, and scattering by them takes zeros to scatter into.
    """
    places, batch = size_of(y), prod(size_of(x)[:2])
    split = (batch, *_paired(window.target, window.kernel))
    taps = (1, *_paired([1] * window.rank, window.kernel))
    maxima = e.reshape(comparable(e, y), _one_a_tile(split))
    held = e.Equal(e.reshape(comparable(e, x), split), maxima, shape=split)
    earlier = e.const(np.arange(prod(taps), 0, -1).reshape(taps), "float16")
    rank = e.Where(held, earlier, e.const(0, "float16"), shape=split)
    ranks, kernel, strides = e.reshape(rank, size_of(x)), list(window.kernel), list(window.strides)
    first = e.op("MaxPool", ranks, kernel_shape=kernel, strides=strides, shape=places)
    first = e.Max(first, e.const(1, "float16"), shape=places)
    return e.Equal(rank, e.reshape(first, _one_a_tile(split)), dtype="bool", shape=split)


def _paired(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [n for pair in zip(a, b, strict=True) for n in pair]


def _one_a_tile(split: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if i and not i % 2 else n for i, n in enumerate(split))


def _at_maxima(e: Emitter, values: Value, maxima: Value, shape: Sequence[int], add: bool) -> Value:
    """``values`` where ``maxima`` (as :func:`_firsts_of_tiles` or :func:`_max_pool_indices`) says, zeros elsewhere."""
    if maxima.dtype != "bool":
        return e.cast(_scatter(e, values, maxima, shape, add), values.dtype)
    split = size_of(maxima)
    chosen = e.Where(maxima, e.reshape(values, _one_a_tile(split)), e.like(0, values), shape=split)
    return e.reshape(chosen, shape)


def through_maxima(e: Emitter, y: Value, dy: Value) -> Value | None:
    """The gradient of y = Relu(x) where ``dy`` is what the gradient of a MaxPool of Y alone has made; None elsewhere.

    What reaches a maximum goes on where the maximum is positive: the pool's result is compared, not all that it read.
    """
    if _shared(dy) not in e.shared:
        return None
    x, most, share, maxima, *adds = e.shared[_shared(dy)]
    if x.name != y.name or most.dtype == "bfloat16":  # CUDA compares no bfloat16
        return None
    passed = e.Where(e.Greater(most, e.like(0, most)), share, e.like(0, share))
    return _at_maxima(e, passed, maxima, size_of(y), bool(adds))


def _shared(dx: Value) -> str:
    return f"how {dx.name} was scattered"


def _max_pool_on_cpu(e: Emitter, op: Operator, window: Window, x: Value, y: Value, dy: Value) -> Value:
    """MaxPool's second output makes it 20 times slower on CPU; so where windows are tiles, comparisons find the
    maxima instead (3 times faster in all), and where they do not overlap, MaxUnpool scatters (10 times faster)."""
    small = prod(window.kernel) <= _LARGEST_TILE and prod(window.source) < _MOST_POSITIONS
    if window.is_tiling and small:
        indices = _tile_indices(e, window, x, y)
    else:
        indices = _max_pool_indices(e, op, x)
    if window.overlaps:
        return _scatter(e, dy, indices, size_of(x), True)
    # With a window of one element MaxUnpool does nothing but scatter.
    ones = [1] * window.rank
    return e.op("MaxUnpool", dy, indices, e.ints(*size_of(x)), kernel_shape=ones, strides=ones, shape=x.shape)


def _max_pool_indices(e: Emitter, op: Operator, x: Value) -> Value:
    """The position of each maximum in the flattened input, by the very MaxPool that ran forward."""
    kept = given_attributes(op, "kernel_shape", "strides", "dilations", "pads", "auto_pad", "ceil_mode")
    indices = e.op("MaxPool", x, outputs=2, **kept)[1]
    return Value(indices.name, "int64", indices.shape)


def _tile_indices(e: Emitter, window: Window, x: Value, y: Value) -> Value:
    """The position of each tile's first maximum in the flattened input.

    The maximum over the box from the tile's corner to a tap equals y exactly where the box holds the maximum;
    and if no earlier tap holds it, the tap itself does. These pools are fast, strided slices are not.
    """
    steps = [prod(window.source[axis + 1 :]) for axis in range(window.rank)]
    offsets = [float(sum(t * s for t, s in zip(tap, steps, strict=True))) for tap in window.taps]
    offset = e.const(offsets[-1], "float32")
    for tap, number in reversed(list(zip(window.taps[:-1], offsets[:-1], strict=True))):
        box = e.op("MaxPool", x, kernel_shape=[t + 1 for t in tap], strides=list(window.strides))
        offset = e.Where(e.Equal(box, y), e.const(number, "float32"), offset)
    every = np.arange(prod(window.source)).reshape(window.source)
    corners = every[tuple(slice(None, None, s) for s in window.strides)][None, None]
    images = size_of(x)[:2]
    first = np.arange(prod(images)).reshape(*images, *[1] * window.rank) * every.size
    within = e.cast(e.Add(offset, e.const(corners, "float32")), "int64")
    return e.Add(within, e.const(first, "int64"))


def _scatter(e: Emitter, values: Value, indices: Value, shape: Sequence[int], add: bool) -> Value:
    """``values`` at these flat positions of zeros; summed in fp32 where positions can repeat."""
    if add:
        values = e.f32(values)
    flat = e.zeros([prod(shape)], values.dtype)
    reduction = "add" if add else "none"
    count = prod(size_of(values))
    values = e.reshape(values, (count,))
    if e.at.host:
        result = e.op("ScatterElements", flat, e.reshape(indices, (count,)), values, axis=0, reduction=reduction)
    else:  # which writes over the zeros there
        result = e.op("ScatterND", flat, e.reshape(indices, (count, 1)), values, reduction=reduction)
    return e.reshape(result, shape)


@gradient("AveragePool", "dy0", native=True)
def average_pool(e: Emitter, op: Operator, dy: Value) -> Sequence[Any]:
    """Each dy, divided by the number of elements that its window averages, spread over the window."""
    shape = shape_of(e, 0)
    window = window_by(op.attrs, op.attrs["kernel_shape"], shape[2:], size_of(dy)[2:])
    _check_automatic_padding(op, window)
    share = e.op("Div", dy, e.const(window_counts(op.attrs, window), dy.dtype), shape=dy.shape)
    images = e.reshape(share, (shape[0] * shape[1], 1, *window.target))
    ones = e.const(np.ones((1, 1, *window.kernel)), dy.dtype)
    return [e.reshape(window.scatter(e, images, ones, 1), shape)]


def _check_automatic_padding(op: Operator, window: Window) -> None:
    """onnxruntime's pools leave dilation out of SAME padding, and pad by less than nothing where windows lie apart."""
    apart = any(s > k + 1 for s, k in zip(window.strides, window.kernel, strict=True))
    if op.attrs.get("auto_pad", "NOTSET").startswith("SAME") and (apart or set(window.dilations) != {1}):
        raise GraphError(
            f"the gradient of '{op.label}' (AveragePool with auto_pad={op.attrs['auto_pad']}, kernel_shape "
            f"{list(window.kernel)}, strides {list(window.strides)}, dilations {list(window.dilations)}) is not "
            "defined: ONNX and onnxruntime pad it differently. Give the padding as pads"
        )


def window_by_runtime(attrs: Mapping[str, Any], source: Sequence[int], target: Sequence[int]) -> Window | None:
    """The windows of a pool as runtimes have them; None where onnxruntime pads less than ONNX (dilated, SAME).

    ONNX's inference counts windows that begin behind the end, which no runtime has.
    """
    if attrs.get("auto_pad", "NOTSET").startswith("SAME") and set(attrs.get("dilations") or [1]) != {1}:
        return None
    window = window_by(attrs, attrs["kernel_shape"], source, target)
    if not attrs.get("ceil_mode", 0):
        return window
    starts = zip(window.target, window.strides, window.source, window.begin, strict=True)
    return replace(window, target=tuple(n - ((n - 1) * s >= size + b) for n, s, size, b in starts))


def window_counts(attrs: Mapping[str, Any], window: Window) -> np.ndarray:
    """How many elements each window averages, broadcastable to Y: padding counts if the operator says so, what
    ceil_mode adds behind it never does."""
    include = bool(attrs.get("count_include_pad", 0))
    pads = attrs.get("pads") or [0] * 2 * window.rank
    explicit = attrs.get("auto_pad", "NOTSET") == "NOTSET"
    counts = np.ones([1, 1])
    for axis in range(window.rank):
        begin = window.begin[axis]
        end = pads[window.rank + axis] if explicit else window.end[axis]
        starts = np.arange(window.target[axis]) * window.strides[axis] - begin
        reads = starts[:, None] + np.arange(window.kernel[axis]) * window.dilations[axis]
        low, high = (-begin, window.source[axis] + end) if include else (0, window.source[axis])
        counts = np.multiply.outer(counts, ((reads >= low) & (reads < high)).sum(1))
    return np.asarray(counts.flat[0]) if counts.size and counts.min() == counts.max() else counts


@gradient("GlobalAveragePool", "dy0", native=True)
def global_average_pool(e: Emitter, op: Operator, dy: Value) -> Sequence[Any]:
    """dy over the number of positions, at every position."""
    shape = shape_of(e, 0)
    return [e.op("Expand", e.Div(dy, e.like(prod(shape[2:]), dy)), e.ints(*shape), shape=shape)]


@gradient("GlobalMaxPool", "x0 dy0", native=True)
def global_max_pool(e: Emitter, op: Operator, x: Value, dy: Value) -> Sequence[Any]:
    """dy at the first maximum of each channel."""
    flat = (*size_of(x)[:2], prod(size_of(x)[2:]))
    place = e.ArgMax(comparable(e, e.reshape(x, flat)), axis=2, keepdims=1)
    zeros = e.zeros(flat, dy.dtype)
    return [e.reshape(e.ScatterElements(zeros, place, e.reshape(dy, (*flat[:2], 1)), axis=2), size_of(x))]


# -- MaxUnpool -------------------------------------------------------------------------------------------
def _unpooled(op: Operator, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of Y where none is given: each window's stride, and the last window, less the padding."""
    kernel = list(op.attrs["kernel_shape"])
    strides = op.attrs.get("strides") or [1] * len(kernel)
    pads = op.attrs.get("pads") or [0] * 2 * len(kernel)
    ends = pads[len(kernel) :]
    sizes = [(n - 1) * s + k - b - e for n, s, k, b, e in zip(shape[2:], strides, kernel, pads, ends, strict=False)]
    return (*shape[:2], *sizes)


def _given_shape(op: Operator) -> str:
    return "" if op.input(2) is None else "its gradient exists without output_shape only"


@lowering_rule("MaxUnpool", native=True, when=lambda op: op.input(2) is None)
def max_unpool(e: Emitter, op: Operator, x: Value, indices: Value) -> Sequence[Any]:
    """Zeros with X scattered to its indices in the flattened Y: CUDA has no kernel."""
    shape = _unpooled(op, size_of(x))
    count = [prod(size_of(x))]
    zeros = e.zeros([prod(shape)], x.dtype)
    flat = e.ScatterElements(zeros, e.reshape(indices, count), e.reshape(x, count), shape=[prod(shape)])
    return [e.reshape(flat, shape)]


@gradient("MaxUnpool", "x1 dy0", inputs=(0,), native=True, refuse=_given_shape)
def max_unpool_gradient(e: Emitter, op: Operator, indices: Value, dy: Value) -> Sequence[Any]:
    """dy at the indices."""
    shape = shape_of(e, 0)
    count = [prod(shape)]
    taken = e.GatherElements(e.reshape(dy, [prod(size_of(dy))]), e.reshape(indices, count), shape=count)
    return [e.reshape(taken, shape)]


@lowering_rule("GlobalLpPool", native=True)
def global_lp_pool(e: Emitter, op: Operator, x: Value) -> Sequence[Any]:
    """y = (sum of |x|^p)^(1/p) over each channel; CUDA has no kernel of it. Powers are fp32, where no norm has them."""
    power = float(op.attrs.get("p", 2))
    if e.at.host:
        return [e.GlobalLpPool(x, p=int(power))]
    axes, dtype = range(2, len(size_of(x))), x.dtype
    if power in (1, 2) and dtype != "bfloat16":
        return [e.op(f"ReduceL{int(power)}", x, e.ints(*axes), keepdims=1)]
    x = e.f32(x)
    total = e.reduce_sum(e.Pow(e.Abs(x), e.like(power, x)), axes, keepdims=True)
    return [e.cast(e.Pow(total, e.like(1 / power, x)), dtype)]


@gradient("GlobalLpPool", "x0 y0 dy0", native=True)
def global_lp_pool_gradient(e: Emitter, op: Operator, x: Value, y: Value, dy: Value) -> Sequence[Any]:
    """The slope is sign(x) (|x| / y)^(p-1), and 0 where all of a channel is 0."""
    zero, plain = e.like(0, y), comparable(e, y)
    nothing = e.Equal(plain, e.like(0, plain))
    share = e.Div(e.Abs(x), e.Where(nothing, e.like(1, y), y))
    slope = e.Mul(e.Sign(x), e.Pow(share, e.like(float(op.attrs.get("p", 2)) - 1, x)))
    return [e.Mul(e.Where(nothing, zero, dy), slope)]


@range_rule("GlobalLpPool")
def _global_lp_pool_range(op: Operator, ranges: Ranges) -> Interval | None:
    found, many = ranges.bound(op.input(0)), terms(op)
    largest = magnitude(found)[1]
    return 0.0, INF if many is None else largest * many ** (1 / op.attrs.get("p", 2))
