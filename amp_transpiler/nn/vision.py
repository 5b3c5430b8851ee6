"""Images made larger or smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.nn.building import (
    FLOATING,
    Input,
    append,
    appending,
    describe,
    fixed,
    integers,
    real,
    variable,
    whole,
)
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.pooling import adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d
from amp_transpiler.nn.windows import LAYOUTS, Sizes, image, numbers, per_axis
from amp_transpiler.option_checks import choice, switch

#: Paddle's names here of the layouts of an image of one axis.
_LINES = {"NCW": "NCL", "NWC": "NLC"}
#: Mode -> the number of axes, and ONNX's mode.
_MODES = {"linear": (1, "linear"), "bilinear": (2, "linear"), "trilinear": (3, "linear"), "bicubic": (2, "cubic")}


@function()
def interpolate(
    x: Variable,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
    align_mode: int = 0,
    data_format: str | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """An image resized to ``size``, or by ``scale_factor``, along each of its axes.

    ``x``: float [batch, channels, axis, …] of 1 to 3 axes. ``mode``: "nearest", "linear" (one axis), "bilinear" (two),
    "trilinear" (three), "bicubic" (two) or "area" (adaptive mean). ``align_corners``: the outermost elements lie on
    one another. ``align_mode`` of the linear modes: 0 for half a pixel in the middle of an element, 1 for
    ``place * scale``. Sizes are rounded down. The layout of one axis is also called NCW or NWC.
    """
    call = "interpolate"
    data_format = _LINES.get(str(data_format), data_format)
    rank = len(variable(call, "x", x, dtypes=FLOATING, min_rank=3).shape or ()) - 2
    if rank not in LAYOUTS:
        raise ArgumentError(f"{call}: x {describe(x)} must have 3, 4 or 5 dimensions")
    modes = ["nearest", "area", *(name for name, (axes, _) in _MODES.items() if axes == rank)]
    choice(f"{call}: mode of an image of {rank} axes", mode, modes)
    if (size is None) == (scale_factor is None):
        raise ArgumentError(f"{call}: one of size and scale_factor must be given")
    if mode == "area":
        if size is None:
            raise ArgumentError(f'{call}: mode="area" takes a size, not a scale_factor')
        pool = (adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d)[rank - 1]
        return pool(x, size, data_format=data_format)
    at, put = image(call, x, rank, data_format), appending(call)
    # Scales and sizes of all dimensions, not of the image's axes alone (attribute ``axes``): onnxruntime forgets the
    # axes when it moves a transposition past Resize.
    y = at.channels_first(put)
    apart = mode == "bicubic" and at.channels_last
    if apart:  # or it moves the transposition past Resize all the same, and has no kernel for such a cubic one
        y = put("Reshape", y, np.array([-1, 1, 0, 0], np.int64))
    inputs: list[Input]
    if size is not None:
        sizes = np.array(numbers(call, "size", size, rank), np.int64)
        lead = put("Shape", y, start=0, end=2)
        inputs = [y, None, None, put("Concat", lead, sizes, axis=0)]
    else:
        factors = [real(call, "scale_factor", factor) for factor in per_axis(scale_factor, rank)]
        if len(factors) != rank or min(factors) <= 0:
            raise ArgumentError(f"{call}: scale_factor={scale_factor!r} must be a number above 0, or {rank} of them")
        inputs = [y, None, np.array([1, 1, *factors], np.float32)]
    resized = put("Resize", *inputs, **_attributes(call, mode, align_corners, align_mode))
    if size is not None:  # which inference does not find behind a Shape
        resized.shape = (*(y.shape or ())[:2], *sizes.tolist())
    if apart:
        resized = put("Reshape", resized, np.array([-1, at.channels, 0, 0], np.int64))
    return at.as_given(put, resized)


def _attributes(call: str, mode: str, align_corners: bool, align_mode: int) -> dict[str, Any]:
    """ONNX's words for where an element of the result lies in the original."""
    if whole(call, "align_mode", align_mode, 0) > 1:
        raise ArgumentError(f"{call}: align_mode must be 0 or 1, not {align_mode}")
    if mode == "nearest":
        if align_corners:
            raise ArgumentError(f'{call}: align_corners goes with the linear and cubic modes, not with "nearest"')
        return {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    kind = _MODES[mode][1]
    if switch(f"{call}: align_corners", align_corners):
        return {"mode": kind, "coordinate_transformation_mode": "align_corners"}
    asymmetric = kind == "linear" and align_mode == 1
    return {"mode": kind, "coordinate_transformation_mode": "asymmetric" if asymmetric else "half_pixel"}


upsample = interpolate


@function()
def pixel_shuffle(x: Variable, upscale_factor: int, data_format: str = "NCHW", *, name: str | None = None) -> Variable:
    """[batch, channels * r * r, height, width] as [batch, channels, height * r, width * r] (Shi et al. 2016).

    r is ``upscale_factor``; element (i, j) of a block comes from channel c * r * r + i * r + j.
    """
    call = "pixel_shuffle"
    at, factor = image(call, x, 2, data_format), whole(call, "upscale_factor", upscale_factor)
    if at.channels % factor**2:
        raise ArgumentError(f"{call}: the {at.channels} channels of {describe(x)} are no multiple of {factor}²")
    put = appending(call)
    attrs = {"blocksize": factor, "mode": "CRD"}
    return at.as_given(put, put("DepthToSpace", at.channels_first(put), **attrs))


@function()
def grid_sample(
    x: Variable,
    grid: Variable,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = True,
    *,
    name: str | None = None,
) -> Variable:
    """Elements of an image at the places of ``grid``, -1 to 1 from one end of an axis to the other.

    ``x``: float [batch, channels, height, width] or [batch, channels, depth, height, width]; ``grid``: float
    [batch, rows, columns, (x, y)], or with a dimension and a coordinate more. ``mode``: "bilinear" or "nearest";
    ``padding_mode``: "zeros", "border" or "reflection".
    """
    call = "grid_sample"
    rank = len(variable(call, "x", x, dtypes=FLOATING, min_rank=4).shape or ())
    variable(call, "grid", grid, dtypes=FLOATING, rank=rank)
    attrs = {
        "mode": {"bilinear": "linear", "nearest": "nearest"}[choice(f"{call}: mode", mode, ("bilinear", "nearest"))],
        "padding_mode": choice(f"{call}: padding_mode", padding_mode, ("zeros", "border", "reflection")),
        "align_corners": int(switch(f"{call}: align_corners", align_corners)),
    }
    return append(call, "GridSample", [x, grid], attrs=attrs)


@function()
def unfold(
    x: Variable,
    kernel_sizes: Sizes,
    strides: Sizes = 1,
    paddings: Sizes = 0,
    dilations: Sizes = 1,
    *,
    name: str | None = None,
) -> Variable:
    """The windows of an image, as columns: [batch, channels * height * width of a window, windows].

    ``x``: float [batch, channels, height, width]. Sizes: one number for both axes, or two; ``paddings`` also four (top,
    left, bottom, right).
    """
    call = "unfold"
    channels = fixed(call, "x", variable(call, "x", x, dtypes=FLOATING, rank=4), 1)
    kernel, steps, spread = (
        numbers(call, name, value, 2)
        for name, value in (("kernel_sizes", kernel_sizes), ("strides", strides), ("dilations", dilations))
    )
    given = list(paddings) if isinstance(paddings, (list, tuple)) else [paddings] * 4
    pads = integers(call, "paddings", given * 2 if len(given) == 2 else given, 0)
    if len(pads) != 4:
        raise ArgumentError(f"{call}: paddings={paddings!r} must be one number, two or four")
    size = kernel[0] * kernel[1]
    picked = np.tile(np.eye(size, dtype=np.float32), (channels, 1)).reshape(channels * size, 1, *kernel)
    attrs = {"group": channels, "strides": steps, "pads": pads, "dilations": spread}
    put = appending(call)
    windows = put("Conv", x, picked.astype(numpy_dtype(str(x.dtype))), **attrs)
    return put("Reshape", windows, np.array([0, channels * size, -1], np.int64))
