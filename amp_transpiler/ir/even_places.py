"""Constants that are places: numbers at even distances, alone or as the coordinates of a grid.

Exporters compute the places of pixels and anchors, and what a sampling grid is made from, where sizes are fixed. No
layer learns numbers at even distances, as many of each.
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.tensors import as_array

#: How far a distance may be from the others, as a share: grids are kept in 16 bit too.
_OFF = 0.02
#: Numbers from which on they are looked at, and up to which.
_FEW, _LARGE = 8, 1 << 24
#: The most coordinates of a place: of a volume, and the one that shifts.
_COORDINATES = 4


def places(variable: Variable) -> bool:
    """Whether a tensor with content holds places: of a line, or of a grid, with the coordinates first or last."""
    shape = static(variable.shape)
    if not shape or not _FEW <= math.prod(shape) <= _LARGE:
        return False
    array = as_array(variable.data)
    if not _begins_even(array):
        return False
    array = array.squeeze()
    if array.ndim == 1:
        return bool((np.diff(array) > 0).all() or (np.diff(array) < 0).all()) and _levels(array) == array.size
    return _is_coordinate(array) or any(
        1 < array.shape[axis] <= _COORDINATES
        and all(_is_coordinate(one) or bool((one == 1).all()) for one in np.moveaxis(array, axis, 0))
        for axis in (0, -1)
    )


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


def _is_coordinate(array: np.ndarray) -> bool:
    """Whether it has the same places in each line of a grid."""
    return 0 < _levels(array) < array.size


def _levels(array: np.ndarray) -> int:
    """How many numbers there are, at even distances and each as often; 0 where they are not, or fewer than three."""
    numbers = np.sort(array.astype(np.float64), axis=None)
    steps = np.diff(numbers)
    count = int((steps > steps.max() / 2).sum()) + 1
    if numbers.size < _FEW or count < 3 or numbers.size % count or not np.isfinite(numbers[-1]):
        return 0
    levels = numbers.reshape(count, -1)
    step = (levels[-1, 0] - levels[0, 0]) / (count - 1)
    even = levels[0, 0] + step * np.arange(count)
    return count if (np.abs(levels - even[:, None]) <= _OFF * step).all() else 0
