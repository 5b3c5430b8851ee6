"""Convolutions: gradients of Conv and ConvTranspose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, biased, same_or_zero, weighted
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import SlotShapes, channel_rule, flops, gradient, range_rule, traits
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.channel_rows import by_channel, by_image, exchanged, lies_in_rows
from amp_transpiler.ops.common import shape_of, size_of
from amp_transpiler.ops.gpu_kernels import AT_ONCE, product
from amp_transpiler.ops.kernel_gradient import is_product, rows_read, weight_gradient
from amp_transpiler.ops.window import Window, window_by

#: Fewer positions than this and Conv splits its sums differently from ConvTranspose, and is no faster.
_CONV_POSITIONS = 128
#: So many numbers are set apart by a product at most, which reads as many for each.
_LONGEST_LINE = 256


@gradient("Conv", "x0 x1 dy0", inputs=(0, 1, 2), native=True)
def conv(e: Emitter, op: Operator, x: Value, w: Value, dy: Value) -> Sequence[Any]:
    """dX is the transposed convolution of dY, dW the correlation of X with dY, dB the sum of dY."""
    group = int(op.attrs.get("group", 1))
    window = window_by(op.attrs, size_of(w)[2:], size_of(x)[2:], size_of(dy)[2:])
    dx, dw = None, weight_gradient(e, x, dy, window, group) if e.wants(1) else None
    if e.wants(0):
        dx = _by_product(e, x, w, dy, window, group)
        if dx is None:
            dx = _by_conv(e, x, w, dy, window, group) or window.scatter(e, dy, w, group)
            dx = dx if e.summand is None else e.Add(dx, e.summand)
    return [dx, dw, _bias_gradient(e, dy)]


@channel_rule("Conv")
def conv_by_channel(e: Emitter, op: Operator, x: Value, w: Value, b: Value | None = None) -> Sequence[Any]:
    """With a kernel of one position: the product of weights and rows."""
    shape = shape_of(e, 0)
    window = window_by(op.attrs, size_of(w)[2:], size_of(x)[2:], shape[2:])
    if int(op.attrs.get("group", 1)) != 1 or not is_product(window):
        return []
    weights = e.reshape(w, size_of(w)[:2])
    if b is None:
        rows = product(e, weights, rows_read(e, x, window))
    else:
        column = e.reshape(b, (shape[1], 1))
        rows = e.Gemm(weights, rows_read(e, x, window), column, shape=(shape[1], shape[0] * prod(shape[2:])))
    return [by_image(e, rows, shape)]


def _by_product(e: Emitter, x: Value, w: Value, dy: Value, window: Window, group: int) -> Value | None:
    """dX where dY lies in rows and the kernel has one position: a product, to which what is to be added to dX adds what
    it has there; between strides there is nothing else."""
    apart = any(s > 1 for s in window.strides)
    whole = window.source == tuple(t * s for t, s in zip(window.target, window.strides, strict=True))
    if group > 1 or not is_product(window) or not lies_in_rows(e, dy) or (apart and not whole):
        return None
    around = exchanged(e, e.summand) if e.summand is not None and lies_in_rows(e, e.summand) else None
    plus = None if around is None else window.read(e, around, window.taps[0], 2)
    rows = product(e, e.reshape(w, size_of(w)[:2]), by_channel(e, dy), trans_a=True, plus=plus)
    if apart:
        rows = _set_apart(e, rows, around, (size_of(x)[1], size_of(x)[0]), window)
    dx = by_image(e, rows, size_of(x))
    return dx if around is not None or e.summand is None else e.Add(dx, e.summand)


def _set_apart(e: Emitter, rows: Value, around: Value | None, lead: tuple[int, int], window: Window) -> Value:
    """Rows [C, N * target] with as much between their numbers as the window steps over: [C, N * source], zeros or what
    ``around`` has there. In 16 bit on a GPU zeros come of a product with a matrix of zeros and ones: half of the time.
    """
    channels, whole = lead[0], (lead[0], lead[1] * prod(window.source))
    (*above, lines, width), (*steps, down, across) = (1, *window.target), (1, *window.strides)
    together = AT_ONCE // math.gcd(AT_ONCE, width)
    length, count = together * width, channels * lead[1] * prod(above) * lines
    fits = set(steps) <= {1} and not count % together and length <= _LONGEST_LINE
    if fits and around is None and rows.dtype in HALF:
        places = np.zeros((together, width, together, down, width, across), np.float32)
        for line in range(together):
            places[line, range(width), line, 0, range(width), 0] = 1
        matrix = e.const(places.reshape(length, length * down * across), rows.dtype)
        each = e.reshape(rows, (count // together, length))
        return e.reshape(e.MatMul(each, matrix, shape=(count // together, length * down * across)), whole)
    each = e.reshape(rows, (*lead, *(n for t in window.target for n in (t, 1))))
    first = np.zeros([n for s in window.strides for n in (1, s)], bool)
    first[(0,) * first.ndim] = True  # Pad, of as many axes, moves 20 GB/s on an H200 (measured)
    spread = (*lead, *(n for pair in zip(window.target, window.strides, strict=True) for n in pair))
    between = e.like(0, each) if around is None else e.reshape(around, spread)
    return e.reshape(e.Where(e.const(first), each, between, shape=spread), whole)


def _by_conv(e: Emitter, x: Value, w: Value, dy: Value, window: Window, group: int) -> Value | None:
    """dX on CPU where the kernel has one position and steps over none: the Conv of dY with the weights transposed.

    It gives the bits of ConvTranspose in 0.8 to 0.9 of its time; of fewer positions neither holds.
    """
    single = is_product(window) and window.source == window.target
    if not e.at.host or group > 1 or not single or prod(window.source) < _CONV_POSITIONS:
        return None
    turned = e.transpose(w, [1, 0, *range(2, 2 + window.rank)])
    whole: Value = e.op("Conv", dy, turned, shape=x.shape)
    return whole


@gradient("ConvTranspose", "x0 x1 dy0", inputs=(0, 1, 2), native=True)
def conv_transpose(e: Emitter, op: Operator, x: Value, w: Value, dy: Value) -> Sequence[Any]:
    """ConvTranspose is the input gradient of a Conv from Y to X with the same weights; so dX is that Conv of dY."""
    group = int(op.attrs.get("group", 1))
    window = transposed_window(op.attrs, x, w, dy)
    dx = None
    if e.wants(0):
        # Rows that only output_padding made reach no input; a whole stride of them would add an output to Conv.
        dx = e.op("Conv", without_tail(e, dy, window), w, group=group, shape=x.shape, **window.attributes())
    dw = weight_gradient(e, dy, x, window, group) if e.wants(1) else None
    return [dx, dw, _bias_gradient(e, dy)]


def transposed_window(attrs: Mapping[str, Any], x: Value, w: Value, y: Value) -> Window:
    """The window that slides over Y; padding is found from the sizes where the attributes leave it open."""
    window = window_by(attrs, size_of(w)[2:], size_of(y)[2:], size_of(x)[2:])
    automatic = attrs.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER")
    if not automatic and "output_shape" not in attrs:
        return window
    extra = attrs.get("output_padding") or [0] * window.rank
    full = ((n - 1) * s + p + k for n, s, p, k in zip(window.target, window.strides, extra, window.extent, strict=True))
    total = [max(size - n, 0) for size, n in zip(full, window.source, strict=True)]
    upper = attrs.get("auto_pad", "NOTSET") == "SAME_UPPER"
    begin = tuple(p // 2 if upper else p - p // 2 for p in total)
    return Window(window.kernel, window.strides, window.dilations, begin, window.source, window.target)


def without_tail(e: Emitter, y: Value, window: Window) -> Value:
    """What the window slides over, without an end of a stride and more that it does not read."""
    if all(t < s for t, s in zip(window.tail, window.strides, strict=True)):
        return y
    ends = [n - t for n, t in zip(window.source, window.tail, strict=True)]
    axes = range(2, 2 + window.rank)
    return e.op("Slice", y, e.ints(*[0] * window.rank), e.ints(*ends), e.ints(*axes), shape=(*size_of(y)[:2], *ends))


def _bias_gradient(e: Emitter, dy: Value) -> Value | None:
    if not e.wants(2):
        return None
    if lies_in_rows(e, dy):
        return e.ReduceSum(by_channel(e, dy), e.ints(1), keepdims=0)
    return e.ReduceSum(dy, e.ints(0, *range(2, len(size_of(dy)))), keepdims=0)


def _axes_but(kept: int, rank: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis != kept)


traits("QLinearConv")
traits("Conv", "ConvTranspose", product=True, weights=(1, 2), biases=(2,))
traits("Conv", weight_axes=lambda op, rank: _axes_but(0, rank))
traits("ConvTranspose", weight_axes=lambda op, rank: _axes_but(1, rank))


@range_rule("Conv")
def _conv_range(op: Operator, ranges: Ranges) -> Interval | None:
    padded = same_or_zero(op, ranges)
    return biased(weighted(padded, ranges, op.input(1), partial(_axes_but, 0)), op, ranges)


@range_rule("ConvTranspose")
def _conv_transpose_range(op: Operator, ranges: Ranges) -> Interval | None:
    if int(op.attrs.get("group", 1)) != 1:
        return None
    padded = same_or_zero(op, ranges)
    return biased(weighted(padded, ranges, op.input(1), partial(_axes_but, 1)), op, ranges)


@flops("Conv", f"{DOMAIN}::FusedConv", "ConvInteger")
def conv_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """For each element of the result a sum of products over the channels of its group and the kernel's positions."""
    w, y = inputs[1], outputs[0]
    assert w is not None and y is not None
    return 2 * prod(y) * prod(w[1:])


@flops("QLinearConv")
def quantised_conv_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """The same; W comes after scale and zero point of X."""
    return conv_flops(attrs, inputs[::3], outputs)


@flops("ConvTranspose")
def conv_transpose_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """For each element of X one product for each channel of its group's results and each position of the kernel."""
    x, w = inputs[0], inputs[1]
    assert x is not None and w is not None
    return 2 * prod(x) * prod(w[1:])
