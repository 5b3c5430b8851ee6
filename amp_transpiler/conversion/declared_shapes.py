"""Shapes that a program declares, as far as an operator asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnx

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import numpy_dtype

_INTEGERS = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
#: Operators of which :func:`shape_value` knows what they make.
SHAPED = frozenset({"Shape", "Size", "Gather", "Slice"})


def shape_value(op: Operator, known: Callable[[Variable], np.ndarray | None]) -> np.ndarray | None:
    """What an operator makes of a shape that is declared as far as it asks."""
    read = op.input(0)
    if read is None or op.type not in SHAPED:
        return None
    sizes = _sizes(read if traits_of(op).shape_only else shape_of(read))
    if sizes is None:
        return None
    if op.type == "Size":
        return np.array(math.prod(sizes), np.int64) if all(d is not None for d in sizes) else None  # type: ignore[arg-type]
    if op.type == "Shape":
        return _whole(sizes[op.attrs.get("start", 0) : op.attrs.get("end", len(sizes))])
    made = _reader(read)
    assert made is not None
    if made.attrs.get("start", 0) or "end" in made.attrs:
        return None
    given = {slot: known(v) for slot, v in enumerate(op.inputs) if slot and v is not None}
    if any(array is None for array in given.values()):
        return None
    if op.type == "Gather":
        where = np.asarray(given[1])
        if where.ndim > 1 or not all(-len(sizes) <= i < len(sizes) for i in where.reshape(-1)):
            return None
        taken = _whole([sizes[i] for i in where.reshape(-1)], read)
        return None if taken is None else taken.reshape(where.shape)
    starts, stops = op.attrs.get("starts", given.get(1)), op.attrs.get("ends", given.get(2))
    by = given.get(4)
    step = 1 if by is None else int(by.reshape(-1)[0])
    if starts is None or stops is None or np.size(starts) != 1 or np.size(stops) != 1 or step == 0:
        return None
    return _whole(sizes[int(np.reshape(starts, -1)[0]) : int(np.reshape(stops, -1)[0]) : step], read)


def shape_of(variable: Variable | None) -> Variable | None:
    """Whose shape it is, perhaps in another type of integers."""
    made = _reader(variable)
    return None if made is None else made.input(0)


def _reader(variable: Variable | None) -> Operator | None:
    """The Shape that makes a variable; TensorFlow's exporter casts what it makes."""
    made = None if variable is None else variable.producer
    while made is not None and made.full_type == "Cast" and made.attrs["to"] in _INTEGERS:
        made = None if made.inputs[0] is None else made.inputs[0].producer
    return made if made is not None and made.full_type == "Shape" else None


def _sizes(variable: Variable | None) -> list[int | None] | None:
    if variable is None or variable.shape is None or variable.type_proto is not None:
        return None
    return [d if isinstance(d, int) else None for d in variable.shape]


def _whole(sizes: Iterable[int | None], like: Variable | None = None) -> np.ndarray | None:
    found = list(sizes)
    kind = np.int64 if like is None or like.dtype is None else numpy_dtype(like.dtype)
    return None if None in found else np.array(found, np.int64).astype(kind)
