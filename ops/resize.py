"""Resize. It is linear in its input and separable: along each axis a small matrix that depends on sizes alone.

The gradient is the product with the transposed matrix of each resized axis. Coordinates and weights:
https://onnx.ai/onnx/operators/onnx__Resize.html; where that leaves a choice, onnxruntime's
(``core/providers/cpu/tensor/upsamplebase.h``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from amp_transpiler.errors import GradientError
from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.onnx_inference import computed_size
from amp_transpiler.ir.opdef import gradient, lowering_rule, traits
from amp_transpiler.ops.common import Grads, integers, numbers, shape_of, size_of

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def _rounds(op: Operator) -> bool:
    """Whether sizes may be rounded products of scales."""
    given = op.input(2)
    scales = constant_array(given)
    return scales is not None and bool((scales * 2.0**12 % 1 != 0).any())


@lowering_rule("Resize", native=True, when=_rounds, itself=True)
def sized(
    e: Emitter, op: Operator, x: Value, roi: Value | None, scales: Value | None, sizes: Value | None = None
) -> list[Value] | None:
    """By sizes where the type inference that onnxruntime makes of the scales is not what its kernel computes of them.

    The kernel divides the sizes in float32, which gives these scales again.
    """
    known, shape = e.known(op.inputs[2]), static(x.shape)
    axes = _axes(op, len(shape or ()))
    if known is None or shape is None or known.size != len(axes):
        return None
    computed = [computed_size(shape[axis], scale) for axis, scale in zip(axes, known, strict=True)]
    if all(math.floor(shape[axis] * float(s)) == new for axis, s, new in zip(axes, known, computed, strict=True)):
        return None
    whole = dict(enumerate(shape)) | dict(zip(axes, computed, strict=True))
    made: Value = e.op("Resize", x, roi, None, e.ints(*computed), outputs=None, shape=[*whole.values()], **op.attrs)
    return [made]


@gradient("Resize", reads="x1 x2 x3 dy0", inputs=[0], native=True)
def resize(e: Emitter, op: Operator, roi: Value | None, scales: Value | None, sizes: Value | None, dy: Value) -> Grads:
    shape, resized = shape_of(e, 0), size_of(dy)
    maps: dict[int, Array] = {}
    if e.at.host and tuple(resized) == tuple(shape):
        return [dy]  # there its kernel copies what keeps its shape, whatever the scales
    for axis, scale in _scales(e, op, shape, resized).items():
        if scale != 1:  # onnxruntime leaves such an axis as it is, whatever its region
            region = _region(e, op, axis, len(shape))
            maps[axis] = _matrix(op, shape[axis], resized[axis], scale, region)
    return [through_maps(e, dy, maps)]


def through_maps(e: Emitter, dy: Value, maps: dict[int, Array]) -> Value:
    """``dy`` times the transpose of the matrix [resized, original] of each axis."""
    dy, maps = _repeats_summed(e, dy, maps)
    for axis, matrix in sorted(maps.items(), key=lambda item: item[1].shape[1] / item[1].shape[0]):
        shape = size_of(dy)
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        new = (*shape[:axis], matrix.shape[1], *shape[axis + 1 :])
        if after == 1:
            flat = e.MatMul(e.reshape(dy, (before, shape[axis])), e.const(matrix, dy.dtype))
        else:
            flat = e.MatMul(e.const(matrix.T, dy.dtype), e.reshape(dy, (before, shape[axis], after)))
        dy = e.reshape(flat, new)
    return dy


def _repeats_summed(e: Emitter, dy: Value, maps: dict[int, Array]) -> tuple[Value, dict[int, Array]]:
    """The axes that repeat every element equally often, as one sum; the maps that are left."""
    repeats = {axis: _repeat(matrix) for axis, matrix in maps.items()}
    repeats = {axis: count for axis, count in repeats.items() if count}
    if not repeats:
        return dy, maps
    apart: list[int] = []
    summed: list[int] = []
    kept: list[int] = []
    for axis, size in enumerate(size_of(dy)):
        count = repeats.get(axis, 1)
        apart.append(size // count)
        kept.append(size // count)
        if axis in repeats:
            summed.append(len(apart))
            apart.append(count)
    total = e.reshape(e.ReduceSum(e.reshape(dy, apart), e.ints(*summed), keepdims=1), kept)
    return total, {axis: matrix for axis, matrix in maps.items() if axis not in repeats}


def _repeat(matrix: Array) -> int:
    """How often the map repeats every element, 0 where it does something else."""
    resized, original = matrix.shape
    if resized % original:
        return 0
    count = resized // original
    return count if np.array_equal(matrix, np.repeat(np.eye(original), count, axis=0)) else 0


# -- what the operator's inputs say --------------------------------------------------------------------
def _axes(op: Operator, rank: int) -> list[int]:
    return [int(axis) % rank for axis in op.attrs.get("axes") or range(rank)]


def _scales(e: Emitter, op: Operator, shape: tuple[int, ...], resized: tuple[int, ...]) -> dict[int, float]:
    """The scale of each axis that is resized; from the sizes where no scales are given."""
    axes = _axes(op, len(shape))
    known = numbers(e, op, 1, "scales of Resize", "give sizes")
    if known is not None and known.size:
        return dict(zip(axes, (float(scale) for scale in known), strict=True))
    policy = op.attrs.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return {axis: resized[axis] / shape[axis] for axis in axes}
    sizes = integers(e, op, 2, "sizes of Resize") or []
    scales = [size / shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    return dict.fromkeys(axes, min(scales) if policy == "not_larger" else max(scales))


def _region(e: Emitter, op: Operator, axis: int, rank: int) -> tuple[float, float] | None:
    """Start and end, as fractions of the axis, of the region that is cropped and resized."""
    if op.attrs.get("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize":
        return None
    known = numbers(e, op, 0, "region of Resize", "give sizes")
    if known is None:
        raise GradientError(f"'{op.label}': coordinate_transformation_mode 'tf_crop_and_resize' needs an roi")
    axes = _axes(op, rank)
    place = axes.index(axis)
    return float(known[place]), float(known[len(axes) + place])


# -- the matrix of one axis ------------------------------------------------------------------------------
def _matrix(op: Operator, size: int, resized: int, scale: float, region: tuple[float, float] | None) -> Array:
    """[resized, size]: each row holds the weights of the elements that one element of the result is made of."""
    at = _coordinates(op, size, resized, scale, region)
    mode = op.attrs.get("mode", "nearest")
    if mode == "nearest":
        nearest = _rounded(at, op.attrs.get("nearest_mode", "round_prefer_floor"))
        rows: Array = np.eye(size)[np.clip(nearest, 0, size - 1)]
    else:
        cubic = mode == "cubic"
        narrow = min(scale, 1.0) if op.attrs.get("antialias", 0) else 1.0
        excluded = bool(op.attrs.get("exclude_outside", 0)) and (cubic or narrow < 1)
        factor = float(op.attrs.get("cubic_coeff_a", -0.75))
        rows = _weights(at, size, narrow, factor if cubic else None, excluded)
    if region is not None:
        rows[(at < 0) | (at > size - 1)] = 0  # the extrapolation value, a constant
    return rows


def _coordinates(op: Operator, size: int, resized: int, scale: float, region: tuple[float, float] | None) -> Array:
    """Where in the original axis each element of the resized one lies."""
    mode = op.attrs.get("coordinate_transformation_mode", "half_pixel")
    # Nearest elements are found in fp32, as onnxruntime does: which side a tie falls on hangs on it.
    kind: type[np.floating[Any]] = np.float32 if op.attrs.get("mode", "nearest") == "nearest" else np.float64
    x: Array = np.arange(resized).astype(kind)
    s, half = kind(scale), kind(0.5)
    if mode == "asymmetric":
        return x / s
    if mode == "align_corners":
        return x * kind(size - 1) / kind(resized - 1) if resized > 1 else np.zeros(1, kind)
    if region is not None:
        start, end = (kind(r) for r in region)
        if resized == 1:
            at: Array = half * (start + end) * np.full(1, size - 1, kind)
        else:
            at = start * kind(size - 1) + x * (end - start) * kind(size - 1) / kind(resized - 1)
        return at
    if mode == "pytorch_half_pixel" and resized == 1:
        return np.zeros(1, kind)
    at = (x + half) / s - half
    if mode == "half_pixel_symmetric":
        whole = kind(scale * size)
        at = kind(size) / kind(2) * (kind(1) - kind(resized) / whole) + at
    return at


def _rounded(at: Array, mode: str) -> Array:
    if mode == "floor":
        return np.floor(at).astype(np.int64)
    if mode == "ceil":
        return np.ceil(at).astype(np.int64)
    if mode == "round_prefer_ceil":
        return np.floor(at + at.dtype.type(0.5)).astype(np.int64)
    return np.ceil(at - at.dtype.type(0.5)).astype(np.int64)


def _weights(at: Array, size: int, narrow: float, cubic: float | None, excluded: bool) -> Array:
    """The kernel's weights around each coordinate; outside the axis its edge is read, or nothing where ``excluded``.

    ``narrow`` < 1 stretches the kernel by its inverse (antialiasing), and the weights are scaled to a sum of 1.
    """
    reach = math.ceil((1 if cubic is None else 2) / narrow)
    taps = np.floor(at)[:, None] + np.arange(-reach, reach + 2)
    distance = np.abs(taps - at[:, None]) * narrow
    weights = np.clip(1 - distance, 0, None) if cubic is None else _cubic(distance, cubic)
    if excluded:
        weights = np.where((taps >= 0) & (taps < size), weights, 0)
    if excluded or narrow < 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    rows = np.zeros((len(at), size))
    np.add.at(rows, (np.arange(len(at))[:, None], np.clip(taps, 0, size - 1).astype(np.int64)), weights)
    return rows


def _cubic(distance: Array, a: float) -> Array:
    """Keys' cubic convolution kernel (https://ieeexplore.ieee.org/document/1163711)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


traits("Resize", settings=(1, 2), carries_large=True)
traits("Upsample", settings=(1,), carries_large=True)
