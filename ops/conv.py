"""Convolutions: gradients of Conv and ConvTranspose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, biased, same_or_zero, weighted
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import SlotShapes, channel_rule, flops, gradient, range_rule, traits
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.channel_rows import by_channel, by_image, exchanged, lies_in_rows
from amp_transpiler.ops.common import padded, size_of
from amp_transpiler.ops.gpu_kernels import product
from amp_transpiler.ops.window import Window, window_by, window_of

#: Kernels of more positions than this are unrolled no further: their weight gradient is one Conv.
_MOST_TAPS = 32
#: Fewer input channels than this leave a GEMM per position mostly idle; the positions then share one GEMM.
_FEW_CHANNELS = 16
#: Fewer positions than this and Conv splits its sums differently from ConvTranspose, and is no faster.
_CONV_POSITIONS = 128
#: Elements of the largest unfolded input (64 MiB in fp32).
_MOST_UNFOLDED = 2**24


@gradient("Conv", "x0 x1 dy0", inputs=(0, 1, 2), native=True)
def conv(e: Emitter, op: Operator, x: Value, w: Value, dy: Value) -> Sequence[Any]:
    """dX is the transposed convolution of dY, dW the correlation of X with dY, dB the sum of dY."""
    group = int(op.attrs.get("group", 1))
    window = window_of(op, _spatial(w), _spatial(x), _spatial(dy))
    dx = None
    if e.wants(0):
        dx = _by_product(e, x, w, dy, window, group) or _by_conv(e, x, w, dy, window, group)
        dx = dx or window.scatter(e, dy, w, group)
    dw = weight_gradient(e, x, dy, window, group) if e.wants(1) else None
    return [dx, dw, _bias_gradient(e, dy)]


@channel_rule("Conv")
def conv_by_channel(e: Emitter, op: Operator, x: Value, w: Value, b: Value | None = None) -> Sequence[Any]:
    """With a kernel of one position: the product of weights and rows."""
    shape = e.output_shapes[0]
    assert shape is not None
    window = window_of(op, _spatial(w), _spatial(x), shape[2:])
    if int(op.attrs.get("group", 1)) != 1 or not _is_product(window):
        return []
    weights = e.reshape(w, size_of(w)[:2])
    if b is None:
        rows = product(e, weights, _rows_read(e, x, window))
    else:
        column = e.reshape(b, (shape[1], 1))
        rows = e.Gemm(weights, _rows_read(e, x, window), column, shape=(shape[1], shape[0] * prod(shape[2:])))
    return [by_image(e, rows, shape)]


def _is_product(window: Window) -> bool:
    return prod(window.kernel) == 1 and not any(window.pads)


def _rows_read(e: Emitter, x: Value, window: Window) -> Value:
    """The rows of what a kernel of one position reads."""
    if not lies_in_rows(e, x):
        return by_channel(e, window.read(e, window.pad(e, x, 2), window.taps[0], 2))
    key = f"{x.name} read by {window}"
    if key not in e.shared:
        read = window.read(e, exchanged(e, x), window.taps[0], 2)
        e.shared[key] = (e.reshape(read, (size_of(read)[0], prod(size_of(read)[1:]))),)
    return e.shared[key][0]


def _by_product(e: Emitter, x: Value, w: Value, dy: Value, window: Window, group: int) -> Value | None:
    """dX where dY lies in rows and the kernel has one position: a product, with zeros between strides."""
    apart = any(s > 1 for s in window.strides)
    whole = window.source == tuple(t * s for t, s in zip(window.target, window.strides, strict=True))
    if group > 1 or not _is_product(window) or not lies_in_rows(e, dy):
        return None
    if apart and (not whole or dy.dtype == "bfloat16"):  # CUDA pads no bfloat16
        return None
    rows = product(e, e.reshape(w, size_of(w)[:2]), by_channel(e, dy), trans_a=True)
    if apart:
        pairs = [n for t in window.target for n in (t, 1)]
        split = e.reshape(rows, (size_of(x)[1], size_of(x)[0], *pairs))
        behind = [0, 0, *(n for s in window.strides for n in (0, s - 1))]
        rows = e.reshape(
            padded(e, split, [0] * len(behind), behind), (size_of(x)[1], prod(size_of(x)) // size_of(x)[1])
        )
    return by_image(e, rows, size_of(x))


def _by_conv(e: Emitter, x: Value, w: Value, dy: Value, window: Window, group: int) -> Value | None:
    """dX on CPU where the kernel has one position and steps over none: the Conv of dY with the weights transposed.

    It gives the bits of ConvTranspose in 0.8 to 0.9 of its time; of fewer positions neither holds.
    """
    single = _is_product(window) and window.source == window.target
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
    window = window_by(attrs, _spatial(w), _spatial(y), _spatial(x))
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
    assert y.shape is not None
    ends = [n - t for n, t in zip(window.source, window.tail, strict=True)]
    axes = range(2, 2 + window.rank)
    return e.op("Slice", y, e.ints(*[0] * window.rank), e.ints(*ends), e.ints(*axes), shape=(*y.shape[:2], *ends))


def _bias_gradient(e: Emitter, dy: Value) -> Value | None:
    if not e.wants(2):
        return None
    if lies_in_rows(e, dy):
        return e.ReduceSum(by_channel(e, dy), e.ints(1), keepdims=0)
    return e.ReduceSum(dy, e.ints(0, *range(2, len(size_of(dy)))), keepdims=0)


def weight_gradient(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """``dW[o, i, tap] = sum over n, p of dY[n, o, p] * X[n, i, p * stride + tap * dilation - begin]``.

    ``x`` is [N, group * I, *source], ``dy`` [N, O, *target]; gives [O, I, *kernel]. Every form sums over batch
    and positions inside one GEMM or Conv. Which one is a matter of speed. On a GPU it is the bytes: a GEMM where
    there is one kernel position, else Conv, as the other forms read and write a copy of X for each position. On CPU
    (measured, one thread) a GEMM per kernel position reaches the speed of GEMM alone from 16 input channels on; with
    fewer, one GEMM over all positions is up to 4 times faster; Conv is slower than either by 2 but needs no nodes per
    position. Of a kernel of one position the products of images, added up, spare the transposed copies: up to 1.6 times
    faster where the images are the larger part.
    """
    assert x.shape is not None
    channels = x.shape[1] // group
    taps = prod(window.kernel)
    if group == taps == 1 and (e.at.fused or x.dtype in HALF or not _images_outweigh(x, dy)):
        return by_one_gemm(e, x, dy, window)
    if group == taps == 1:
        return by_images(e, x, dy, window)
    if e.at.fused or taps > _MOST_TAPS:
        return by_convolution(e, x, dy, window, group)
    if group > 1:
        return by_grouped_gemms(e, x, dy, window, group)
    if channels >= _FEW_CHANNELS:
        return by_gemms(e, x, dy, window)
    if prod((x.shape[0], channels, taps, *window.target)) <= _MOST_UNFOLDED:
        return by_unfolding(e, x, dy, window)
    return by_convolution(e, x, dy, window, group)


def by_convolution(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """One Conv of X with dY as its kernel, batch and channels exchanged; strides and dilations change roles."""
    assert x.shape is not None and dy.shape is not None
    batch, channels = x.shape[0], x.shape[1] // group
    if batch == 0:  # nothing to add up, where onnxruntime's Conv leaves what memory holds
        return e.zeros((dy.shape[1], channels, *window.kernel), x.dtype)
    if 1 in (group, channels):
        x = by_channel(e, x)
    else:
        split = e.reshape(x, (batch, group, channels, prod(window.source)))
        x = e.transpose(split, [2, 1, 0, 3])
    x = e.reshape(x, (channels, group * batch, *window.source))
    swapped = [1, 0, *range(2, 2 + window.rank)]
    padded = [n + b + o for n, b, o in zip(window.source, window.begin, window.end, strict=True)]
    sizes = [
        (n - (t - 1) * s - 1) // d + 1
        for n, t, s, d in zip(padded, window.target, window.strides, window.dilations, strict=True)
    ]
    dw = e.op(
        "Conv",
        x,
        e.reshape(by_channel(e, dy), (dy.shape[1], batch, *window.target)),
        group=group,
        strides=list(window.dilations),
        dilations=list(window.strides),
        pads=window.pads,
        shape=(channels, dy.shape[1], *sizes),
    )
    if tuple(sizes) != window.kernel:  # an unread tail of X looks like further kernel positions
        axes = e.ints(*range(2, 2 + window.rank))
        dw = e.op(
            "Slice",
            dw,
            e.ints(*[0] * window.rank),
            e.ints(*window.kernel),
            axes,
            shape=(channels, dy.shape[1], *window.kernel),
        )
    return e.transpose(dw, swapped)


def by_one_gemm(e: Emitter, x: Value, dy: Value, window: Window) -> Value:
    """For kernels of one position: a GEMM [O, N * P] x [N * P, I]."""
    assert x.shape is not None and dy.shape is not None
    dw = product(e, by_channel(e, dy), _rows_read(e, x, window), trans_b=True)
    return e.reshape(dw, (dy.shape[1], x.shape[1], *window.kernel))


def _images_outweigh(x: Value, dy: Value) -> bool:
    """Whether what the product of an image reads is more than twice as large as what it makes."""
    channels, (outputs, *target) = size_of(x)[1], size_of(dy)[1:]
    return prod(target) * (channels + outputs) > 2 * channels * outputs


def by_images(e: Emitter, x: Value, dy: Value, window: Window) -> Value:
    """For kernels of one position: a GEMM [O, P] x [P, I] per image, and their sum."""
    (batch, channels), outputs, positions = size_of(x)[:2], size_of(dy)[1], prod(window.target)
    read = window.read(e, window.pad(e, x, 2), window.taps[0], 2)
    right = e.reshape(read, (batch, channels, positions))
    products = product(e, e.reshape(dy, (batch, outputs, positions)), right, trans_b=True)
    return e.reshape(e.reduce_sum(products, [0]), (outputs, channels, *window.kernel))


def by_gemms(e: Emitter, x: Value, dy: Value, window: Window) -> Value:
    """One GEMM [O, N * P] x [N * P, I] per kernel position. Channels last: each slice then copies whole rows."""
    assert x.shape is not None and dy.shape is not None
    channels, outputs, rank = x.shape[1], dy.shape[1], window.rank
    positions = dy.shape[0] * prod(window.target)
    last = window.pad(e, e.transpose(x, [0, *range(2, 2 + rank), 1]), 1)
    left = e.reshape(e.transpose(dy, [1, 0, *range(2, 2 + rank)]), (outputs, positions))
    parts = [e.MatMul(left, e.reshape(window.read(e, last, tap, 1), (positions, channels))) for tap in window.taps]
    return _stacked(e, parts, (outputs, channels), window)


def by_grouped_gemms(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """One GEMM per kernel position, batched over the groups."""
    assert x.shape is not None and dy.shape is not None
    channels, outputs = x.shape[1] // group, dy.shape[1] // group
    positions = dy.shape[0] * prod(window.target)
    swapped = [1, 0, *range(2, 2 + window.rank)]
    first = e.transpose(window.pad(e, x, 2), swapped)
    left = e.reshape(e.transpose(dy, swapped), (group, outputs, positions))
    parts = []
    for tap in window.taps:
        rows = e.reshape(window.read(e, first, tap, 2), (group, channels, positions))
        parts.append(product(e, left, rows, trans_b=True))
    return _stacked(e, parts, (dy.shape[1], channels), window)


def by_unfolding(e: Emitter, x: Value, dy: Value, window: Window) -> Value:
    """The kernel positions beside each other as channels, then one GEMM.

    Where values are 16 bit it contracts batch and positions at once; otherwise there is a product per image
    (which needs no transposed copies) and their sum.
    """
    assert x.shape is not None and dy.shape is not None
    batch, channels, outputs, rank = x.shape[0], x.shape[1], dy.shape[1], window.rank
    positions, taps = prod(window.target), len(window.taps)
    whole = x.dtype in HALF
    if whole:
        swapped = [1, 0, *range(2, 2 + rank)]
        x, dy = e.transpose(x, swapped), e.transpose(dy, swapped)
    padded = window.pad(e, x, 2)
    shape = (channels, batch * positions) if whole else (batch, channels, positions)
    unfolded = e.op(
        "Concat", *(e.reshape(window.read(e, padded, tap, 2), shape) for tap in window.taps), axis=0 if whole else 1
    )
    if whole:
        dw = e.op("Gemm", e.reshape(dy, (outputs, batch * positions)), unfolded, transB=1)
    else:
        products = e.MatMul(e.reshape(dy, (batch, outputs, positions)), e.transpose(unfolded, [0, 2, 1]))
        dw = e.reduce_sum(products, [0])
    dw = e.transpose(e.reshape(dw, (outputs, taps, channels)), [0, 2, 1])
    return e.reshape(dw, (outputs, channels, *window.kernel))


def _stacked(e: Emitter, parts: Sequence[Value], shape: tuple[int, int], window: Window) -> Value:
    """Matrices [O, I], one per kernel position, as [O, I, *kernel]."""
    if len(parts) == 1:
        return e.reshape(parts[0], (*shape, *window.kernel))
    columns = [e.reshape(part, (*shape, 1)) for part in parts]
    return e.reshape(e.op("Concat", *columns, axis=2), (*shape, *window.kernel))


def _spatial(value: Value) -> tuple[int, ...]:
    assert value.shape is not None
    return value.shape[2:]


def _axes_but(kept: int, rank: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis != kept)


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


@flops("Conv", f"{DOMAIN}::FusedConv")
def conv_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """For each element of the result a sum of products over the channels of its group and the kernel's positions."""
    w, y = inputs[1], outputs[0]
    assert w is not None and y is not None
    return 2 * prod(y) * prod(w[1:])


@flops("ConvTranspose")
def conv_transpose_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """For each element of X one product for each channel of its group's results and each position of the kernel."""
    x, w = inputs[0], inputs[1]
    assert x is not None and w is not None
    return 2 * prod(x) * prod(w[1:])
