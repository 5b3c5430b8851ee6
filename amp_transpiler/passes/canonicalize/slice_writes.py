"""Assignments to slices are joined with what they leave, or added to it.

``x[:, 1:] = y`` and ``x[:, 1:] += y`` are ScatterNDs in an export: of tensors that are turned so that the axis is the
first one (torch's exporter, one inside the other for several axes, each written once more over itself), or of the place
of each element (TorchScript's); ``x[:, t] = y`` is a ScatterElements. Their gradients scatter and gather; of a Concat
it is a Split, of a sum there is none.
Keys of latent attention (DeepSeek, Kimi, GLM) are an empty tensor into which all slices are assigned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.canonicalize.matching import maker, remove, sides
from amp_transpiler.passes.canonicalize.whole_splits import piece_of
from amp_transpiler.passes.view.constants import constant_content
from amp_transpiler.passes.view.of_type import of_type

_SCATTERS = ("ScatterND", "ScatterElements")
#: Readers of a tensor among which nobody looks for a piece that is there.
_MANY = 32


@dataclass(frozen=True)
class _Range:
    """Places from ``start`` to ``end`` of an axis of ``size``."""

    axis: int
    start: int
    end: int
    size: int


def write_slices(program: Graph) -> list[str]:
    """Put Concats and sums in the place of scatters that overwrite a slice; in place."""
    writer, count = _Writer(program), 0
    found = set(of_type(program, *_SCATTERS))
    for op in [op for op in program.operators if op in found]:  # each after what it writes over
        ranges = _ranges(op)
        if ranges is not None:
            writer.write(op, ranges)
            count += 1
    writer.finish()
    return [f"{count} assignments to slices are joined with what they leave, or added to it"] if count else []


def _ranges(op: Operator) -> list[_Range] | None:
    """The first axes of what is written to and the places along each, where these follow each other."""
    data, indices, made = op.input(0), op.input(1), op.output(0)
    held = constant_content(indices)
    if data is None or data.shape is None or made is None or made.dtype not in FLOATS or held is None:
        return None
    at = as_array(held)
    if not at.size or combined(op) != "none":
        return None
    if op.type == "ScatterElements":
        return _along_axis(at, static(data.shape), int(op.attrs.get("axis", 0)))
    count = at.shape[-1]
    sizes = [size for size in data.shape[:count] if isinstance(size, int)]
    if not at.ndim == count + 1 == len(sizes) + 1:
        return None
    places = np.where(at < 0, at + np.array(sizes, at.dtype), at)
    first = places.reshape(-1, count)[0]
    if not np.array_equal(places, np.moveaxis(np.indices(at.shape[:-1]), 0, -1) + first):
        return None
    bounds = list(zip(first.tolist(), at.shape[:-1], sizes, strict=True))
    if not all(start >= 0 and start + length <= size for start, length, size in bounds):
        return None
    return [_Range(axis, start, start + length, size) for axis, (start, length, size) in enumerate(bounds)]


def _along_axis(at: np.ndarray, shape: tuple[int, ...] | None, axis: int) -> list[_Range] | None:
    """The places along one axis, where they are the same in all others, which are whole."""
    if shape is None or at.ndim != len(shape) or not -at.ndim <= axis < at.ndim:
        return None
    axis %= at.ndim
    size, length, start = shape[axis], at.shape[axis], int(at.flat[0])
    start += size * (start < 0)
    if start + length > size or any(a != b for i, (a, b) in enumerate(zip(at.shape, shape, strict=True)) if i != axis):
        return None
    wanted = np.arange(start, start + length).reshape([length if i == axis else 1 for i in range(at.ndim)])
    same = ((at == wanted) | (at == wanted - size)).all()
    return [_Range(axis, start, start + length, size)] if start >= 0 and same else None


@dataclass(frozen=True)
class _Joined:
    """What a variable is joined of along an axis, and where each part ends; ``op`` is what it stands for."""

    op: Operator
    axis: int
    parts: list[Variable]
    ends: list[int]


class _Writer:
    """Rewrites scatters one after the other, which may be very many on one tensor: Concats are written in the end.

    ``joined``: variables that are not made yet, in order; ``held``: their parts; ``padded``: the Pads that were added;
    ``fresh``: the variables; ``cut``: those that are pieces, of which variable, along which axis, from where;
    ``written``: what was last written to a variable.
    """

    def __init__(self, program: Graph) -> None:
        self.program = program
        self.joined: dict[Variable, _Joined] = {}
        self.held: set[Variable] = set()
        self.padded: set[Operator] = set()
        self.fresh: dict[Variable, None] = {}
        self.written: dict[Variable, tuple[list[_Range], Variable]] = {}
        self.cut: dict[Variable, tuple[Variable, int, int]] = {}
        self.op: Operator

    def write(self, op: Operator, ranges: Sequence[_Range]) -> None:
        self.op = op
        data, rows, out = op.inputs[0], op.inputs[2], op.outputs[0]
        assert data is not None and rows is not None and out is not None
        straight, order = _before_turns(data, range(len(data.shape or ())))
        back = [order.index(axis) for axis in range(len(order))]
        turned = [_Range(order[r.axis], r.start, r.end, r.size) for r in ranges if r.end - r.start < r.size]
        written = (turned, self._turned(rows, back))
        # TorchScript writes what it adds to a slice twice.
        made = straight if self.written.get(straight) == written else self._assigned(straight, *written)
        self._remove(op, made)
        made = self._put(out, made, order)
        self.written[made] = written
        for reader, _ in list(made.readers):
            piece = piece_of(reader)
            found = None if piece is None else self._part(made, piece.axis, piece.start, piece.end)
            if piece is None or found is None or (result := reader.outputs[0]) is None:
                continue
            self._remove(reader, made)
            if piece.keeps:
                self._becomes(result, found)
            else:
                along = self.program.add_constant(f"{result.name}.axis", np.array([piece.axis]))
                self._add("Squeeze", [found, along], result)

    def finish(self) -> None:
        """Write the Concats of what is read, the last first, and take out what nothing reads."""
        kept = {*self.program.outputs, *self.program.updates.values()}
        for made, joined in reversed(self.joined.items()):
            if made.readers or made in kept:
                attrs = {"axis": joined.axis}
                self.program.add_operator("Concat", joined.parts, [made], attrs=attrs, like=joined.op)
            else:
                self.program.remove_variable(made)
        for variable in (*reversed(self.fresh), *self.held):
            op = variable.producer
            if op is not None and not variable.readers and variable not in kept and len(op.outputs) == 1:
                remove(op, set())
                self.program.remove_variable(variable)

    def _remove(self, op: Operator, made: Variable) -> None:
        """Take out an operator and what only it needs, but for what was made, and parts of what is joined later."""
        new = made not in self.held
        self.held.add(made)
        remove(op, self.held)
        if new:
            self.held.discard(made)

    def _put(self, out: Variable, made: Variable, order: Sequence[int]) -> Variable:
        """Let what read the result, which was turned, read what was not; what that is called then."""
        for reader, _ in list(out.readers):
            result = reader.outputs[0] if reader.full_type == "Transpose" else None
            if result is not None:
                again = [order[axis] for axis in _order(reader)]
                if again == sorted(again):
                    self.program.remove_operator(reader)
                    made = self._becomes(result, made)
                else:
                    reader.set_input(0, made)
                    reader.attrs["perm"] = again
        if not out.readers and out not in self.program.outputs and out not in self.program.updates.values():
            self.program.remove_variable(out)
        elif list(order) == sorted(order):
            made = self._becomes(out, made)
        else:
            self._add("Transpose", [made], out, perm=list(order))
        return made

    def _assigned(self, x: Variable, ranges: Sequence[_Range], rows: Variable) -> Variable:
        """``x`` with ``rows`` written to the ranges."""
        if not ranges:
            return rows
        at, *rest = ranges
        inside = self._assigned(self._slice(x, at.axis, at.start, at.end), rest, rows) if rest else rows
        if _is_piece(inside, x, at):
            return x
        change = self._change(inside, x, at)
        if change is not None:
            made = self._new(x)
            self._add("Add", [x, self._padded(change, at)], made)
            return made
        ends = [(0, at.start), (at.start, at.end), (at.end, at.size)]
        parts = [
            (inside if start == at.start else self._slice(x, at.axis, start, end), end - start)
            for start, end in ends
            if start < end
        ]
        return self._concat(parts, at.axis, x)

    def _change(self, inside: Variable, x: Variable, at: _Range) -> Variable | None:
        """What was added to the piece of ``x`` that it is written over, of its size along the axis."""
        for piece, change in sides(maker(inside, "Add")):
            shape = None if change is None else change.shape
            if shape is None or len(shape) != len(x.shape or ()):
                continue
            if shape[at.axis] == at.end - at.start and _is_piece(piece, x, at):
                return change
        return None

    def _padded(self, change: Variable, at: _Range) -> Variable:
        """A change with zeros before and behind it along the axis."""
        shape, inner = list(change.shape or ()), maker(change, "Pad")
        pads = np.zeros(2 * len(shape), np.int64)
        pads[at.axis], pads[at.axis + len(shape)], shape[at.axis] = at.start, at.size - at.end, at.size
        if inner is not None and inner in self.padded and len(change.readers) == 1 and inner.inputs[0] is not None:
            within = constant_array(inner.inputs[1]) if inner.inputs[1] is not None else None
            if within is not None:
                pads, change = pads + within, inner.inputs[0]
        made = self.program.fresh_variable(f"{change.name}.tmp", change.dtype, shape)
        sizes = self.program.add_constant(f"{change.name}.pads", pads)
        self.padded.add(self._add("Pad", [change, sizes], made))
        return made

    def _slice(self, x: Variable, axis: int, start: int, end: int) -> Variable:
        """The places from ``start`` to ``end``: of what was joined its parts, of a piece one of what that is of."""
        joined = self.joined.get(x)
        if joined is not None and joined.axis == axis:
            return self._parts(x, joined, start, end)
        source, along, begin = self.cut.get(x, (x, axis, 0))
        if along == axis and source is not x:
            return self._slice(source, axis, begin + start, begin + end)
        at, readers = _Range(axis, start, end, 0), x.readers
        for reader, _ in readers if len(readers) < _MANY else ():
            if _is_piece(reader.output(0), x, at) and reader.outputs[0] is not None:
                return reader.outputs[0]
        made = self._new(x, axis, end - start)
        bounds = [
            self.program.add_constant(f"{made.name}.{word}", np.array([number]))
            for word, number in (("start", start), ("end", end), ("axis", axis))
        ]
        self._add("Slice", [x, *bounds], made)
        self.cut[made] = (x, axis, start)
        return made

    def _parts(self, x: Variable, joined: _Joined, start: int, end: int) -> Variable:
        """The parts of a joined tensor that lie from ``start`` to ``end``, and pieces of those that do in part."""
        axis, begins = joined.axis, [0, *joined.ends]
        first, last = bisect_right(begins, start) - 1, bisect_left(begins, end)
        parts, ends = joined.parts[first:last], joined.ends[first:last]
        ends[-1] = end
        for index in {0, len(parts) - 1}:
            begin, size = begins[first + index], begins[first + index + 1] - begins[first + index]
            inside = max(start - begin, 0), min(end - begin, size)
            if inside != (0, size):
                parts[index] = self._slice(parts[index], axis, *inside)
        if len(parts) == 1:
            return parts[0]
        return self._join(x, axis, parts, [at - start for at in ends] if start else ends)

    def _part(self, x: Variable, axis: int, start: int, end: int) -> Variable | None:
        """The one part that these places of a joined tensor are; None where they are not, or it was not joined here."""
        joined = self.joined.get(x)
        if joined is None or joined.axis != axis:
            return None
        index = bisect_left(joined.ends, end)
        begin = joined.ends[index - 1] if index else 0
        return joined.parts[index] if (begin, joined.ends[index]) == (start, end) else None

    def _concat(self, parts: Sequence[tuple[Variable, int]], axis: int, like: Variable) -> Variable:
        """What the parts, each with its size, are along an axis."""
        flat, ends, at = list[Variable](), list[int](), 0
        for part, length in parts:
            inner = self.joined.get(part)
            if inner is not None and inner.axis == axis:
                flat += inner.parts
                ends += [at + end for end in inner.ends] if at else inner.ends
            else:
                flat.append(part)
                ends.append(at + length)
            at += length
        return self._join(like, axis, flat, ends)

    def _join(self, like: Variable, axis: int, parts: list[Variable], ends: list[int]) -> Variable:
        made = self._new(like, axis, ends[-1])
        self.joined[made] = _Joined(self.op, axis, parts, ends)
        self.held.update(parts)
        return made

    def _turned(self, value: Variable, order: Sequence[int]) -> Variable:
        """The value turned, by one transposition however often it was turned before, or none."""
        value, order = _before_turns(value, order)
        if order == sorted(order):
            return value
        shape = value.shape or ()
        made = self.program.fresh_variable(f"{value.name}.tmp", value.dtype, [shape[axis] for axis in order])
        self._add("Transpose", [value], made, perm=order)
        return made

    def _becomes(self, old: Variable, new: Variable) -> Variable:
        """Let what reads one variable, or takes it out of the program, have another; which of them is left."""
        if old not in self.program.outputs and old not in self.program.updates.values():
            self.program.replace_uses(old, new)
            self.program.remove_variable(old)
            return new
        if new in self.held or new not in (self.joined if new.producer is None else self.fresh):
            self._add("Identity", [new], old)
            return new
        self.program.replace_uses(new, old)
        if new.producer is None:
            self.joined[old] = self.joined.pop(new)
        else:
            new.producer.set_output(0, old)
        self.program.remove_variable(new)
        return old

    def _new(self, like: Variable, axis: int = 0, size: int | None = None) -> Variable:
        shape = list(like.shape or ())
        if size is not None:
            shape[axis] = size
        return self.program.fresh_variable(f"{like.name}.tmp", like.dtype, shape)

    def _add(self, type_: str, inputs: Sequence[Variable], made: Variable, **attrs: object) -> Operator:
        self.fresh[made] = None
        return self.program.add_operator(type_, inputs, [made], attrs=attrs, like=self.op)


def _before_turns(value: Variable, order: Sequence[int]) -> tuple[Variable, list[int]]:
    """What a value was before it was turned, and how all of it and ``order`` turn that."""
    while (turn := maker(value, "Transpose")) is not None and turn.inputs[0] is not None:
        first = _order(turn)
        value, order = turn.inputs[0], [first[axis] for axis in order]
    return value, list(order)


def _order(turn: Operator) -> list[int]:
    """How a Transpose orders axes: without an attribute the other way round."""
    rank = len(turn.inputs[0].shape or ()) if turn.inputs[0] is not None else 0
    return [int(axis) for axis in turn.attrs.get("perm", range(rank)[::-1])]


def _is_piece(variable: Variable | None, x: Variable, at: _Range) -> bool:
    """Whether a variable is what lies at the range of ``x``."""
    cut = maker(variable, "Slice")
    found = None if cut is None or cut.input(0) is not x else piece_of(cut)
    return found is not None and (found.axis, found.start, found.end) == (at.axis, at.start, at.end)
