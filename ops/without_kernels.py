"""Operators of which CUDA has no kernel from opset 22 on, where its bfloat16 convolutions begin, in others that it has.

onnxruntime takes a kernel that was last registered for version 12 of an operator for no later version.
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.decompose import Entry, Parts
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ops.pool import window_by_runtime

#: Behind every end, as Slice takes it.
_END = 2**63 - 1


def max_pool(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """Along one axis after the other, the maximum of the slices that the taps of all windows read: the same bits.

    The first and the last element stand for the padding beside them: a window that reaches it holds them too, where it
    has no gaps. GraphError for others, and where open sizes decide on the padding.
    """
    if len([v for v in op.outputs if v is not None]) > 1:
        raise d.error("its indices are read")
    rank = len(op.attrs["kernel_shape"])
    kernel = [int(k) for k in op.attrs["kernel_shape"]]
    strides, dilations = ([int(n) for n in op.attrs.get(name) or [1] * rank] for name in ("strides", "dilations"))
    begin, end = _padding(d, op, x, rank)
    for axis, (size, stride, gap) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
        before, after = begin[axis - 2], end[axis - 2]
        if gap > 1 and size > 1 and (before > 0 or after > 0):
            raise d.error("its windows have gaps, and reach into the padding")
        if before > 0 or after > 0:
            first = [d.Slice(x, [0], [1], [axis])] * before
            last = [d.Slice(x, [-1], [_END], [axis])] * after
            x = d.Concat(*first, x, *last, axis=axis)
        behind = [(size - 1 - tap) * gap - min(after, 0) for tap in range(size)]
        taps = [
            d.Slice(x, [tap * gap], [-left if left else _END], [axis], [stride]) if tap or left or stride > 1 else x
            for tap, left in enumerate(behind)
        ]
        x = d.Max(*taps) if size > 1 else taps[0]
    return [x if x.producer is not None and x in d.made else d.Identity(x)]


def _padding(d: Parts, op: Operator, x: Variable, rank: int) -> tuple[list[int], list[int]]:
    """The padding before each axis and behind it; behind, less than 0 is what no window reads."""
    made = op.output(0)
    source, target = (static(v.shape[2:] if v is not None and v.shape else None) for v in (x, made))
    window = window_by_runtime(op.attrs, source, target) if source and target else None
    if window is not None:
        return list(window.begin), list(window.overhang)
    automatic = str(op.attrs.get("auto_pad", "NOTSET"))
    if op.attrs.get("ceil_mode", 0) or automatic.startswith("SAME"):
        raise d.error("its padding goes by sizes that are open")
    pads = op.attrs.get("pads") if automatic == "NOTSET" else None
    pads = [int(n) for n in pads or [0] * 2 * rank]
    return pads[:rank], pads[rank:]


def instance_normalization(d: Parts, op: Operator, x: Variable, scale: Variable, bias: Variable) -> list[Variable]:
    """LayerNormalization of the elements of each channel of each image, times its scale, plus its bias."""
    if d.rank(x) < 3:
        raise d.error("its input has no axes besides batch and channels")
    rows = d.Reshape(x, [0, 0, -1])
    sizes = static(x.shape[2:] if x.shape else None)
    width = [math.prod(sizes)] if sizes else d.Slice(d.Shape(rows), [2], [3], [0])
    unit = d.Expand(d.const([1.0], x.dtype), width)
    y = d.LayerNormalization(rows, unit, axis=-1, epsilon=d.number("epsilon", 1e-5))
    for type_, factor, neutral in (("Mul", scale, 1), ("Add", bias, 0)):
        known = constant_array(factor)
        if known is None or not np.array_equal(known, np.full_like(known, neutral)):
            y = d.add(type_, y, d.Unsqueeze(factor, [1]))
    return [d.Reshape(y, [0, 0, *sizes] if sizes else d.Shape(x))]


_FORMS: dict[str, Entry] = {"MaxPool": max_pool, "InstanceNormalization": instance_normalization}


def form_of(type_: str) -> Entry | None:
    """What writes an operator of ai.onnx in others."""
    return _FORMS.get(type_)
