"""Inverses of triangular matrices that were written out row by row become products.

The chunks of gated delta nets (Qwen3-Next, Kimi Linear, OLMo Hybrid) solve a triangular system by a loop over rows.
Exporters unroll it: a dozen operators for each row, and each row copies the whole matrix. What the loop makes is
``(I - A)⁻¹ - I`` of a strictly lower triangular A. Where T has the inverses of blocks of s rows on its diagonal, those
of 2 s rows are ``T + T (A ∘ M) T``, where M is 1 in the lower left quarter of each: the inverse of a block triangular
matrix, as exact as the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.passes.canonicalize.matching import (
    added_axes,
    computed,
    holds,
    maker,
    number,
    put,
    reduced_axes,
    sides,
)
from amp_transpiler.passes.canonicalize.whole_splits import piece_of
from amp_transpiler.passes.view.constants import constant_content
from amp_transpiler.passes.view.of_type import of_type

#: Rows from which on products are fewer operators than the loop.
_LEAST = 4


@dataclass
class _Loop:
    """The last operator of the loop, the matrix that it begins with, and all operators between."""

    last: Operator
    matrix: Variable
    operators: set[Operator] = field(default_factory=set)


def invert_triangles(
    program: Graph, names: frozenset[str] = frozenset(), keep: frozenset[Operator] = frozenset()
) -> list[str]:
    """Put products in the place of each loop over rows that inverts a unit triangular matrix; in place.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    count = 0
    for last in of_type(program, "ScatterElements"):
        made = last.output(0)
        found = None if made is None or made.producer is not last else _loop(last)
        if found is not None and not keep & found.operators and _alone(found, names):
            _write(found)
            count += 1
    return [f"{count} inverses of triangular matrices, written out row by row, are products"] if count else []


def _loop(last: Operator) -> _Loop | None:
    made = last.outputs[0]
    shape = None if made is None else made.shape
    size = None if shape is None or len(shape) < 2 else shape[-1]
    if made is None or shape is None or made.dtype != "float32" or not isinstance(size, int) or shape[-2] != size:
        return None
    if size < _LEAST or not _all_are(last.input(1), size - 1):
        return None
    found, matrix = _Loop(last, made), made
    for row in range(size - 1, 0, -1):
        before = _before(found, matrix, row)
        if before is None:
            return None
        matrix = before
    found.matrix = matrix
    return found if _strictly_lower(matrix, size) else None


def _before(loop: _Loop, made: Variable, row: int) -> Variable | None:
    """The matrix before ``A[row, :row] += sum(A[row, :row, None] * A[:row, :row], -2)`` gave this one."""
    rank = len(made.shape or ())
    put = maker(made, "ScatterElements")
    before = None if put is None else put.input(0)
    if put is None or before is None or before.shape != made.shape or not _all_are(put.input(1), row):
        return None
    if put.attrs.get("axis", 0) % rank != rank - 2 or combined(put) != "none":
        return None
    raised = maker(put.input(2), "Unsqueeze")
    written = None if raised is None else _head_written(loop, raised.input(0), row)
    if raised is None or added_axes(raised) != [rank - 2] or written is None:
        return None
    old, new = written
    pick = maker(old, "Gather")
    piece = None if pick is None else piece_of(pick)
    if pick is None or piece is None or (piece.axis, piece.start, piece.keeps) != (rank - 2, row, False):
        return None
    added = maker(new, "Add")
    for head, rest in sides(added) if pick.input(0) is before else ():
        summed = maker(rest, "ReduceSum")
        if added is None or summed is None or not _is_head(loop, head, old, row, rank - 2):
            continue
        if reduced_axes(summed) == [rank - 2] and not summed.attrs.get("keepdims", 1):
            if _weighted(loop, summed.input(0), head, before, row):
                loop.operators |= {put, raised, pick, added, summed}
                return before
    return None


def _weighted(loop: _Loop, variable: Variable | None, head: Variable | None, before: Variable, row: int) -> bool:
    """Whether it is the head of the row, raised to a column, times the rows before it."""
    product, rank = maker(variable, "Mul"), len(before.shape or ())
    for side, corner in sides(product):
        column = maker(side, "Unsqueeze")
        if product is None or column is None or column.input(0) is not head or added_axes(column) != [rank - 1]:
            continue
        for axis in (rank - 1, rank - 2):
            cut = maker(corner, "Slice")
            other = 2 * rank - 3 - axis
            if cut is None or not _is_head(loop, corner, cut.input(0), row, axis):
                continue
            if _is_head(loop, cut.input(0), before, row, other):
                loop.operators |= {product, column}
                return True
    return False


def _head_written(loop: _Loop, variable: Variable | None, row: int) -> tuple[Variable, Variable] | None:
    """The vectors before their first ``row`` elements were overwritten, and what these were overwritten with."""
    back = maker(variable, "Transpose")
    put = None if back is None else maker(back.input(0), "ScatterND")
    turns = [] if put is None else [maker(put.input(0), "Transpose"), maker(put.input(2), "Transpose")]
    places = None if put is None else constant_content(put.input(1))
    if back is None or put is None or places is None or combined(put) != "none":
        return None
    found = as_array(places)
    if found.shape != (row, 1) or not np.array_equal(found[:, 0], np.arange(row)):
        return None
    order = list(back.attrs.get("perm", ()))
    swapped = list(range(len(order)))
    swapped[0], swapped[-1] = swapped[-1], swapped[0]
    read = [turn.input(0) for turn in turns if turn is not None and list(turn.attrs.get("perm", ())) == swapped]
    if order != swapped or len(read) != 2 or read[0] is None or read[1] is None:
        return None
    loop.operators |= {back, put, *(turn for turn in turns if turn is not None)}
    return read[0], read[1]


def _is_head(loop: _Loop, variable: Variable | None, of: Variable | None, row: int, axis: int) -> bool:
    """Whether it holds the first ``row`` elements of a variable along an axis."""
    cut = maker(variable, "Slice")
    piece = None if cut is None else piece_of(cut)
    if cut is None or piece is None or cut.input(0) is not of or (piece.axis, piece.start, piece.end) != (axis, 0, row):
        return False
    loop.operators.add(cut)
    return True


def _all_are(variable: Variable | None, value: int) -> bool:
    """Whether a constant, repeated or not, holds this number everywhere."""
    repeated = maker(variable, "Expand")
    return holds(variable if repeated is None else repeated.input(0), value)


def _strictly_lower(variable: Variable | None, size: int) -> bool:
    """Whether all of a matrix on and above its diagonal is 0."""
    op = None if variable is None else variable.producer
    if op is None or op.domain:
        return False
    above = np.triu(np.ones((size, size), bool))
    if op.type == "Neg":
        return _strictly_lower(op.input(0), size)
    if op.type == "Trilu":
        offset = 0.0 if op.input(1) is None else number(op.input(1))
        return not op.attrs.get("upper", 1) and offset is not None and offset < 0
    if op.type == "Where":
        chosen = constant_content(op.input(0))
        mask = None if chosen is None else as_array(chosen)
        return mask is not None and mask.shape == above.shape and number(op.input(1)) == 0 and bool(mask[above].all())
    for read, other in sides(op) if op.type == "Mul" else ():
        data = constant_content(other)
        if data is not None:
            mask = as_array(data)
            masked = mask.shape == above.shape and not mask[above].any()
            return masked or (mask.size == 1 and _strictly_lower(read, size))
    return False


def _alone(loop: _Loop, names: frozenset[str]) -> bool:
    """Whether nothing else reads what is made on the way, and no name protects it."""
    for op in loop.operators:
        for made in op.outputs if op is not loop.last else ():
            if made is None or made.name in names or made in made.program.outputs:
                return False
            if any(reader not in loop.operators for reader, _ in made.readers):
                return False
    return not names & {v.name for v in loop.last.outputs if v is not None}


def _write(loop: _Loop) -> None:
    program, matrix, out = loop.last.program, loop.matrix, loop.last.outputs[0]
    assert out is not None and matrix.shape is not None
    size, shape, like = matrix.shape[-1], matrix.shape, loop.last
    assert isinstance(size, int)

    def constant(name: str, array: np.ndarray) -> Variable:
        return program.add_constant(f"{out.name}.{name}", array.astype(np.float32))

    def add(type_: str, one: Variable, other: Variable) -> Variable:
        return computed(like, type_, [one, other], f"{out.name}.{type_.lower()}", shape)

    unit = constant("unit", np.eye(size))
    block = np.arange(size)
    inverse = unit
    rows = 1
    while rows < size:
        at = block // rows
        below = (at[:, None] % 2 == 1) & (at[:, None] == at[None, :] + 1)
        part = add("Mul", matrix, constant("quarters", below))
        if rows > 1:
            part = add("MatMul", add("MatMul", inverse, part), inverse)
        inverse = add("Add", inverse, part)
        rows *= 2
    put(like, "Sub", [inverse, unit])
