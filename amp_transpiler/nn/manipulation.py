"""Shapes: reshape, transpose, concat, split, slice and related functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn.building import (
    LARGEST,
    Input,
    append,
    append_many,
    appending,
    axes_of,
    axis_of,
    describe,
    fixed,
    integers,
    operand,
    variable,
    whole,
)
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.windows import LAYOUTS, channels_last
from amp_transpiler.option_checks import choice


def _ints(call: str, argument: str, values: Any, minimum: int | None = None) -> np.ndarray:
    return np.array(integers(call, argument, values, minimum), np.int64)


@function()
def reshape(x: Variable, shape: Sequence[int], *, name: str | None = None) -> Variable:
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


@function()
def transpose(x: Variable, perm: Sequence[int], *, name: str | None = None) -> Variable:
    """Dimension ``i`` of the result is dimension ``perm[i]`` of ``x``."""
    call = "transpose"
    rank = len(variable(call, "x", x, min_rank=1).shape or ())
    axes = [axis_of(call, a, x, "perm") for a in _ints(call, "perm", perm).tolist()]
    if sorted(axes) != list(range(rank)):
        raise ArgumentError(f"{call}: perm {list(perm)} must name each of the {rank} dimensions of '{x.name}' once")
    return append(call, "Transpose", [x], attrs={"perm": axes})


@function()
def flatten(x: Variable, start_axis: int = 0, stop_axis: int = -1, *, name: str | None = None) -> Variable:
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


@function()
def squeeze(x: Variable, axis: int | Sequence[int] | None = None, *, name: str | None = None) -> Variable:
    """Drop dimensions of size 1: these, or all that are known to be 1 where ``axis`` is None."""
    call = "squeeze"
    if axis is None:
        axis = [i for i, size in enumerate(variable(call, "x", x, min_rank=1).shape or ()) if size == 1]
    if isinstance(axis, (list, tuple)) and not axis:
        return append(call, "Identity", [variable(call, "x", x)])
    return append(call, "Squeeze", [x, np.array(axes_of(call, axis, x), np.int64)])


@function()
def unsqueeze(x: Variable, axis: int | Sequence[int], *, name: str | None = None) -> Variable:
    """Insert dimensions of size 1, one after the other: each of ``axis`` is a place in what those before it made."""
    call = "unsqueeze"
    variable(call, "x", x)
    axes = _ints(call, "axis", axis if isinstance(axis, (list, tuple)) else [axis])
    return append(call, "Unsqueeze", [x, axes if len(axes) < 2 else _in_turn(call, x, axes.tolist())])


def _in_turn(call: str, x: Variable, places: list[int]) -> np.ndarray:
    """Where the dimensions lie in the result that are inserted one after the other."""
    kept = [True] * len(variable(call, "x", x, min_rank=int(x.shape is None)).shape or ())
    for place in places:
        rank = len(kept) + 1
        if not -rank <= place < rank:
            raise ArgumentError(f"{call}: axis {place} of {places} is outside the {rank} dimensions at its turn")
        kept.insert(place % rank, False)
    return np.flatnonzero(~np.array(kept)).astype(np.int64)


@function()
def concat(x: Sequence[Variable], axis: int = 0, *, name: str | None = None) -> Variable:
    """Join variables of one element type along ``axis``; their other sizes are equal."""
    call = "concat"
    if not isinstance(x, (list, tuple)) or not x:
        raise ArgumentTypeError(f"{call}: x must be a list of variables, not {x!r}")
    for item in x:
        variable(call, "each of x", item)
    return append(call, "Concat", list(x), attrs={"axis": axis_of(call, axis, x[0])})


@function()
def split(
    x: Variable, num_or_sections: int | Sequence[int], axis: int = 0, *, name: str | None = None
) -> list[Variable]:
    """Cut ``x`` along ``axis`` into a number of equal parts, or into parts of these sizes (one may be -1).

    Of a size that only the run knows the last part is the shorter one where it cannot be cut evenly; parts of given
    sizes, none of them -1, must then add up in the run.
    """
    call = "split"
    axis = axis_of(call, axis, x)
    size = (x.shape or ())[axis]
    if isinstance(num_or_sections, (list, tuple)):
        sections = _ints(call, "num_or_sections", num_or_sections, -1).tolist()
        open_size = not isinstance(size, int) and min(sections, default=0) > 0
        size = sum(sections) if open_size else fixed(call, "x", x, axis)
        if sections.count(-1) == 1:
            sections[sections.index(-1)] = size - sum(sections) - 1
    else:
        number = whole(call, "num_or_sections", num_or_sections)
        if not isinstance(size, int):
            return append_many(call, "Split", [x], number, attrs={"axis": axis, "num_outputs": number})
        if size % number:
            raise ArgumentError(f"{call}: dimension {axis} of {describe(x)} cannot be cut into {number} equal parts")
        sections = [size // number] * number
    if sum(sections) != size or min(sections) < 1:
        raise ArgumentError(f"{call}: parts of {sections} do not add up to dimension {axis} of {describe(x)}")
    return append_many(call, "Split", [x, np.array(sections, np.int64)], len(sections), attrs={"axis": axis})


@function()
def slice(
    x: Variable,
    axes: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    steps: Sequence[int] | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """``x[start:end:step]`` on each of ``axes``, with python's meaning of negative and large numbers.

    A step backwards from before the first element gives nothing, where the size is known while building; else, as
    ONNX has it, the first element counts as the start.
    """
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
    for i, (place, stride) in enumerate(zip(places, strides.tolist(), strict=True)):
        values[0][i], values[1][i] = reached((x.shape or ())[place], int(values[0][i]), int(values[1][i]), stride)
    inputs: list[Input] = [x, *values, np.array(places, np.int64)]
    return append(call, "Slice", inputs if steps is None else [*inputs, strides])


def reached(size: object, start: int, end: int, step: int) -> tuple[int, int]:
    """Start and end for Slice, to which a step backwards from before the first element of ``size`` starts at it."""
    before = isinstance(size, int) and step < 0 and start + size < 0
    return (0, 0) if before else (start, end)


@function()
def strided_slice(
    x: Variable,
    axes: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    strides: Sequence[int],
    *,
    name: str | None = None,
) -> Variable:
    """:func:`slice` with steps; to an end of -1 a negative one goes through the first element, as in Paddle."""
    call = "strided_slice"
    last, steps = _ints(call, "ends", ends), _ints(call, "strides", strides)
    if len(last) == len(steps):
        last = np.where((last == -1) & (steps < 0), -LARGEST, last)
    return slice(x, axes, starts, last.tolist(), steps.tolist())


@function()
def chunk(x: Variable, chunks: int, axis: int = 0, *, name: str | None = None) -> list[Variable]:
    """Cut ``x`` along ``axis`` into ``chunks`` equal parts."""
    return split(x, whole("chunk", "chunks", chunks), axis)


@function()
def stack(x: Sequence[Variable], axis: int = 0, *, name: str | None = None) -> Variable:
    """Join variables of one shape and element type along a new dimension ``axis``."""
    call = "stack"
    if not isinstance(x, (list, tuple)) or not x:
        raise ArgumentTypeError(f"{call}: x must be a list of variables, not {x!r}")
    first = variable(call, "each of x", x[0])
    rank = len(variable(call, "each of x", first, min_rank=0 if first.shape is not None else 1).shape or ()) + 1
    at = whole(call, "axis", axis, -rank)
    if at >= rank:
        raise ArgumentError(f"{call}: axis {axis} is outside the {rank} dimensions of the result")
    put = appending(call)
    place = np.array([at % rank], np.int64)
    items = [put("Unsqueeze", variable(call, "each of x", v), place) for v in x]
    return put("Concat", *items, axis=at % rank)


@function()
def unstack(x: Variable, axis: int = 0, num: int | None = None, *, name: str | None = None) -> list[Variable]:
    """The pieces of ``x`` along ``axis``, whose size is known, without that dimension."""
    call = "unstack"
    at = axis_of(call, axis, x)
    count = fixed(call, "x", x, at)
    if num is not None and num != count:
        raise ArgumentError(f"{call}: num={num}, but dimension {at} of {describe(x)} has {count}")
    put = appending(call)
    pieces = put.several(count, "Split", x, np.ones(count, np.int64), axis=at)
    return [put("Squeeze", piece, np.array([at], np.int64)) for piece in pieces]


@function()
def unbind(x: Variable, axis: int = 0, *, name: str | None = None) -> list[Variable]:
    """As :func:`unstack`."""
    return unstack(x, axis)


@function()
def expand(x: Variable, shape: Sequence[int], *, name: str | None = None) -> Variable:
    """Repeat dimensions of size 1 to these sizes; -1 keeps one. New dimensions come in front."""
    call = "expand"
    variable(call, "x", x)
    sizes = _ints(call, "shape", shape, -1)
    if (sizes == 0).any():
        raise ArgumentError(f"{call}: a size is above 0, or -1 to keep one; shape is {list(shape)}")
    return append(call, "Expand", [x, np.where(sizes == -1, 1, sizes)])


broadcast_to = expand


@function()
def expand_as(x: Variable, y: Variable, *, name: str | None = None) -> Variable:
    """``x`` repeated to the shape of ``y``."""
    call = "expand_as"
    put = appending(call)
    shape = put("Shape", variable(call, "y", y))
    expanded = put("Expand", variable(call, "x", x), shape)
    expanded.shape = y.shape  # which inference does not find behind a Shape
    return expanded


@function()
def tile(x: Variable, repeat_times: Sequence[int], *, name: str | None = None) -> Variable:
    """Repeat ``x`` this often along each dimension; a shorter list counts for the last ones."""
    call = "tile"
    rank = len(variable(call, "x", x, min_rank=1).shape or ())
    times = integers(call, "repeat_times", repeat_times, 1)
    if len(times) > rank:
        lead = np.arange(len(times) - rank)
        put = appending(call)
        return put("Tile", put("Unsqueeze", x, lead), np.array(times, np.int64))
    return append(call, "Tile", [x, np.array([1] * (rank - len(times)) + times, np.int64)])


@function()
def flip(x: Variable, axis: int | Sequence[int], *, name: str | None = None) -> Variable:
    """Reverse the order along these dimensions."""
    call = "flip"
    axes = axes_of(call, axis, x)
    count = len(axes)
    return slice(x, axes, [-1] * count, [-LARGEST] * count, [-1] * count)


@function()
def roll(
    x: Variable, shifts: int | Sequence[int], axis: int | Sequence[int] | None = None, *, name: str | None = None
) -> Variable:
    """Move elements ``shifts`` places on along ``axis``; what leaves at the end comes in at the front.

    Lists, of equal lengths, move along several dimensions. Without ``axis`` all elements move, in the order in which
    they lie. ArgumentError for dimensions whose sizes are not fixed.
    """
    call = "roll"
    if axis is None:
        shape = [fixed(call, "x", x, i) for i in range(len(variable(call, "x", x).shape or ()))]
        return reshape(roll(reshape(x, [-1]), shifts, 0), shape)
    if isinstance(axis, (list, tuple)):
        moves = list(shifts) if isinstance(shifts, (list, tuple)) else [shifts]
        if len(moves) != len(axis):
            raise ArgumentError(f"{call}: {len(moves)} shifts for {len(axis)} dimensions; give one for each")
        for shift, one in zip(moves, axis, strict=True):
            x = roll(x, shift, one)
        return x
    at = axis_of(call, axis, x)
    size = fixed(call, "x", x, at)
    count = whole(call, "shifts", shifts, -LARGEST) % size
    if not count:
        return append(call, "Identity", [x])
    put = appending(call)
    cut = np.array([size - count, count], np.int64)
    front, back = put.several(2, "Split", x, cut, axis=at)
    return put("Concat", back, front, axis=at)


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@function()
def pad(
    x: Variable,
    pad: int | Sequence[int],
    mode: str = "constant",
    value: float = 0.0,
    data_format: str = "NCHW",
    *,
    name: str | None = None,
) -> Variable:
    """``x`` with elements added around it.

    ``pad``: two numbers for each dimension, in their order, (before, behind, before, …); or for the axes of an image
    alone, the last one first (left, right, top, bottom, front, back); or one number for all of these. ``mode``:
    "constant" (``value``), "reflect", "replicate" or "circular". ``data_format``: where the channels of an image are.
    """
    call = "pad"
    rank = len(variable(call, "x", x, min_rank=1).shape or ())
    choice(f"{call}: mode", mode, _MODES)
    image = rank - 2
    if isinstance(pad, (list, tuple)):
        widths = integers(call, "pad", pad, 0)
    else:
        widths = [whole(call, "pad", pad, 0)] * 2 * image
        if image not in LAYOUTS:
            raise ArgumentError(f"{call}: one number pads the axes of an image, and {describe(x)} is none")
    if len(widths) == 2 * rank:
        pairs = list(zip(widths[::2], widths[1::2], strict=True))
    elif image in LAYOUTS and len(widths) == 2 * image:
        axes = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
        last = channels_last(call, None if data_format == "NCHW" else data_format, image)
        pairs = [(0, 0), *axes, (0, 0)] if last else [(0, 0), (0, 0), *axes]
    else:
        of_image = f", or {2 * image} for the axes of an image" if image in LAYOUTS else ""
        raise ArgumentError(f"{call}: pad has {len(widths)} numbers; {describe(x)} takes {2 * rank}{of_image}")
    array = np.array([low for low, _ in pairs] + [high for _, high in pairs], np.int64)
    inputs: list[Input] = [x, array]
    if mode == "constant":
        inputs.append(operand(call, value, x))
    return append(call, "Pad", inputs, attrs={"mode": _MODES[mode]})
