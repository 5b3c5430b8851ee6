"""Feeds and fetches whose tensors have another element type than the variable: 64-bit integers as 32 bits, and
sequences of 16-bit tensors as fp32."""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.errors import FeedError
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.passes.lowering.lowered import Port
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors


def as_held(port: Port, value: Any, place: Place, program: str) -> Any:
    """What a port that holds another element type is fed for a value. FeedError where a number does not fit."""
    if not port.holds:
        return value
    array = value if isinstance(value, np.ndarray) else device_tensors.to_array(value)
    limits = np.iinfo(numpy_dtype(port.dtype))
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise FeedError(
            f"feed '{port.variable}' of program '{program}' goes from {array.min()} to {array.max()}; {place!r} "
            f"computes with no {port.holds}, and {port.dtype} holds {limits.min} to {limits.max}. Feed other numbers, "
            "or run on CPUPlace()"
        )
    return array.astype(limits.dtype)


def as_declared(port: Port, result: Any, place: Place, as_array: bool) -> Any:
    """The value of a fetched variable in its own element type, of what its port gave."""
    if not port.holds:
        return result
    if isinstance(result, list):
        return [each.astype(numpy_dtype(port.holds)) for each in result]
    array = (result if as_array else device_tensors.to_array(result)).astype(numpy_dtype(port.holds))
    return array if as_array else device_tensors.from_array(array, place)
