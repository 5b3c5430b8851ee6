"""Bodies for places that lack kernels (see :mod:`.place_bodies`): what slides windows, convolutions and pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ops.common import pieces, size_of, sliced
from amp_transpiler.ops.conv import transposed_window, without_tail
from amp_transpiler.ops.place_bodies import Asked, body
from amp_transpiler.ops.place_indices import gathered
from amp_transpiler.ops.pool import window_by_runtime, window_counts
from amp_transpiler.ops.rounded_sums import spread
from amp_transpiler.ops.window import Window, window_by


@body("AveragePool")
def _average_pool(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    """What each window adds up, over how much it averages."""
    window = _pooled(op, x)
    if window is None:
        return None
    return [e.Div(_added(e, x, window), e.const(window_counts(op.attrs, window), x.dtype))]


@body("LpPool")
def _lp_pool(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    """The root of what each window adds up of powers, in fp32."""
    window, power = _pooled(op, x), int(op.attrs.get("p", 2))
    if window is None:
        return None
    size = e.Abs(e.f32(x))
    if power == 1:
        return [e.cast(_added(e, size, window), x.dtype)]
    total = _added(e, e.Mul(size, size) if power == 2 else e.Pow(size, e.like(power, size)), window)
    return [e.cast(e.Sqrt(total) if power == 2 else e.Pow(total, e.like(1 / power, total)), x.dtype)]


def _pooled(op: Asked, x: Value) -> Window | None:
    """The windows of a pool, which pads by numbers, or, where they meet and have no gaps, by sizes; None elsewhere."""
    if x.shape is None or op.results[0].shape is None:
        return None
    kernel, strides = op.attrs["kernel_shape"], op.attrs.get("strides") or [1]
    if op.attrs.get("auto_pad", "NOTSET").startswith("SAME") and max(strides) > min(kernel):
        return None
    return window_by_runtime(op.attrs, x.shape[2:], op.results[0].shape[2:])


def _added(e: Emitter, x: Value, window: Window) -> Value:
    """The sum of each window: a convolution with ones."""
    lead = size_of(x)[:2]
    images = window.pad(e, e.reshape(x, (math.prod(lead), 1, *window.source)), 2)
    ones = e.const(np.ones((1, 1, *window.kernel)), x.dtype)
    total = e.Conv(images, ones, strides=list(window.strides), dilations=list(window.dilations))
    return e.reshape(total, (*lead, *window.target))


@body("ConvTranspose")
def _conv_transpose(e: Emitter, op: Asked, x: Value, w: Value, bias: Value | None = None) -> Sequence[Value] | None:
    """The convolution of X, with zeros between its elements, and the kernel turned around."""
    if None in (x.shape, w.shape, op.results[0].shape):
        return None
    slid, group = transposed_window(op.attrs, x, w, op.results[0]), int(op.attrs.get("group", 1))
    apart, (channels, outputs, *kernel) = spread(e, x, slid.strides), size_of(w)
    begin = [n - 1 - b for n, b in zip(slid.extent, slid.begin, strict=True)]
    for axis, before in enumerate(begin, 2):  # what lies in the padding
        apart = sliced(e, apart, axis, max(-before, 0), size_of(apart)[axis])
    begin = [max(before, 0) for before in begin]
    sizes = size_of(apart)[2:], size_of(op.results[0])[2:]
    window = Window(slid.kernel, (1,) * slid.rank, slid.dilations, tuple(begin), *sizes)
    split = e.reshape(w, (group, channels // group, outputs, *kernel))
    swapped = e.transpose(split, [0, 2, 1, *range(3, 3 + slid.rank)])
    turned = e.reshape(swapped, (group * outputs, channels // group, *kernel))
    for axis, size in enumerate(kernel, 2):
        turned = gathered(e, turned, axis, np.arange(size)[::-1])
    return [e.Conv(without_tail(e, apart, window), turned, bias, group=group, **window.attributes())]


@body("Conv")
def _conv(e: Emitter, op: Asked, x: Value, w: Value, bias: Value | None = None) -> Sequence[Value] | None:
    """A convolution for each group of channels; of one group, with zeros joined to the image: a Pad would be fused."""
    group = int(op.attrs.get("group", 1))
    if w.shape is None or (group == 1 and None in (x.shape, op.results[0].shape)):
        return None
    if group == 1:
        slid = window_by(op.attrs, size_of(w)[2:], size_of(x)[2:], size_of(op.results[0])[2:])
        for axis, n in enumerate(slid.end, 2):
            lead, (size, *rest) = size_of(x)[:axis], size_of(x)[axis:]
            zeros = e.const(np.zeros((*lead, n, *rest), np.float32), x.dtype)
            x = e.op("Concat", x, zeros, axis=axis, shape=(*lead, size + n, *rest)) if n else x
        return [e.Conv(x, w, bias, **replace(slid, source=size_of(x)[2:]).attributes())]
    images, weights = pieces(e, x, 1, [w.shape[1]] * group), pieces(e, w, 0, [w.shape[0] // group] * group)
    alone = dict(op.attrs) | {"group": 1}
    made = e.Concat(*[e.Conv(*pair, **alone) for pair in zip(images, weights, strict=True)], axis=1)
    return [made if bias is None else e.Add(made, e.reshape(bias, (-1, *[1] * (len(w.shape) - 2))))]


@body("MaxPool")
def _max_pool(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    """The second result, where each window's first maximum lies in the flattened input, is found by comparing: from the
    last position of the kernel to the first, each that holds the maximum has its index written over the others."""
    if x.shape is None or op.results[0].shape is None or len(op.results) == 1 or op.attrs.get("storage_order", 0):
        return None
    if x.dtype not in FLOATS:
        return None
    window = window_by_runtime(op.attrs, x.shape[2:], op.results[0].shape[2:])
    if window is None:
        return None
    y = e.op("MaxPool", x, shape=op.results[0].shape, **op.attrs)
    y = e.reshape(y, (*x.shape[:2], *window.target))  # also tells onnxruntime's inference
    around = _surrounded(e, window, x)
    found: Value | None = None
    for tap in reversed(window.taps):
        place = e.const(_places(window, tap), "int32")
        held = e.Equal(window.read(e, around, tap, 2), y)
        found = e.Where(held, place, e.const(0, "int32") if found is None else found)
    assert found is not None
    first = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * window.rank) * math.prod(window.source)
    return [y, e.Add(found, e.const(first, "int32"), shape=y.shape)]


def _surrounded(e: Emitter, window: Window, x: Value) -> Value:
    """X as far as windows read, with less than any number around it."""
    assert x.shape is not None
    if not any(window.pads):
        return x
    before, after = [0, 0, *window.begin], [0, 0, *window.end]
    shape = [n + b + a for n, b, a in zip(x.shape, before, after, strict=True)]
    return e.op("Pad", x, e.ints(*before, *after), e.like(-math.inf, x), shape=shape)


def _places(window: Window, tap: Sequence[int]) -> np.ndarray[Any, Any]:
    """The flat position inside a channel that each window reads at a position of the kernel."""
    flat = np.zeros([1] * window.rank, np.int64)
    for axis in range(window.rank):
        at = np.arange(window.target[axis]) * window.strides[axis] + tap[axis] * window.dilations[axis]
        at = np.clip(at - window.begin[axis], 0, window.source[axis] - 1) * math.prod(window.source[axis + 1 :])
        flat = flat + at.reshape([-1 if i == axis else 1 for i in range(window.rank)])
    return flat[None, None]
