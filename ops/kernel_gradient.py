"""The gradient of a convolution's weights, in the forms that are fast here and there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any, TypeAlias

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.channel_rows import by_channel, exchanged, is_by_channel, lies_in_rows
from amp_transpiler.ops.common import LONG, MOST_PRODUCTS, once, padded, padded_axis, size_of, sliced, summed_to
from amp_transpiler.ops.gpu_kernels import of_some, product, product_of_rows
from amp_transpiler.ops.window import Window

_Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

#: Kernels of more positions than this are unrolled no further: their weight gradient is one Conv.
_MOST_TAPS = 32
#: Fewer input channels than this leave a GEMM per position mostly idle; the positions then share one GEMM.
_FEW_CHANNELS = 16
#: Elements of the largest unfolded input (64 MiB in fp32).
_MOST_UNFOLDED = 2**24
#: On a GPU, elements that are gathered at once (256 MiB in 16 bit).
_MOST_GATHERED = 2**27
#: So many elements are worth three kernels more; a GPU gathers 240 a nanosecond (measured).
_WORTH_KERNELS = 2**22
#: The largest kernel that cuDNN's fast kernels take (measured: 28 positions along an axis, and not 56).
_LARGEST_KERNEL = 32


def is_product(window: Window) -> bool:
    """Whether a convolution multiplies each position that it reads by the weights."""
    return prod(window.kernel) == 1 and not any(window.pads)


def rows_read(e: Emitter, x: Value, window: Window) -> Value:
    """The rows of what a kernel of one position reads."""
    if not lies_in_rows(e, x):
        return by_channel(e, window.read(e, window.pad(e, x, 2), window.taps[0], 2))
    key = f"{x.name} read by {window}"
    if key not in e.shared:
        read = window.read(e, window.pad(e, exchanged(e, x), 2), window.taps[0], 2)
        e.shared[key] = (e.reshape(read, (size_of(read)[0], prod(size_of(read)[1:]))),)
    return e.shared[key][0]


def weight_gradient(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """``dW[o, i, tap] = sum over n, p of dY[n, o, p] * X[n, i, p * stride + tap * dilation - begin]``.

    ``x`` is [N, group * I, *source], ``dy`` [N, O, *target]; gives [O, I, *kernel]. Every form sums over batch
    and positions inside one GEMM or Conv. Which one is a matter of speed.

    On a GPU a GEMM where there is one kernel position, of all images or of each, whichever moves less. Else Conv moves
    the fewest bytes; but cuDNN has no fast kernel for a large kernel or a dilated one, which dY is where windows are
    many or have strides. Of 328 ms of a step of ResNet-50 on an H200 seven such took 170, the ten others 6. For them
    what windows read is gathered, and multiplied. Where that is less, only positions along one axis are gathered, of X,
    and those along the other of dY: of a depthwise kernel, of a large one, of one that makes few channels of many.

    On CPU (measured, one thread) a GEMM per kernel position reaches the speed of GEMM alone from 16 input channels on;
    with fewer, one GEMM over all positions is up to 4 times faster; Conv is slower than either by 2 but needs no nodes
    per position. Of a kernel of one position the products of images, added up, spare the transposed copies: up to 1.6
    times faster where the images are the larger part.
    """
    batch, channels = size_of(x)[0], size_of(x)[1] // group
    taps = prod(window.kernel)
    if batch == 0:  # nothing to add up, where onnxruntime's Conv leaves what memory holds
        return e.zeros((size_of(dy)[1], channels, *window.kernel), x.dtype)
    if group == taps == 1:
        apart = _turning_outweighs(e, x, dy) if e.at.fused else x.dtype not in HALF and _images_outweigh(x, dy)
        return (by_images if apart else by_one_gemm)(e, x, dy, window)
    if any(map(e.hangs, (*window.target, *[batch] * e.at.fused))):  # others list in constants what windows read
        return _of_some(e, x, by_convolution(e, x, dy, window, group))
    if e.at.fused and not (group == 1 and set(window.strides) == {1} and max(window.target) <= _LARGEST_KERNEL):
        by_axes = window.rank > 1 and window.strides[-1] == 1 and _fewer_by_axes(x, dy, window, group)
        form = by_gathering if not by_axes else by_axis if group > 1 else by_axis_of_all
        return form(e, x, dy, window, group)
    if e.at.fused or taps > _MOST_TAPS:
        return _of_some(e, x, by_convolution(e, x, dy, window, group))
    if group > 1:
        return by_grouped_gemms(e, x, dy, window, group)
    if channels >= _FEW_CHANNELS:
        return by_gemms(e, x, dy, window)
    if prod((batch, channels, taps, *window.target)) <= _MOST_UNFOLDED:
        return by_unfolding(e, x, dy, window)
    return _of_some(e, x, by_convolution(e, x, dy, window, group))


def _of_some(e: Emitter, x: Value, dw: Value) -> Value:
    """The gradient of a kernel, of images of which the run may find that there are none."""
    return of_some(e, x, dw) if e.hangs(size_of(x)[0]) else dw


def by_convolution(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """One Conv of X with dY as its kernel, batch and channels exchanged; strides and dilations change roles."""
    batch, channels, outputs = size_of(x)[0], size_of(x)[1] // group, size_of(dy)[1]
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
        e.reshape(by_channel(e, dy), (outputs, batch, *window.target)),
        group=group,
        strides=list(window.dilations),
        dilations=list(window.strides),
        pads=window.pads,
        shape=(channels, outputs, *sizes),
    )
    if tuple(sizes) != window.kernel:  # an unread tail of X looks like further kernel positions
        axes, first = e.ints(*range(2, 2 + window.rank)), e.ints(*[0] * window.rank)
        dw = e.op("Slice", dw, first, e.ints(*window.kernel), axes, shape=(channels, outputs, *window.kernel))
    return e.transpose(dw, swapped)


def by_gathering(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """What the window reads, gathered as [I, tap, N * P] of each group. One GEMM, or several where so much would take
    too much memory. Of few channels, beside which places are many, lines are gathered: first along the last axis, for
    each position of the kernel there."""
    batch, channels, outputs, rank = size_of(x)[0], size_of(x)[1], size_of(dy)[1], window.rank
    positions, last, end, first = batch * prod(window.target), window.kernel[-1], 1, rank
    read = e.cast(padded(e, exchanged(e, x), [0, 0, *window.begin], [0, 0, *window.end]), x.dtype)
    sizes = size_of(read)[1:]
    if channels < _FEW_CHANNELS:
        end, first = window.target[-1], rank - 1
        at = np.add.outer(np.arange(last) * window.dilations[-1], np.arange(end) * window.strides[-1])
        sizes = (*sizes[:-1], last)
        read = e.Gather(read, e.const(at, "int32"), axis=rank + 1, shape=(channels, *sizes, end))
    read = e.reshape(read, (channels, prod(sizes), end))
    of_tap, of_position = _places(window, batch, sizes, first)
    left, parts = e.reshape(by_channel(e, dy), (group, outputs // group, positions)), list[Value]()
    most = max(1, _MOST_GATHERED // (channels * positions))
    for some in (of_tap[start : start + most] for start in range(0, len(of_tap), most)):
        places = _shared_places(e, f"places {some.tolist()} of {window} in {batch}, {first}", some, *of_position)
        columns = e.Gather(read, places, axis=1, shape=(channels, *size_of(places), end))
        columns = e.reshape(columns, (group, channels // group * len(some), positions))
        parts.append(e.reshape(product_of_rows(e, left, columns), (outputs, channels // group, len(some))))
    whole = parts[0] if len(parts) == 1 else e.Concat(*parts, axis=2)
    return e.reshape(whole, (outputs, channels // group, *window.kernel))


def _fewer_by_axes(x: Value, dy: Value, window: Window, group: int) -> bool:
    """Whether :func:`by_axis` moves fewer elements than :func:`by_gathering`, by far and by many."""
    inputs, outputs, lines = size_of(x)[1] // group, size_of(dy)[1] // group, prod(window.target[:-1])
    taps, reach = prod(window.kernel), window.extent[-1] - 1
    wide, whole = window.target[-1] + reach, (inputs * taps + outputs) * lines * window.target[-1]
    at_once = inputs * prod(window.kernel[:-1]) + outputs * window.kernel[-1]
    if group == 1 and at_once * lines * wide * size_of(x)[0] > _MOST_GATHERED:
        return False
    moved = at_once * wide + outputs * (wide + reach)
    apart = moved * lines + inputs * outputs * taps
    return 3 * apart < 2 * whole and (whole - apart) * group * size_of(x)[0] > _WORTH_KERNELS


def by_axis(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """Lines of X, gathered for each position of the kernel but along the last axis, times dY, moved along that axis for
    each position there: ``sum over n, p, q of X[n, p + tap, q] * dY[n, p, q - tap']``. Of 7 x 7 positions 7 + 7 are
    gathered instead of 49. The window has no stride along the last axis. A product for each image, and their sum: that
    needs no transposed copies. Some at once, where all would take too much memory."""
    lead, taps, last, reach = _leading(window), prod(window.kernel[:-1]), window.kernel[-1], window.extent[-1] - 1
    batch, inputs, outputs = size_of(x)[0], size_of(x)[1] // group, size_of(dy)[1] // group
    lines, wide = prod(lead.target), window.target[-1] + reach
    read = e.cast(padded(e, x, [0, 0, *window.begin], [0, 0, *window.end]), x.dtype)
    moved = e.cast(padded_axis(e, dy, window.rank + 1, reach, reach), dy.dtype)
    sizes = (1, *size_of(read)[2:-1])
    of_tap, of_line = _places(lead, 1, sizes, lead.rank)
    above = _shared_places(e, f"lines {lead} in {sizes}", of_tap, *of_line)
    back, starts = np.arange(last)[::-1] * window.dilations[-1], np.arange(lines) * (wide + reach)
    along = _shared_places(e, f"moves {back.tolist(), lines, wide}", back, starts, np.arange(wide))

    read = e.reshape(read, (batch * group, inputs * prod(sizes) * wide))
    moved = e.reshape(moved, (batch * group, outputs * lines * (wide + reach)))

    def of(start: int, end: int) -> Value:
        x = e.reshape(sliced(e, read, 0, start, end), ((end - start) * inputs, prod(sizes), wide))
        dy = e.reshape(sliced(e, moved, 0, start, end), ((end - start) * outputs, lines * (wide + reach)))
        right = e.Gather(x, above, axis=1, shape=((end - start) * inputs, taps, lines, wide))
        left = e.Gather(dy, along, axis=1, shape=((end - start) * outputs, last, lines * wide))
        left = e.reshape(left, (end - start, outputs * last, lines * wide))
        return product_of_rows(e, left, e.reshape(right, (end - start, inputs * taps, lines * wide)))

    most = min(max(1, _MOST_GATHERED // ((inputs * taps + outputs * last) * lines * wide)), MOST_PRODUCTS)
    parts = [of(start, min(start + most, batch * group)) for start in range(0, batch * group, most)]
    whole, made = parts[0] if len(parts) == 1 else e.Concat(*parts, axis=0), (group * outputs, last, inputs, taps)
    dw = summed_to(e, e.reshape(whole, (batch, *made)), made, (batch, *made))
    return e.reshape(e.transpose(dw, [0, 2, 3, 1]), (group * outputs, inputs, *window.kernel))


def by_axis_of_all(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """The same without groups: of all images in one product. They are one more axis, along which a kernel has one
    position."""
    batch, channels, outputs = size_of(x)[0], size_of(x)[1], size_of(dy)[1]
    begins = ((1, window.kernel), (1, window.strides), (1, window.dilations), (0, window.begin))
    sizes = ((batch, window.source), (batch, window.target))
    whole = Window(*((first, *rest) for first, rest in (*begins, *sizes)))
    x = e.reshape(exchanged(e, x), (1, channels, *whole.source))
    dy = e.reshape(exchanged(e, dy), (1, outputs, *whole.target))
    return e.reshape(by_axis(e, x, dy, whole, group), (outputs, channels, *window.kernel))


def _leading(window: Window) -> Window:
    """The window along all axes but the last."""
    each = (window.kernel, window.strides, window.dilations, window.begin, window.source, window.target)
    return Window(*(numbers[:-1] for numbers in each))


def _shared_places(e: Emitter, key: str, first: _Ints, *others: _Ints) -> Value:
    """The sums of all combinations, made once for all windows of a kind."""
    return once(e, key, lambda: _outer_sum(e, first, *others))


def _places(window: Window, batch: int, sizes: Sequence[int], axes: int) -> tuple[_Ints, list[_Ints]]:
    """Where in [N, *sizes] windows read, along the first ``axes`` axes, and further along the position of the kernel
    on the last one: the sum of a number for each position of the kernel, one for each image and one for each window
    along each axis."""
    taps, step, along = np.array(window.taps), prod(sizes[1 + axes :]), list[_Ints]()
    of_tap = taps[:, -1] * (axes < window.rank)
    for axis in reversed(range(axes)):
        of_tap = of_tap + taps[:, axis] * window.dilations[axis] * step
        along.append(np.arange(window.target[axis]) * window.strides[axis] * step)
        step *= sizes[1 + axis]
    return of_tap, [np.arange(batch) * step, *along[::-1]]


def _outer_sum(e: Emitter, first: _Ints, *others: _Ints) -> Value:
    """The sums of all combinations, [len(first), others]; many are made in the run."""
    rest = prod(len(each) for each in others)
    if len(first) * rest <= LONG or not others:
        return e.const(reduce(np.add.outer, (first, *others)).reshape(len(first), rest), "int32")
    below = e.reshape(_outer_sum(e, *others), (rest,))
    return e.Add(e.const(first[:, None], "int32"), below, shape=(len(first), rest))


def by_one_gemm(e: Emitter, x: Value, dy: Value, window: Window) -> Value:
    """For kernels of one position: a GEMM [O, N * P] x [N * P, I]."""
    dw = product_of_rows(e, by_channel(e, dy), rows_read(e, x, window))
    return e.reshape(dw, (size_of(dy)[1], size_of(x)[1], *window.kernel))


def _images_outweigh(x: Value, dy: Value) -> bool:
    """Whether what the product of an image reads is more than twice as large as what it makes."""
    channels, (outputs, *target) = size_of(x)[1], size_of(dy)[1:]
    return prod(target) * (channels + outputs) > 2 * channels * outputs


def _turning_outweighs(e: Emitter, x: Value, dy: Value) -> bool:
    """Whether what is not there by channel is larger than the products of the images."""
    turned = sum(prod(size_of(v)) for v in (x, dy) if not is_by_channel(e, v))
    return turned > size_of(x)[0] * size_of(x)[1] * size_of(dy)[1]


def by_images(e: Emitter, x: Value, dy: Value, window: Window) -> Value:
    """For kernels of one position: a GEMM [O, P] x [P, I] per image, and their sum."""
    (batch, channels), outputs, positions = size_of(x)[:2], size_of(dy)[1], prod(window.target)
    read = window.read(e, window.pad(e, x, 2), window.taps[0], 2)
    right = e.reshape(read, (batch, channels, positions))
    products = product(e, e.reshape(dy, (batch, outputs, positions)), right, trans_b=True)
    summed = summed_to(e, products, (outputs, channels), (batch, outputs, channels))
    return e.reshape(summed, (outputs, channels, *window.kernel))


def by_gemms(e: Emitter, x: Value, dy: Value, window: Window) -> Value:
    """One GEMM [O, N * P] x [N * P, I] per kernel position. Channels last: each slice then copies whole rows."""
    channels, outputs, rank = size_of(x)[1], size_of(dy)[1], window.rank
    positions = size_of(dy)[0] * prod(window.target)
    last = window.pad(e, e.transpose(x, [0, *range(2, 2 + rank), 1]), 1)
    left = e.reshape(e.transpose(dy, [1, 0, *range(2, 2 + rank)]), (outputs, positions))
    parts = [e.MatMul(left, e.reshape(window.read(e, last, tap, 1), (positions, channels))) for tap in window.taps]
    return _stacked(e, parts, (outputs, channels), window)


def by_grouped_gemms(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """One GEMM per kernel position, batched over the groups."""
    channels, outputs = size_of(x)[1] // group, size_of(dy)[1] // group
    positions = size_of(dy)[0] * prod(window.target)
    swapped = [1, 0, *range(2, 2 + window.rank)]
    first = e.transpose(window.pad(e, x, 2), swapped)
    left = e.reshape(e.transpose(dy, swapped), (group, outputs, positions))
    parts = []
    for tap in window.taps:
        rows = e.reshape(window.read(e, first, tap, 2), (group, channels, positions))
        parts.append(product(e, left, rows, trans_b=True))
    return _stacked(e, parts, (group * outputs, channels), window)


def by_unfolding(e: Emitter, x: Value, dy: Value, window: Window) -> Value:
    """The kernel positions beside each other as channels, then one GEMM.

    Where values are 16 bit it contracts batch and positions at once; otherwise there is a product per image
    (which needs no transposed copies) and their sum.
    """
    (batch, channels), outputs, rank = size_of(x)[:2], size_of(dy)[1], window.rank
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
