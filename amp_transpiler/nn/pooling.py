"""Pooling over the axes of an image [batch, channels, axis, …], or, with ``data_format``, with its channels last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.building import Builder, append, appending, constant, moved, real
from amp_transpiler.nn.calls import function, member
from amp_transpiler.nn.windows import Image, Padding, Sizes, check_fit, image, numbers, padding, per_axis
from amp_transpiler.option_checks import choice, switch


def _pool(
    call: str,
    type_: str,
    rank: int,
    x: Variable,
    kernel_size: Any,
    stride: Any,
    pad: Any,
    ceil_mode: bool,
    data_format: str | None,
    **attrs: Any,
) -> Variable:
    at = image(call, x, rank, data_format)
    kernel = numbers(call, "kernel_size", kernel_size, rank)
    strides = kernel if stride is None else numbers(call, "stride", stride, rank)
    ones = [1] * rank
    around = padding(at, pad, kernel, strides, ones)
    pads: list[int] | None = around.get("pads")
    if pads is not None and any(pads[i] >= kernel[i % rank] for i in range(2 * rank)):
        raise ArgumentError(f"{call}: padding {pad!r} must be smaller than the kernel {kernel}")
    check_fit(at, pads, kernel, ones)
    attrs |= {"kernel_shape": kernel, "strides": strides, **around}
    if switch(f"{call}: ceil_mode", ceil_mode):
        attrs["ceil_mode"] = 1
    put = appending(call)
    return at.as_given(put, put(type_, at.channels_first(put), **attrs))


def _max_pool(
    rank: int,
    x: Variable,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    data_format: str | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """Maximum over windows. ``stride``: the kernel's size by default.

    ``padding``: one integer, one for each axis, two for each axis (before, behind, before, …),
    "SAME" or "VALID". ``ceil_mode``: count windows that reach over the edge.
    """
    return _pool(f"max_pool{rank}d", "MaxPool", rank, x, kernel_size, stride, padding, ceil_mode, data_format)


def _avg_pool(
    rank: int,
    x: Variable,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    exclusive: bool = True,
    divisor_override: float | None = None,
    data_format: str | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """Mean over windows; arguments as :func:`max_pool{0}d`.

    ``exclusive``: padding does not count as elements. ``divisor_override``: divide each window's sum by this.
    """
    call = f"avg_pool{rank}d"
    include = int(not switch(f"{call}: exclusive", exclusive))
    if divisor_override is not None:
        if ceil_mode:
            raise ArgumentError(f"{call}: divisor_override goes with whole windows, not with ceil_mode")
        divisor = real(call, "divisor_override", divisor_override)
        include = 1
    y = _pool(
        call,
        "AveragePool",
        rank,
        x,
        kernel_size,
        stride,
        padding,
        ceil_mode,
        data_format,
        count_include_pad=include,
    )
    if divisor_override is None:
        return y
    size = math.prod(numbers(call, "kernel_size", kernel_size, rank))
    return append(call, "Mul", [y, constant(y, size / divisor)])


max_pool1d, max_pool2d, max_pool3d = (member(_max_pool, rank, f"max_pool{rank}d", "nn.max_pool") for rank in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (member(_avg_pool, rank, f"avg_pool{rank}d") for rank in (1, 2, 3))


@function()
def global_avg_pool2d(x: Variable, *, name: str | None = None) -> Variable:
    """Mean over the whole image: [batch, channels, 1, 1]."""
    return append("global_avg_pool2d", "GlobalAveragePool", [image("global_avg_pool2d", x, 2).x])


@function()
def global_max_pool2d(x: Variable, *, name: str | None = None) -> Variable:
    """Maximum over the whole image: [batch, channels, 1, 1]."""
    return append("global_max_pool2d", "GlobalMaxPool", [image("global_max_pool2d", x, 2).x])


# -- adaptive -------------------------------------------------------------------------------------------------------
def _adaptive(call: str, mean: bool, rank: int, x: Variable, output_size: Any, data_format: str | None) -> Variable:
    at = image(call, x, rank, data_format)
    wanted = _wanted(at, output_size, rank)
    put = appending(call)
    if all(size == 1 for size in wanted):
        y = put(f"Global{'Average' if mean else 'Max'}Pool", at.channels_first(put))
        return at.as_given(put, y)
    sizes = [known if size is None else size for size, known in zip(wanted, at.known_sizes(), strict=True)]
    y = at.channels_first(put)
    axes = list(zip(at.known_sizes(), sizes, strict=True))
    regular = [_regular(size, out) for size, out in axes]
    if None not in regular:
        kernel, strides = ([both[i] for both in regular if both] for i in (0, 1))
        attrs = {"kernel_shape": kernel, "strides": strides}
        y = put("AveragePool" if mean else "MaxPool", y, **attrs)
    else:
        y = (_means if mean else _maxima)(put, y, axes)
    return at.as_given(put, y)


def _wanted(at: Image, output_size: Any, rank: int) -> list[int | None]:
    """The size of each axis; None for that of the image."""
    items = per_axis(output_size, rank)
    given = iter(numbers(at.call, "output_size", [1 if item is None else item for item in items], rank))
    return [None if item is None else size for item, size in zip(items, given, strict=True)]


def _windows(size: int, out: int) -> list[tuple[int, int]]:
    """Start and end of each window: from floor(i * size / out) to ceil((i + 1) * size / out)."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def _regular(size: int, out: int) -> tuple[int, int] | None:
    """The size and the stride of the windows of an axis, where they are alike."""
    windows = _windows(size, out)
    kernels, strides = {end - start for start, end in windows}, {b - a for (a, _), (b, _) in pairwise(windows)} or {1}
    return (kernels.pop(), strides.pop()) if len(kernels) == len(strides) == 1 and 0 not in strides else None


def _means(put: Builder, x: Variable, axes: Sequence[tuple[int, int]]) -> Variable:
    """Means of windows: along each axis the product with a [size, out] matrix, then over the elements of each window.

    Numbers of the matrix are a power of two, which 16 bit holds as it does not hold a third.
    """
    counts = np.ones([1] * len(axes))
    for i, (size, out) in enumerate(axes):
        if size == out:
            continue
        windows = _windows(size, out)
        share = 2.0 ** -math.ceil(math.log2(max(end - start for start, end in windows)))
        matrix = np.zeros((size, out))
        for column, (start, end) in enumerate(windows):
            matrix[start:end, column] = share
        x = _along(put, x, 2 + i, matrix)
        counts = counts * np.reshape(matrix.sum(0), [out if j == i else 1 for j in range(len(axes))])
    return put("Div", x, constant(x, counts))


def _along(put: Builder, x: Variable, axis: int, matrix: np.ndarray) -> Variable:
    """The product with a matrix along one axis."""
    last = len(x.shape or ()) - 1
    y = put("MatMul", moved(put, x, axis, last), constant(x, matrix))
    return moved(put, y, last, axis)


def _maxima(put: Builder, x: Variable, axes: Sequence[tuple[int, int]]) -> Variable:
    """Maxima of windows, along one axis after the other."""
    for i, (size, out) in enumerate(axes):
        if size != out:
            x = _axis_maximum(put, x, 2 + i, size, out)
    return x


def _axis_maximum(put: Builder, x: Variable, axis: int, size: int, out: int) -> Variable:
    """Maxima of windows along one axis: a slice for each."""
    pieces = []
    for start, end in _windows(size, out):
        bounds = [np.array([number], np.int64) for number in (start, end, axis)]
        piece = put("Slice", x, *bounds)
        if end - start > 1:
            piece = put("ReduceMax", piece, bounds[2], keepdims=1)
        pieces.append(piece)
    return put("Concat", *pieces, axis=axis)


class _Adaptive(NamedTuple):
    kind: str
    rank: int

    @property
    def name(self) -> str:
        return f"adaptive_{self.kind}_pool{self.rank}d"

    @property
    def text(self) -> str:
        return "Mean" if self.kind == "avg" else "Maximum"


def _adaptive_pool(
    kind: _Adaptive,
    x: Variable,
    output_size: int | Sequence[int | None] = 1,
    data_format: str | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """{0.text} over windows that give ``output_size``; all of the image by default.

    Window i of an axis reaches from floor(i * size / out) to ceil((i + 1) * size / out). ``output_size``:
    one integer or one for each axis, None to keep one. Sizes are known, unless the image is one window.
    """
    return _adaptive(kind.name, kind.kind == "avg", kind.rank, x, output_size, data_format)


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (
    member(_adaptive_pool, kind, kind.name) for kind in (_Adaptive("avg", rank) for rank in (1, 2, 3))
)
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (
    member(_adaptive_pool, kind, kind.name, "nn.max_pool") for kind in (_Adaptive("max", rank) for rank in (1, 2, 3))
)


@paddle_arguments("nn.input", "nn.cudnn")
def pool2d(
    x: Variable,
    pool_size: Sizes = -1,
    pool_type: str = "max",
    pool_stride: Sizes = 1,
    pool_padding: Padding = 0,
    global_pooling: bool = False,
    ceil_mode: bool = False,
    exclusive: bool = True,
    data_format: str = "NCHW",
    name: str | None = None,
) -> Variable:
    """:func:`max_pool2d` (``pool_type`` "max") or :func:`avg_pool2d` ("avg"), or with ``global_pooling`` one window
    over the whole image, as Paddle's layer of this name."""
    call = "pool2d"
    choice(f"{call}: pool_type", pool_type, ("max", "avg"))
    if switch(f"{call}: global_pooling", global_pooling):
        whole_image = adaptive_max_pool2d if pool_type == "max" else adaptive_avg_pool2d
        return whole_image(x, 1, data_format=data_format, name=name)
    if pool_type == "max":
        return max_pool2d(x, pool_size, pool_stride, pool_padding, ceil_mode, data_format=data_format, name=name)
    return avg_pool2d(x, pool_size, pool_stride, pool_padding, ceil_mode, exclusive, data_format=data_format, name=name)
