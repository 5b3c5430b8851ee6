"""Norms of weights: how much a matrix product or convolution enlarges its input."""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array, release, tensor_type
from amp_transpiler.passes.view import constants

#: Norm (L2) of the weights of one result from which on ordinary inputs (some tens) leave float16. Trained networks
#: have up to some tens; weights beyond are physical units and the like.
LARGE = 1024.0


def weights(op: Operator, name: str) -> tuple[int, tuple[int, ...] | int] | None:
    """The slot of the weights, and the axes over which a product sums; None for other operators."""
    if name == "Gemm":
        return 1, 1 if op.attrs.get("transB") else 0
    rank = len(op.inputs[1].shape or ()) if len(op.inputs) > 1 and op.inputs[1] is not None else 0
    if name == "MatMul" and rank:
        return 1, max(rank - 2, 0)
    if name in ("Conv", "ConvTranspose") and rank > 2:
        return 1, tuple(axis for axis in range(rank) if axis != (0 if name == "Conv" else 1))
    return None


def weight_norm(variable: Variable, axes: tuple[int, ...] | int) -> float:
    """The largest norm (L2) of constant weights over ``axes``; 0 for what is no float32 constant.

    Weights in which no element is large enough are looked at once, for their largest element.
    """
    data = constants.content(variable)
    if data is None or not math.prod(tensor_type(data)[1]):
        return 0.0
    array = as_array(data)
    if array.dtype != np.float32:  # stored in 16 bit: whoever did so took the product into 16 bit
        return 0.0
    summed = math.prod(array.shape[axis] for axis in ((axes,) if isinstance(axes, int) else axes))
    largest = max(float(array.max()), -float(array.min()))
    release(data)
    if largest * math.sqrt(summed) < LARGE:
        return 0.0
    return math.sqrt(float(np.square(array, dtype=np.float64).sum(axis=axes).max()))
