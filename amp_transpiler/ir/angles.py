"""Constants that are cosines and sines: positions that are turned by an angle, or told by waves.

An exporter that knows the positions computes both beforehand, and a file then says of the numbers no more than of
weights. Their squares do: those of a cosine and its sine make one, in every place.
"""

from __future__ import annotations

import numpy as np
import onnx

from amp_transpiler.ir.constant_data import held_data
from amp_transpiler.ir.copies import original, readers_past_copies
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.tensors import as_array

#: How far the sum of two squares may be from one: tables are kept in 16 bit too.
_OFF = 4e-3
#: Rows that are looked at first, and the narrowest table that is looked at.
_ROWS, _WIDTH = 8, 8


def turns(variable: Variable) -> bool:
    """Whether a tensor with content holds cosines or sines: a table of both, or one that is used beside the other."""
    shape = static(variable.shape)
    if not shape or len(shape) < 2 or 0 in shape:
        return False
    return _is_table(as_array(variable.data)) or _is_turned(variable)


def _is_table(array: np.ndarray) -> bool:
    """Whether each row, but for those of zeros, holds the sines and cosines of as many angles: one half behind the
    other, or in turn."""
    rows = array.reshape(-1, array.shape[-1])
    if len(rows) < 2 or rows.shape[1] < _WIDTH or rows.shape[1] % 2:
        return False
    return _are_waves(rows[:_ROWS]) and _are_waves(rows)


def _are_waves(rows: np.ndarray) -> bool:
    if not (np.abs(rows) < 1 + _OFF).all():
        return False
    squares = np.square(rows, dtype=np.float32)
    filled = squares.any(axis=1)
    if filled.sum() < min(2, len(rows)):
        return False
    half = rows.shape[1] // 2
    pairs = (squares[:, :half], squares[:, half:]), (squares[:, ::2], squares[:, 1::2])
    return any(np.abs(one + other - 1)[filled].max() < _OFF for one, other in pairs)


def _is_turned(variable: Variable) -> bool:
    """Whether all that reads it are products that meet a product with the other of the two."""
    readers = [op for op, _ in readers_past_copies(variable)]
    return bool(readers) and all(op.type == "Mul" and _meets(variable, op.output(0)) for op in readers)


def _meets(variable: Variable, made: Variable | None) -> bool:
    """Whether what reads a product of the tensor adds a product of another one, with which its squares make one."""
    for op, slot in readers_past_copies(made):
        other = op.input(1 - slot) if op.type in ("Add", "Sub") and isinstance(slot, int) else None
        product = None if other is None else original(other).producer
        if product is not None and any(_completes(variable, original(v)) for v in product.inputs if v is not None):
            return True
    return False


def _completes(variable: Variable, other: Variable) -> bool:
    one, two = _array(variable), _array(other)
    if one is None or two is None or one.shape != two.shape or not (np.abs(one) < 1 + _OFF).all():
        return False
    return bool((np.abs(two) < 1 + _OFF).all()) and bool(
        np.abs(np.square(one, dtype=np.float32) + np.square(two, dtype=np.float32) - 1).max() < _OFF
    )


def _array(variable: Variable) -> np.ndarray | None:
    """The content of a tensor of a file, wherever it keeps it."""
    data = held_data(variable)
    return None if data is None or isinstance(data, onnx.SparseTensorProto) else as_array(data)
