"""Operators that ONNX tried out and withdrew: converters of Core ML, Keras and PyTorch wrote them, and onnxruntime has
them until opset 9. From opset 10 on they are what they are made of.

Their definitions: the experimental operators of ONNX 1.2, and onnxruntime's kernels for what these leave open.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.nodes import Operator, Variable


@decomposition("Affine")
def affine(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    return [d.Add(d.Mul(x, d.number("alpha", 1.0)), d.number("beta", 0.0))]


@decomposition("Scale")
def scale(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    return [d.Mul(x, d.number("scale", 1.0))]


@decomposition("ImageScaler")
def image_scaler(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """A factor, and a number for each channel."""
    bias = np.array(op.attrs.get("bias", [0.0])).reshape(-1, 1, 1)
    return [d.Add(d.Mul(x, d.number("scale", 1.0)), d.const(bias, x.dtype))]


@decomposition("ParametricSoftplus")
def parametric_softplus(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    return [d.Mul(d.Softplus(d.Mul(x, d.number("beta", 1.0))), d.number("alpha", 1.0))]


@decomposition("ScaledTanh")
def scaled_tanh(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    return [d.Mul(d.Tanh(d.Mul(x, d.number("beta", 1.0))), d.number("alpha", 1.0))]


@decomposition("Crop")
def crop(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """What lies within the borders left, top, right and bottom, or so many rows and columns from the first two on."""
    left, top, right, bottom = (int(width) for width in op.attrs["border"])
    size = op.attrs.get("scale")
    ends = [top + int(size[0]), left + int(size[1])] if size else [-bottom, -right]
    ends = [end or np.iinfo(np.int64).max for end in ends]
    return [d.Slice(x, [top, left], ends, [2, 3])]


@decomposition("DynamicSlice")
def dynamic_slice(
    d: Parts, op: Operator, x: Variable, starts: Variable, ends: Variable, axes: Variable | None = None
) -> list[Variable]:
    return [d.Slice(x, starts, ends, axes)]
