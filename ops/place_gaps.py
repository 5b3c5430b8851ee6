"""Operators in others, where a place has kernels of these alone: CUDA in bfloat16, or from opset 22 on.

There its bfloat16 convolutions begin, and onnxruntime takes a kernel that was last registered for version 12 of an
operator for no later version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.decompose import Entry, Parts
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ops.common import Maybe
from amp_transpiler.ops.elementwise import limited
from amp_transpiler.ops.norm_parts import epsilon_of
from amp_transpiler.ops.place_images import conv_transpose, depth_to_space, nearest_resize, pad, space_to_depth
from amp_transpiler.ops.pool import window_by_runtime

#: Behind every end, as Slice takes it.
_END = 2**63 - 1
#: More channels than any image has.
_CHANNELS = 1 << 16


def max_pool(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """Along one axis after the other, the maximum of what the taps of all windows read: the same bits.

    The first and the last element stand for the padding beside them: a window that reaches it holds them too, where it
    has no gaps. GraphError for others, and where open sizes decide on the padding.
    """
    if len([v for v in op.outputs if v is not None]) > 1:
        raise d.error("its indices are read")
    rank = len(op.attrs["kernel_shape"])
    kernel = [int(k) for k in op.attrs["kernel_shape"]]
    strides, dilations = ([int(n) for n in op.attrs.get(name) or [1] * rank] for name in ("strides", "dilations"))
    begin, end = _padding(d, op, x, dilations)
    for axis, (size, stride, gap) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
        before, after, whole = begin[axis - 2], end[axis - 2], d.size(x, axis)
        padded = before > 0 or after > 0
        if gap > 1 and size > 1 and padded:
            raise d.error("its windows have gaps, and reach into the padding")
        if padded and whole is not None:
            count = (whole + before + after - (size - 1) * gap - 1) // stride + 1
            places = np.arange(count) * stride - before
            taps = [_taken(d, x, axis, np.clip(places + tap * gap, 0, whole - 1)) for tap in range(size)]
        else:
            if padded:
                first = [d.Slice(x, [0], [1], [axis])] * before if before > 0 else []
                last = [d.Slice(x, [-1], [_END], [axis])] * after if after > 0 else []
                x = d.Concat(*first, x, *last, axis=axis)
            behind = [(size - 1 - tap) * gap - min(after, 0) for tap in range(size)]
            taps = [
                d.Slice(x, [tap * gap], [-left if left else _END], [axis], [stride]) if tap or left or stride > 1 else x
                for tap, left in enumerate(behind)
            ]
        x = d.Max(*taps) if size > 1 else taps[0]
    return [x if x.producer is not None and x in d.made else d.Identity(x)]


def _taken(d: Parts, x: Variable, axis: int, places: np.ndarray) -> Variable:
    """What lies at these places of an axis."""
    if np.array_equal(places, np.arange(d.size(x, axis) or 0)):
        return x
    return d.Gather(x, d.const(places), axis=axis)


def _padding(d: Parts, op: Operator, x: Variable, dilations: list[int]) -> tuple[list[int], list[int]]:
    """The padding before each axis and behind it; behind, less than 0 is what no window reads."""
    made = op.output(0)
    source, target = (static(v.shape[2:] if v is not None and v.shape else None) for v in (x, made))
    window = window_by_runtime(op.attrs, source, target) if source and target else None
    if window is not None:
        return list(window.begin), list(window.overhang)
    automatic, rank = str(op.attrs.get("auto_pad", "NOTSET")), len(dilations)
    reach = [(int(n) - 1) * gap for n, gap in zip(op.attrs["kernel_shape"], dilations, strict=True)]
    strides = [int(n) for n in op.attrs.get("strides") or [1] * rank]
    if automatic.startswith("SAME"):  # as many as there are places to begin
        if max(strides) > 1:
            raise d.error("its padding goes by sizes that are open")
        less, more = [n // 2 for n in reach], [n - n // 2 for n in reach]
        return (less, more) if automatic == "SAME_UPPER" else (more, less)
    pads = op.attrs.get("pads") if automatic == "NOTSET" else None
    pads = [int(n) for n in pads or [0] * 2 * rank]
    begin, end = pads[:rank], pads[rank:]
    if op.attrs.get("ceil_mode", 0):  # one more window where the last does not reach the end
        if any(n < stride - 1 + after for n, stride, after in zip(reach, strides, end, strict=True)):
            raise d.error("its last window may lie in the padding, by sizes that are open")
        end = [after + stride - 1 for after, stride in zip(end, strides, strict=True)]
    return begin, end


def instance_normalization(d: Parts, op: Operator, x: Variable, scale: Variable, bias: Variable) -> list[Variable]:
    """LayerNormalization of the elements of each channel of each image, times its scale, plus its bias."""
    if d.rank(x) < 3:
        raise d.error("its input has no axes besides batch and channels")
    rows = d.Reshape(x, [0, 0, -1])
    sizes = static(x.shape[2:] if x.shape else None)
    width = [math.prod(sizes)] if sizes else d.Slice(d.Shape(rows), [2], [3], [0])
    unit = d.Expand(d.const([1.0], x.dtype), width)
    y = d.LayerNormalization(rows, unit, axis=-1, epsilon=epsilon_of(op))
    for type_, factor, neutral in (("Mul", scale, 1), ("Add", bias, 0)):
        known = constant_array(factor)
        if known is None or not np.array_equal(known, np.full_like(known, neutral)):
            y = d.add(type_, y, d.Unsqueeze(factor, [1]))
    return [d.Reshape(y, [0, 0, *sizes] if sizes else d.Shape(x))]


#: What writes operators in others, which compute the same.
LOST: Mapping[str, Entry] = {"MaxPool": max_pool, "InstanceNormalization": instance_normalization}


# -- operators without a kernel in a 16-bit type --------------------------------------------------------------
def clip(d: Parts, op: Operator, x: Variable, low: Maybe = None, high: Maybe = None) -> list[Variable]:
    """Max and Min."""
    if low is None and high is None:
        raise d.error("it has no bounds")
    return [limited(d, x, low, high)]


def global_average_pool(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """The mean over all axes but those of batch and channels."""
    return [d.ReduceMean(x, list(range(2, d.rank(x))))]


def batch_normalization(
    d: Parts, op: Operator, x: Variable, scale: Variable, bias: Variable, mean: Variable, variance: Variable
) -> list[Variable]:
    """A sum with a number of each channel, times its slope: what is added rounds as x itself does, and the slope
    changes no place where the result is 0. Where a slope is 0, or all is computed, the product first."""
    if _trains(op):
        raise d.error("it takes the statistics of its input")
    axes, known = list(range(1, d.rank(x) - 1)), affine_map(op)
    if known is None:
        factor = d.Div(scale, d.Sqrt(d.Add(variance, epsilon_of(op))))
        added = d.Sub(bias, d.Mul(mean, factor))
        slope, shift = (d.Unsqueeze(each, axes) if axes else each for each in (factor, added))
        return [d.Add(d.Mul(x, slope), shift)]
    with np.errstate(all="ignore"):
        moved = known[1] / known[0]
    first = bool(np.isfinite(moved.astype(np.float32)).all())
    slope, number = (
        d.const(each.reshape(-1, *[1] * len(axes)), x.dtype) for each in (known[0], moved if first else known[1])
    )
    return [d.Mul(d.Add(x, number), slope) if first else d.Add(d.Mul(x, slope), number)]


def _trains(norm: Operator) -> bool:
    """Whether a BatchNormalization takes the statistics of its input: before opset 14 those are its further outputs."""
    return bool(norm.attrs.get("training_mode", 0)) or any(v is not None for v in norm.outputs[1:])


def affine_map(norm: Operator) -> tuple[np.ndarray, np.ndarray] | None:
    """The factor of each channel, and what is added to it, of a BatchNormalization by constants, in float64."""
    if _trains(norm) or len(norm.inputs) != 5:
        return None
    held = [constant_array(v, _CHANNELS) for v in norm.inputs[1:]]
    if any(each is None for each in held):
        return None
    scale, bias, mean, variance = (each.astype(np.float64) for each in held if each is not None)
    with np.errstate(all="ignore"):
        slope = scale / np.sqrt(variance + epsilon_of(norm))
    return slope, bias - mean * slope


def leaky_relu(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """The larger of x and alpha x, where alpha is at most 1."""
    alpha = d.number("alpha", 0.01)
    if alpha > 1:
        raise d.error(f"its alpha is {alpha}")
    return [d.Max(x, d.Mul(x, alpha))]


def prelu(d: Parts, op: Operator, x: Variable, slope: Variable) -> list[Variable]:
    """The larger of x and its multiple, where no slope is above 1; else what is above 0, and a multiple of the rest."""
    known = constant_array(slope, _CHANNELS)
    if known is not None and (known <= 1).all():
        return [d.Max(x, d.Mul(x, slope))]
    return [d.Add(d.Max(x, d.const(0, x.dtype)), d.Mul(d.Min(x, d.const(0, x.dtype)), slope))]


def reciprocal(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """1 / x."""
    return [d.Div(d.const(1, x.dtype), x)]


@dataclass(frozen=True)
class Lacking:
    """How an operator is written where its kernel lacks.

    ``parts``: the types of the operators that are written; ``opset``: from which one on they have their form.
    """

    write: Entry
    parts: tuple[str, ...]
    opset: int = 13


#: What is written in others where the place has no kernel in 16 bit.
LACKING: Mapping[str, Lacking] = {
    "BatchNormalization": Lacking(batch_normalization, ("Add", "Mul"), 14),
    "Clip": Lacking(clip, ("Max", "Min"), 11),
    "ConvTranspose": Lacking(conv_transpose, ("Conv", "Reshape", "Slice", "Transpose")),
    "DepthToSpace": Lacking(depth_to_space, ("Reshape", "Transpose")),
    "GlobalAveragePool": Lacking(global_average_pool, ("ReduceMean",), 18),
    "LeakyRelu": Lacking(leaky_relu, ("Max", "Mul")),
    "PRelu": Lacking(prelu, ("Add", "Max", "Min", "Mul")),
    "Pad": Lacking(pad, ("Concat", "Expand", "Slice")),
    "Reciprocal": Lacking(reciprocal, ("Div",)),
    "Resize": Lacking(nearest_resize, ("Expand", "Reshape", "Unsqueeze")),
    "SpaceToDepth": Lacking(space_to_depth, ("Reshape", "Transpose")),
}
