"""Shapes: reshape, transpose, concat, split, slice, gather and their kin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..ir.program import Variable
from .building import INTEGER, Input, append, append_many, axis_of, describe, fixed, variable, whole


def _ints(call: str, argument: str, values: Any, minimum: int | None = None) -> np.ndarray:
    if not isinstance(values, (list, tuple)):
        raise ArgumentTypeError(f"{call}: {argument} must be a list of integers, not {values!r}")
    lowest = -(1 << 62) if minimum is None else minimum
    return np.array([whole(call, argument, value, lowest) for value in values], np.int64)


def reshape(x: Variable, shape: Sequence[int]) -> Variable:
    """``x`` with these sizes; 0 keeps the size at that place, one -1 takes what is left."""
    call = "reshape"
    variable(call, "x", x)
    sizes = _ints(call, "shape", shape, -1)
    if (sizes == -1).sum() > 1:
        raise ArgumentError(f"{call}: only one size may be -1, shape is {list(shape)}")
    _check_count(call, x, sizes)
    return append(call, "Reshape", [x, sizes])


def _check_count(call: str, x: Variable, sizes: np.ndarray) -> None:
    """ArgumentError where the number of elements is known and does not fit (onnx's inference lets it pass)."""
    if x.shape is None:
        return
    if any(size == 0 and i >= len(x.shape) for i, size in enumerate(sizes)):
        raise ArgumentError(f"{call}: a size of 0 keeps a dimension that {describe(x)} does not have: {sizes.tolist()}")
    # Unknown dimensions that stay in place cancel out.
    kept = {i for i, size in enumerate(sizes) if size == 0}
    before = [d for i, d in enumerate(x.shape) if i not in kept]
    after = [int(size) for size in sizes if size != 0]
    known = [d for d in before if isinstance(d, int)]
    if len(known) != len(before):
        return
    count, wanted = math.prod(known), math.prod(d for d in after if d != -1)
    if count != wanted and (-1 not in after or wanted == 0 or count % wanted):
        raise ArgumentError(f"{call}: {describe(x)} cannot take the shape {sizes.tolist()}")


def transpose(x: Variable, perm: Sequence[int]) -> Variable:
    """Dimension ``i`` of the result is dimension ``perm[i]`` of ``x``."""
    call = "transpose"
    rank = len(variable(call, "x", x, min_rank=1).shape or ())
    axes = [axis_of(call, a, x, "perm") for a in _ints(call, "perm", perm).tolist()]
    if sorted(axes) != list(range(rank)):
        raise ArgumentError(f"{call}: perm {list(perm)} must name each of the {rank} dimensions of '{x.name}' once")
    return append(call, "Transpose", [x], attrs={"perm": axes})


def flatten(x: Variable, start_axis: int = 0, stop_axis: int = -1) -> Variable:
    """Merge the dimensions ``start_axis`` … ``stop_axis`` into one."""
    call = "flatten"
    rank = len(variable(call, "x", x, min_rank=1).shape or ())
    start, stop = axis_of(call, start_axis, x, "start_axis"), axis_of(call, stop_axis, x, "stop_axis")
    if start > stop:
        raise ArgumentError(f"{call}: start_axis {start_axis} lies behind stop_axis {stop_axis}")
    if (start, stop) == (1, rank - 1):
        return append(call, "Flatten", [x], attrs={"axis": 1})
    tail = [fixed(call, "x", x, i) for i in range(stop + 1, rank)]
    return append(call, "Reshape", [x, np.array([0] * start + [-1] + tail, np.int64)])


def squeeze(x: Variable, axis: int | Sequence[int]) -> Variable:
    """Drop dimensions of size 1."""
    call = "squeeze"
    axes = [axis_of(call, a, x) for a in (axis if isinstance(axis, (list, tuple)) else [axis])]
    return append(call, "Squeeze", [x, np.array(axes, np.int64)])


def unsqueeze(x: Variable, axis: int | Sequence[int]) -> Variable:
    """Insert dimensions of size 1 at these places of the result."""
    call = "unsqueeze"
    variable(call, "x", x)
    axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
    return append(call, "Unsqueeze", [x, _ints(call, "axis", axes)])


def concat(x: Sequence[Variable], axis: int = 0) -> Variable:
    """Join variables of one element type along ``axis``; their other sizes are equal."""
    call = "concat"
    if not isinstance(x, (list, tuple)) or not x:
        raise ArgumentTypeError(f"{call}: x must be a list of variables, not {x!r}")
    for item in x:
        variable(call, "each of x", item)
    return append(call, "Concat", list(x), attrs={"axis": axis_of(call, axis, x[0])})


def split(x: Variable, num_or_sections: int | Sequence[int], axis: int = 0) -> list[Variable]:
    """Cut ``x`` along ``axis`` into a number of equal parts, or into parts of these sizes (one may be -1)."""
    call = "split"
    axis = axis_of(call, axis, x)
    size = fixed(call, "x", x, axis)
    if isinstance(num_or_sections, (list, tuple)):
        sections = _ints(call, "num_or_sections", num_or_sections, -1).tolist()
        if sections.count(-1) == 1:
            sections[sections.index(-1)] = size - sum(sections) - 1
    else:
        number = whole(call, "num_or_sections", num_or_sections)
        if size % number:
            raise ArgumentError(f"{call}: dimension {axis} of {describe(x)} cannot be cut into {number} equal parts")
        sections = [size // number] * number
    if sum(sections) != size or min(sections) < 1:
        raise ArgumentError(f"{call}: parts of {sections} do not add up to dimension {axis} of {describe(x)}")
    return append_many(call, "Split", [x, np.array(sections, np.int64)], len(sections), attrs={"axis": axis})


def slice(x: Variable, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int],
          steps: Sequence[int] | None = None) -> Variable:  # fmt: skip
    """``x[start:end:step]`` on each of ``axes``, with python's meaning of negative and large numbers."""
    call = "slice"
    places = [axis_of(call, a, x, "axes") for a in _ints(call, "axes", axes).tolist()]
    if len(set(places)) != len(places):
        raise ArgumentError(f"{call}: axes {list(axes)} name a dimension twice")
    values = [_ints(call, "starts", starts), _ints(call, "ends", ends)]
    strides = _ints(call, "steps", [1] * len(places) if steps is None else steps)
    if any(len(v) != len(places) for v in (*values, strides)):
        raise ArgumentError(f"{call}: axes, starts, ends and steps must be equally long")
    if (strides == 0).any():
        raise ArgumentError(f"{call}: a step of 0 does not move")
    inputs: list[Input] = [x, *values, np.array(places, np.int64)]
    return append(call, "Slice", inputs if steps is None else [*inputs, strides])


def gather(x: Variable, index: Variable, axis: int = 0) -> Variable:
    """``x`` at the places ``index`` (int64 or int32, any shape) of dimension ``axis``."""
    call = "gather"
    variable(call, "index", index, dtypes=INTEGER)
    return append(call, "Gather", [variable(call, "x", x), index], attrs={"axis": axis_of(call, axis, x)})
