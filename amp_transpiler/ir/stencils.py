"""Constants of which products make differences: derivatives, Laplace and Sobel filters, wavelets.

Each row takes a few elements off others, and adds up to nothing. What a network learns adds up to something.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from amp_transpiler.ir.constant_data import held_data
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import as_array

#: Elements that a row takes at most, and what it adds up to at most beside their magnitudes.
_TAPS, _BALANCED = 32, 1e-6
#: Elements of the largest tensor that is looked through.
_LARGEST = 1 << 20


def is_stencil(op: Operator, slot: int, variable: Variable) -> bool:
    """Whether a tensor with content that a product reads in this slot has rows most of which make differences."""
    shape, axes = static(variable.shape), _summed(op, slot, len(variable.shape or ()))
    if not shape or not axes or math.prod(shape) > _LARGEST:
        return False
    data = held_data(variable)
    if data is None:
        return False
    rows = np.asarray(as_array(data), np.float64)
    size, taps = np.abs(rows).sum(axis=axes), (rows != 0).sum(axis=axes)
    balanced = (taps <= _TAPS) & (np.abs(rows.sum(axis=axes)) <= _BALANCED * size)
    return bool(balanced[taps > 0].sum() * 2 > (taps > 0).sum())


def _summed(op: Operator, slot: int, rank: int) -> Sequence[int]:
    """The axes of a tensor in this slot over which the product sums; none for other operators."""
    axes = traits_of(op).weight_axes
    if axes is None or rank < 2:
        return ()
    if slot == 0:
        return (rank - 1,) if op.full_type == "MatMul" else ()
    return axes(op, rank) if slot == 1 else ()
