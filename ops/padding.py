"""The gradient of Pad: what was put around a tensor goes, or what was copied of it is added to it."""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, any_of, hull
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, range_rule, traits
from amp_transpiler.ops.common import Grads, integers, padded, pieces, shape_of, size_of, sliced
from amp_transpiler.ops.movement import padded_in_run, turned_round


@gradient("Pad", reads="x1 x3 dy0", inputs=[0], native=True)
def pad(e: Emitter, op: Operator, pads: Value, axes: Value | None, dy: Value) -> Grads:
    mode = op.attrs.get("mode", "constant")
    shape = shape_of(e, 0)
    if mode == "constant" and e.known(op.inputs[0]) is None:
        known = integers(e, op, 1, "axes of Pad") or range(len(shape))
        return [padded_in_run(e, dy, e.Neg(e.cast(pads, "int64")), [axis % len(shape) for axis in known], shape)]
    widths = integers(e, op, 0, "pads of Pad") or []
    along = integers(e, op, 1, "axes of Pad") or list(range(len(shape)))
    after = [0] * len(shape)
    before = [0] * len(shape)
    for axis, low, high in zip(along, widths[: len(along)], widths[len(along) :], strict=True):
        axis %= len(shape)
        before[axis], after[axis] = max(-low, 0), max(-high, 0)
        if mode == "constant":
            dy = sliced(e, dy, axis, max(low, 0), size_of(dy)[axis] - max(high, 0))
        elif low > 0 or high > 0:
            kept = shape[axis] - before[axis] - after[axis]
            dy = _copies_added(e, dy, axis, _copied(mode, kept, max(low, 0), max(high, 0)), kept)
    return [padded(e, dy, before, after)]


def _copied(mode: str, size: int, low: int, high: int) -> list[int]:
    """Which element of an axis each element of the padded axis is a copy of."""
    at = np.arange(-low, size + high)
    if mode == "edge":
        return [int(i) for i in np.clip(at, 0, size - 1)]
    if mode == "wrap":
        return [int(i) for i in at % size]
    period = max(2 * size - 2, 1)  # reflected at the elements of the edge, which are not repeated
    at = at % period
    return [int(i) for i in np.minimum(at, period - at)] if size > 1 else [0] * len(at)


def _copies_added(e: Emitter, dy: Value, axis: int, copied: list[int], size: int) -> Value:
    """Each element of ``dy`` added to the one of ``size`` that it is the gradient of a copy of.

    In runs of elements whose copies lie side by side: most have one, and are only moved. Two are added in the type of
    dy, which rounds once, more of them in fp32.
    """
    runs = [(len(run), _strands(run)) for run in _runs(_copies_of(copied, size))]
    bounds = sorted((min(ends), max(ends) + 1) for _, strands in runs for ends in strands)
    cut = pieces(e, dy, axis, [stop - start for start, stop in bounds])
    found = {start: piece for (start, _), piece in zip(bounds, cut, strict=True)}

    def shape(length: int) -> tuple[int, ...]:
        return tuple(length if i == axis else d for i, d in enumerate(size_of(dy)))

    parts = []
    for count, strands in runs:
        same = []
        for first, last in strands:
            length = abs(last - first) + 1
            piece = Value(found[min(first, last)].name, dy.dtype, shape(length))
            if length != count:  # copies of one element
                piece = e.ReduceSum(piece, e.ints(axis), keepdims=1, shape=shape(1))
            same.append(turned_round(e, piece, axis) if first > last else piece)
        total = same[0] if len(same) == 1 else e.Add(*same) if len(same) == 2 else e.Sum(*map(e.f32, same))
        parts.append(e.cast(total, dy.dtype))
    return parts[0] if len(parts) == 1 else e.Concat(*parts, axis=axis, shape=shape(size))


def _copies_of(copied: list[int], size: int) -> list[list[int]]:
    """Of each element of an axis its copies, in their order; ``copied`` says of each what it is a copy of."""
    copies: list[list[int]] = [[] for _ in range(size)]
    for place, source in enumerate(copied):
        copies[source].append(place)
    return copies


def _runs(copies: list[list[int]]) -> list[list[list[int]]]:
    """Neighbours whose copies are neighbours too, each of them one place further, or one place before."""
    runs = [[copies[0]]]
    for each in copies[1:]:
        run = runs[-1]
        steps = [b - a for a, b in zip(run[-1], each, strict=False)]
        alike = len(run[-1]) == len(each) and all(step in (-1, 1) for step in steps)
        if alike and (len(run) == 1 or steps == [b - a for a, b in zip(run[-2], run[-1], strict=True)]):
            run.append(each)
        else:
            runs.append([each])
    return runs


def _strands(run: list[list[int]]) -> list[tuple[int, int]]:
    """The places of the first and the last copies of a run; of one element, the bounds of copies without a gap."""
    if len(run) > 1:
        return list(zip(run[0], run[-1], strict=True))
    bounds = [(run[0][0], run[0][0])]
    for place in run[0][1:]:
        if place == bounds[-1][1] + 1:
            bounds[-1] = (bounds[-1][0], place)
        else:
            bounds.append((place, place))
    return bounds


traits("Pad", moves=(0, 2), exact=True, settings=(2,))


@range_rule("Pad")
def _pad_range(op: Operator, ranges: Ranges) -> Interval | None:
    if op.input(2) is not None:
        return any_of(op, ranges)
    value = float(op.attrs.get("value", 0.0))
    return hull([ranges.bound(op.input(0)), (value, value)])
