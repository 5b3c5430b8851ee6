"""Constants that are places: numbers that count up, alone or as the coordinates of grids.

Exporters compute the places of pixels and anchors, and what a sampling grid is made from, where sizes are fixed. No
layer learns numbers that count up, and begin again.
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.constant_data import given_axes
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.tensors import LOOKED_THROUGH, as_array

#: How far a step may be from the others, as a share: grids are kept in 16 bit too.
_OFF = 0.02
#: Numbers from which on they are looked at.
_FEW = 8
#: The most coordinates of a place (of a volume, and the one that shifts), and steps: those of grids that were joined.
_COORDINATES, _STEPS = 4, 6


def places(variable: Variable) -> bool:
    """Whether a tensor with content holds places: of a line, or of grids, with the coordinates first or last.

    Or what adds up to such alone: the products of places by a matrix that a sampling grid is made from.
    """
    shape = static(variable.shape)
    if not shape or not _FEW <= math.prod(shape) <= LOOKED_THROUGH:
        return False
    array = _summed(variable)
    if not _begins_even(array):
        return False
    array = array.squeeze()
    if array.ndim == 1:
        return _counts(array) > 0
    return _counts(array) > 1 or any(
        1 < array.shape[axis] <= _COORDINATES and _are_coordinates(np.moveaxis(array, axis, 0)) for axis in (0, -1)
    )


def _summed(variable: Variable) -> np.ndarray:
    """What a tensor with content holds, summed up where that is all that is done with it."""
    array, uses = as_array(variable.data), variable.readers
    for op, _ in uses if len(uses) == 1 else ():
        axes = given_axes(op) if op.full_type == "ReduceSum" else None
        if axes is not None:
            summed: np.ndarray = array.sum(axis=tuple(axes))
            return summed
    return array


def _are_coordinates(arrays: np.ndarray) -> bool:
    """Whether each counts, or is one everywhere, and some number again: most made-up matrices count as well."""
    found = [2 if (one == 1).all() else _counts(one) for one in arrays]
    return 0 not in found and 2 in found


def _begins_even(array: np.ndarray) -> bool:
    """Whether the first numbers along each axis, but one of coordinates, may be places. Few weights begin so."""
    begin, step = float(array.item(0)), array.size
    if not math.isfinite(begin) or begin == array.item(array.size - 1):
        return False
    for size in array.shape:
        step //= size
        if size > _COORDINATES:
            one, two = float(array.item(step)) - begin, float(array.item(2 * step)) - begin
            if not abs(two - 2 * one) <= _OFF * abs(one):
                return False
    return True


def _counts(array: np.ndarray) -> int:
    """1 where each number, of three at least, is a step on from the one before; 2 where some are the same as before, or
    the first again; else 0."""
    if array.size < _FEW:
        return 0
    numbers = array.reshape(-1).astype(np.float64)
    if not np.isfinite(numbers).all():
        return 0
    numbers -= float(array.item(0))
    steps = np.diff(numbers)
    unit = next(iter(steps[steps != 0]), 0.0)
    if not math.isfinite(unit) or not unit:
        return 0
    levels, steps = numbers[1:] / unit, steps / unit
    on = steps[(np.abs(levels) > _OFF) & (np.abs(steps) > _OFF)].round(1)
    if not (on > 0).all() or len(np.unique(on)) > _STEPS or levels.max() <= 1 + _OFF:
        return 0
    return 1 if on.size == steps.size else 2
