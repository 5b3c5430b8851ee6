"""Norms of weights: how much a matrix product or convolution enlarges its input."""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.passes.view import constants

#: Norm (L2) of the weights of one result from which on ordinary inputs (some tens) leave float16. Trained networks
#: have up to some tens; weights beyond are physical units and the like.
LARGE = 1024.0


def summed_axes(op: Operator) -> tuple[int, ...] | None:
    """The axes of its weights, in slot 1, over which a product sums; None for other operators."""
    axes, weights = traits_of(op).weight_axes, op.input(1)
    return axes(op, len(weights.shape)) if axes is not None and weights is not None and weights.shape else None


def weight_norm(variable: Variable, axes: tuple[int, ...], magnitude: float | None) -> float:
    """The largest norm (L2) of constant weights over ``axes``; 0 for what is no float32 constant, and where it is small
    for certain by the ``magnitude`` of the largest element."""
    data = constants.content(variable) if constants.may_hold(variable) else None
    dtype, shape = ("", ()) if data is None else tensor_type(data)
    if dtype != "float32" or not math.prod(shape):  # stored in 16 bit: whoever did so took the product into 16 bit
        return 0.0
    if magnitude is not None and magnitude * math.sqrt(math.prod(shape[axis] for axis in axes)) < LARGE:
        return 0.0
    return math.sqrt(float(np.square(as_array(data), dtype=np.float64).sum(axis=axes).max()))
