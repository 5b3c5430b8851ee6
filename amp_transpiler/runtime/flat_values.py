"""Flat states in a scope: one value that holds several variables, and the views of it that they have in the scope.

The scope knows variables by name alone. The first step that wants several of them in one buffer copies them there and
lets the scope hold views of it. Whoever reads a variable reads what the step has written; whoever sets one puts another
value in the place of its view, and the next step makes a buffer anew: the old one may still be somebody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir.flat import Segment
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.types import BYTES, numpy_dtype
from amp_transpiler.passes.lowering.lowered import Port
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.providers import lies_on


class FlatValue:
    """A value for a flat state, and a view of it for each variable."""

    def __init__(self, port: Port, whole: Any, views: Sequence[Any]) -> None:
        self.whole, self.views = whole, views
        self.names = [segment.variable for segment in port.segments]

    def held(self) -> dict[str, Any]:
        """The views, by the names of their variables."""
        return dict(zip(self.names, self.views, strict=True))

    def is_in(self, values: Mapping[str, Any]) -> bool:
        """Whether these are the values of the variables."""
        return all(values.get(name) is view for name, view in zip(self.names, self.views, strict=True))


def empty_flat(port: Port, place: Place) -> FlatValue:
    """One that holds zeros."""
    shape = static(port.shape)
    assert shape is not None
    return flat_over(port, device_tensors.from_array(np.zeros(shape, numpy_dtype(port.dtype)), place))


def flat_over(port: Port, whole: Any) -> FlatValue:
    """One of this value."""
    return FlatValue(port, whole, [device_tensors.view(whole, s.offset, s.shape) for s in port.segments])


def flat_of(port: Port, values: Sequence[Any], place: Place) -> FlatValue | None:
    """The value of which these, one for each variable, are the views already; None where there is none."""
    whole = device_tensors.whole(values[0])
    if whole is None or tuple(whole.shape()) != static(port.shape) or not lies_on(whole, place):
        return None
    if not all(_lies(value, whole, segment) for value, segment in zip(values, port.segments, strict=True)):
        return None
    return FlatValue(port, whole, values)


def _lies(value: Any, whole: Any, segment: Segment) -> bool:
    size = BYTES[device_tensors.dtype_of(whole)]
    return device_tensors.whole(value) is whole and value.data_ptr() == whole.data_ptr() + segment.offset * size


def flat_from(port: Port, values: Sequence[Any], place: Place) -> FlatValue:
    """A new one with the content of these values, wherever they lie; of one value that is all of it, that value."""
    if len(values) == 1:
        value = values[0] if lies_on(values[0], place) else device_tensors.copy_to(values[0], place)
        return FlatValue(port, device_tensors.view(value, 0, static(port.shape) or ()), [value])
    flat = empty_flat(port, place)
    for view, value in zip(flat.views, values, strict=True):
        device_tensors.write(view, value)
    return flat
