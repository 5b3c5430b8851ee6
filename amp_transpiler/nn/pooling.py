"""Pooling over images [batch, channels, height, width]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError
from ..ir.program import Variable
from .building import FLOATING, append, check_window, fixed, pads, pair, variable


def _pool(call: str, type_: str, x: Variable, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
          **attrs: Any) -> Variable:  # fmt: skip
    _image(call, x)
    kernel = pair(call, "kernel_size", kernel_size)
    strides = kernel if stride is None else pair(call, "stride", stride)
    pad = pads(call, padding)
    if any(pad[i] >= kernel[i % 2] for i in range(4)):
        raise ArgumentError(f"{call}: padding {padding!r} must be smaller than the kernel {kernel}")
    check_window(call, x, kernel, pad, [1, 1])
    attrs |= {"kernel_shape": kernel, "strides": strides, "pads": pad}
    if ceil_mode:
        attrs["ceil_mode"] = 1
    return append(call, type_, [x], attrs=attrs)


def max_pool2d(x: Variable, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
               padding: int | Sequence[int] = 0, ceil_mode: bool = False) -> Variable:  # fmt: skip
    """Maximum over windows. ``stride``: the kernel's size by default.

    ``padding``: one int, (height, width), or (top, bottom, left, right). ``ceil_mode``: count windows that
    reach over the edge.
    """
    return _pool("max_pool2d", "MaxPool", x, kernel_size, stride, padding, ceil_mode)


def avg_pool2d(x: Variable, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None = None,
               padding: int | Sequence[int] = 0, ceil_mode: bool = False,
               exclusive: bool = True) -> Variable:  # fmt: skip
    """Mean over windows; arguments as :func:`max_pool2d`. ``exclusive``: padding does not count as elements."""
    include = 0 if exclusive else 1
    return _pool("avg_pool2d", "AveragePool", x, kernel_size, stride, padding, ceil_mode, count_include_pad=include)


def global_avg_pool2d(x: Variable) -> Variable:
    """Mean over the whole image: [batch, channels, 1, 1]."""
    return append("global_avg_pool2d", "GlobalAveragePool", [_image("global_avg_pool2d", x)])


def global_max_pool2d(x: Variable) -> Variable:
    """Maximum over the whole image: [batch, channels, 1, 1]."""
    return append("global_max_pool2d", "GlobalMaxPool", [_image("global_max_pool2d", x)])


def _image(call: str, x: Variable) -> Variable:
    return variable(call, "x", x, dtypes=FLOATING, rank=4)


def adaptive_avg_pool2d(x: Variable, output_size: int | Sequence[int] = 1) -> Variable:
    """Mean over equal windows that give ``output_size``, which divides the image; all of it by default."""
    call = "adaptive_avg_pool2d"
    _image(call, x)
    wanted = pair(call, "output_size", output_size)
    if wanted == [1, 1]:
        return append(call, "GlobalAveragePool", [x])
    sizes = [fixed(call, "x", x, 2), fixed(call, "x", x, 3)]
    if any(size % out for size, out in zip(sizes, wanted, strict=True)):
        raise ArgumentError(f"{call}: an image of {sizes} cannot be divided into {wanted} equal windows")
    kernel = [size // out for size, out in zip(sizes, wanted, strict=True)]
    return append(call, "AveragePool", [x], attrs={"kernel_shape": kernel, "strides": kernel})
