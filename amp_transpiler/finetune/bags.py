"""Bags of rows that an exporter gathers in a loop, as torch's does an EmbeddingBag, are one operator after another.

The turns of that loop hang on the offsets of the bags: unrolled they are a dozen operators for each bag, and where the
offsets are fed nothing is known of them. What the loop makes is what :func:`amp.nn.functional.embedding_bag` gives.
Where the end of the last bag is among the offsets, the loop takes it, or the number of all rows, for the same:
torch's documentation says that they are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import INTEGERS
from amp_transpiler.nn.building import appending
from amp_transpiler.nn.embeddings import bags_of_rows
from amp_transpiler.passes.canonicalize.matching import maker, number, only_reader, remove
from amp_transpiler.passes.view.constants import constant_content
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.program import Program, program_guard

#: Offsets that are looked at, where they are known.
_MOST = 1 << 20
_MODES = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max"}


def sum_bags(program: Program) -> list[str]:
    """Put operators over all bags in the place of each loop that makes one bag of rows in each turn; in place."""
    count = 0
    for joined in of_type(program, "ConcatFromSequence"):
        loop = maker(joined.input(0), "Loop")
        found = None if loop is None else _bags(joined, loop)
        if found is not None:
            _write(program, joined, found)
            count += 1
    return [f"{count} loops over bags of rows are operators over all bags"] if count else []


@dataclass
class _Bags:
    """What a loop reads and does: ``offsets`` [bags + 1] say where in ``rows`` each bag begins, and the last ends.

    ``indices`` are those of the table that the rows were looked up by, one for each. ``begins`` are the offsets without
    the end, where the last bag ends with the rows.
    """

    rows: Variable
    indices: Variable
    offsets: Variable
    begins: Variable | None
    mode: str


def _bags(joined: Operator, loop: Operator) -> _Bags | None:
    body: Graph = loop.attrs["body"]
    if joined.attrs["axis"] != 0 or joined.attrs.get("new_axis", 0) or len(loop.inputs) != 4 or len(loop.outputs) != 2:
        return None
    made = 1 if loop.outputs[1] is joined.inputs[0] else 0
    counter = 1 - made
    alone = only_reader(joined.inputs[0]) is joined
    unread = (other := loop.outputs[counter]) is None or not (other.readers or other in loop.program.outputs)
    if not (alone and unread and loop.input(0) is None and maker(loop.input(2 + made), "SequenceEmpty")):
        return None
    index, put = body.inputs[2 + counter], maker(body.outputs[1 + made], "SequenceInsert")
    if put is None or put.input(0) is not body.inputs[2 + made] or put.input(2) is not None:
        return None
    if number(loop.input(2 + counter)) != 0 or _place(body.outputs[1 + counter], index) != 1:
        return None
    found = _Turn(index).row(put.input(1))
    goes_on, begins = maker(_held(body.outputs[0]), "Less"), maker(loop.input(1), "Less")
    bags = None if goes_on is None else _held(goes_on.input(1))
    if found is None or goes_on is None or _place(goes_on.input(0), index) != 1:
        return None
    runs = number(loop.input(1)) == 1 or (begins is not None and _held(begins.input(1)) is bags)
    return found if runs and _is_number_of_bags(bags, found.offsets) else None


@dataclass
class _Turn:
    """One turn of the loop, that of the bag ``index``; filled in with what it is found to read."""

    index: Variable
    rows: Variable | None = None
    offsets: Variable | None = None

    def row(self, variable: Variable | None) -> _Bags | None:
        """What the turns make, where each makes this row: 0 of an empty bag."""
        choice = maker(_held(variable), "If")
        test = None if choice is None else maker(_held(choice.input(0)), "Equal")
        if choice is None or test is None or {self._offset(v) for v in test.inputs} != {0, 1}:
            return None
        empty, other = choice.attrs["then_branch"].outputs[0], choice.attrs["else_branch"].outputs[0]
        held, mode = _held(empty), self._mode(other)
        zeros = None if held is None else constant_content(held)
        if zeros is None or as_array(zeros).any() or mode is None or self.rows is None or self.offsets is None:
            return None
        indices, shape = _indices(self.rows), self.rows.shape
        if indices is None or shape is None or as_array(zeros).shape != (1, *shape[1:]):
            return None
        return _Bags(self.rows, indices, self.offsets, _without_end(self.offsets, self.rows, indices), mode)

    def _mode(self, variable: Variable | None, last: bool = False) -> str | None:
        """How the rows of a bag that is not empty become this variable, of the last bag where ``last`` is set."""
        held = _held(variable)
        op = None if held is None else held.producer
        if op is None or op.domain:
            return None
        if op.type == "If":
            return self._either(op, last)
        if op.type == "Div":
            total = self._mode(op.input(0), last)
            return "mean" if last and total == "sum" and self._is_size(op.input(1)) else None
        mode = _MODES.get(op.type)
        if mode is None or number(_held(op.input(1))) != 0 or not op.attrs.get("keepdims", 1):
            return None
        return mode if self._is_bag(op.input(0), last) else None

    def _either(self, choice: Operator, last: bool) -> str | None:
        """The mode of both branches; one that is taken where the last bag has no rows does not count."""
        then, other = (choice.attrs[which].outputs[0] for which in ("then_branch", "else_branch"))
        test = maker(_held(choice.input(0)), "Greater")
        if test is not None and last:
            some = self._is_size(test.input(0)) and number(_held(test.input(1))) == 0
            return self._mode(then, last) if some else None
        is_last, mode = self._is_last(choice.input(0)), self._mode(other, last)
        return mode if is_last and self._mode(then, last=True) == mode else None

    def _is_bag(self, variable: Variable | None, last: bool) -> bool:
        """Whether it holds the rows of the bag."""
        choice, cut = maker(_held(variable), "If"), maker(_held(variable), "Slice")
        if choice is not None:  # the last bag, which ends with the rows, is cut in another way
            then, other = (choice.attrs[which].outputs[0] for which in ("then_branch", "else_branch"))
            return self._is_last(choice.input(0)) and self._is_bag(other, last) and self._is_bag(then, last=True)
        rows = None if cut is None else _held(cut.input(0))
        if cut is None or self.rows not in (None, rows) or not _along_first(cut) or self._offset(cut.input(1)) != 0:
            return False
        self.rows = rows
        return self._offset(cut.input(2)) == 1 or (last and self._is_end(cut.input(2)))

    def _is_last(self, variable: Variable | None) -> bool:
        """Whether it is true of the last bag."""
        test = maker(_held(variable), "Equal")
        if test is None or self.offsets is None or _place(test.input(0), self.index) != 0:
            return False
        before = maker(_held(test.input(1)), "Sub")
        if before is not None:
            return number(_held(before.input(1))) == 1 and _is_number_of_bags(_held(before.input(0)), self.offsets)
        sizes = self.offsets.shape
        return sizes is not None and isinstance(sizes[0], int) and number(_held(test.input(1))) == sizes[0] - 2

    def _is_size(self, variable: Variable | None) -> bool:
        """Whether it is how many rows the last bag has."""
        op = maker(_held(variable), "Sub")
        return op is not None and self._offset(op.input(1)) == 0 and self._is_end(op.input(0))

    def _is_end(self, variable: Variable | None) -> bool:
        """Whether it is the number of all rows."""
        indices = None if self.rows is None else _indices(self.rows)
        return self.rows is not None and indices is not None and _counts(variable, self.rows, indices)

    def _offset(self, variable: Variable | None) -> int | None:
        """Which of the offsets it is: 0 is where the bag begins."""
        op = maker(_held(variable), "Slice")
        offsets, place = (None, None) if op is None else (_held(op.input(0)), _place(op.input(1), self.index))
        if op is None or offsets is None or place is None or self.offsets not in (None, offsets):
            return None
        if len(offsets.shape or ()) != 1 or not _along_first(op) or _place(op.input(2), self.index) != place + 1:
            return None
        self.offsets = offsets
        return place


def _held(variable: Variable | None) -> Variable | None:
    """What it is a copy of: of a variable around a nested graph, or of integers in another type."""
    while variable is not None:
        op = variable.producer
        if variable.outer is not None:
            variable = variable.outer
        elif op is not None and not op.domain and op.inputs and op.inputs[0] is not None and _copies(op, op.inputs[0]):
            variable = op.inputs[0]
        else:
            break
    return variable


def _copies(op: Operator, read: Variable) -> bool:
    return op.type == "Identity" or (op.type in ("Cast", "CastLike") and read.dtype in INTEGERS)


def _place(variable: Variable | None, index: Variable) -> int | None:
    """What is added to ``index`` to give an integer."""
    held = _held(variable)
    op = None if held is None else held.producer
    if held is index:
        return 0
    if op is None or op.full_type not in ("Add", "Reshape"):
        return None
    before, more = _place(op.input(0), index), 0.0 if op.type == "Reshape" else number(_held(op.input(1)))
    return None if before is None or more is None else before + int(more)


def _along_first(cut: Operator) -> bool:
    """Whether a Slice of one axis in steps of 1 goes along the first."""
    axes, steps = cut.input(3), cut.input(4)
    return (axes is None or number(_held(axes)) == 0) and (steps is None or number(_held(steps)) == 1)


def _indices(rows: Variable) -> Variable | None:
    """The indices of a table, a list of them, whose rows these are, each perhaps times a number."""
    op = rows.producer
    if op is None or op.domain or op.inputs[0] is None:
        return None
    if op.type in ("Mul", "Identity", "Cast"):
        read = op.inputs[0]
        return _indices(read) if read.shape is not None and len(read.shape) == 2 else None
    indices = op.input(1) if op.type == "Gather" and op.attrs.get("axis", 0) == 0 else None
    return indices if indices is not None and len(indices.shape or ()) == 1 else None


def _counts(variable: Variable | None, rows: Variable, indices: Variable) -> bool:
    """Whether it is the number of the rows."""
    held = _held(variable)
    op = None if held is None else held.producer
    if rows.shape is not None and isinstance(rows.shape[0], int):
        return number(held) == rows.shape[0]
    counted = _held(op.input(0)) if op is not None and op.full_type in ("Shape", "Size") else None
    listed = _held(indices)
    while listed is not None and listed is not counted and (flat := maker(listed, "Reshape")) is not None:
        listed = _held(flat.input(0))
    return counted is not None and listed is counted and len(counted.shape or ()) == 1


def _without_end(offsets: Variable, rows: Variable, indices: Variable) -> Variable | None:
    """The offsets before the last, where that is the number of the rows."""
    joined, known = maker(offsets, "Concat"), constant_array(offsets, _MOST)
    if joined is not None and len(joined.inputs) == 2 and _counts(joined.input(1), rows, indices):
        return joined.inputs[0]
    if known is None or rows.shape is None or known[-1] != rows.shape[0]:
        return None
    return offsets.program.add_constant(f"{offsets.name}.begins", known[:-1])


def _is_number_of_bags(variable: Variable | None, offsets: Variable) -> bool:
    """Whether it is one less than there are offsets."""
    if offsets.shape is not None and isinstance(offsets.shape[0], int):
        return number(variable) == offsets.shape[0] - 1
    joined, less, counted = maker(offsets, "Concat"), maker(variable, "Sub"), maker(variable, "Size")
    if less is not None and number(_held(less.input(1))) == 1:
        size = maker(_held(less.input(0)), "Size")
        return size is not None and _held(size.input(0)) is offsets
    if joined is None or counted is None or len(joined.inputs) != 2:
        return False
    (begins, end), of = joined.inputs, _held(counted.input(0))
    return of is not None and of is _held(begins) and end is not None and end.shape == (1,)


def _write(program: Program, joined: Operator, found: _Bags) -> None:
    out = joined.outputs[0]
    assert out is not None
    put, offsets = appending("embedding_bag"), found.begins or found.offsets
    with program_guard(program):
        made = bags_of_rows(put, found.rows, found.indices, offsets, found.mode, None)
        if found.begins is None:  # what is behind the last bag is none
            ends = (np.array([at], np.int64) for at in (0, -1, 0))
            made = put("Slice", made, *ends)
    remove(joined, {found.rows, found.indices, offsets})
    program.add_operator("Identity", [made], [out], like=joined)
