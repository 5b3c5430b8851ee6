"""Norms of weights: how much a matrix product or convolution enlarges its input."""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import as_array, release, tensor_type
from amp_transpiler.passes.view import constants

#: Norm (L2) of the weights of one result from which on ordinary inputs (some tens) leave float16. Trained networks
#: have up to some tens; weights beyond are physical units and the like.
LARGE = 1024.0


def summed_axes(op: Operator) -> tuple[int, ...] | None:
    """The axes of its weights, in slot 1, over which a product sums; None for other operators."""
    axes, weights = traits_of(op).weight_axes, op.input(1)
    return axes(op, len(weights.shape)) if axes is not None and weights is not None and weights.shape else None


def may_be_large(variable: Variable, magnitude: float | None) -> bool:
    """Whether weights may have a norm of :data:`LARGE`. ``magnitude``: of their largest element, where it is known."""
    if magnitude is None:
        return constants.may_hold(variable)
    return not magnitude * math.sqrt(math.prod(tensor_type(constants.content(variable))[1])) < LARGE


def weight_norm(variable: Variable, axes: tuple[int, ...], magnitude: float | None) -> float:
    """The largest norm (L2) of constant weights over ``axes``; 0 for what is no float32 constant.

    Weights in which no element is large enough are looked at once, for their largest element, if its ``magnitude`` is
    not known.
    """
    data = constants.content(variable)
    if data is None or not math.prod(tensor_type(data)[1]):
        return 0.0
    array = as_array(data)
    if array.dtype != np.float32:  # stored in 16 bit: whoever did so took the product into 16 bit
        return 0.0
    summed = math.prod(array.shape[axis] for axis in axes)
    largest = max(float(array.max()), -float(array.min())) if magnitude is None else magnitude
    release(data)
    if largest * math.sqrt(summed) < LARGE:
        return 0.0
    return math.sqrt(float(np.square(array, dtype=np.float64).sum(axis=axes).max()))
