"""Slices and picked elements that make up a tensor between them become one Split, and so do Splits that are the same.

Exports cut queries, keys and values, or the halves of a rotation, each out of the tensor of all, and split a tensor
anew for each piece that is taken. The gradient of such a piece is as large as the whole, zero but for the piece, and
these add up; that of a Split is one Concat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.constant_data import constant_array, constant_number
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.canonicalize.matching import drop_unread
from amp_transpiler.passes.view.of_type import of_type


@dataclass(frozen=True)
class Piece:
    """What an operator takes of a tensor: from ``start`` to ``end`` of an axis, which it leaves out or keeps."""

    op: Operator
    axis: int
    start: int
    end: int
    keeps: bool


def split_wholes(program: Graph) -> list[str]:
    """Put one Split in the place of Slices and Gathers of a tensor, along one axis of known size, and of Splits into
    the same pieces; in place."""
    count = _merge_equal(program)
    for variable in dict.fromkeys(op.input(0) for op in of_type(program, "Slice", "Gather")):
        if variable is None or variable.dtype not in FLOATS:  # sizes are looked up in shapes, which have no gradient
            continue
        pieces = sorted(_pieces(variable), key=lambda piece: piece.start)
        if len(pieces) > 1 and _make_up(variable, pieces):
            _split(variable, pieces)
            count += 1
    return [f"{count} tensors that were cut into all their pieces are split at once"] if count else []


def _merge_equal(program: Graph) -> int:
    """Let Splits of a tensor into the same pieces be one; how many tensors had several."""
    first, seen = dict[tuple[object, ...], Operator](), {*program.outputs, *program.updates.values()}
    merged = set[Operator]()
    for op in of_type(program, "Split"):
        sizes = constant_array(op.input(1))
        if op.program is not program or None in op.outputs or not seen.isdisjoint(op.outputs):
            continue
        if op.input(1) is not None and sizes is None:
            continue
        given = op.attrs.get("split") if sizes is None else sizes.tolist()
        key = (op.input(0), int(op.attrs.get("axis", 0)), len(op.outputs), tuple(given or ()))
        kept = first.setdefault(key, op)
        if kept is not op:
            _merge(op, kept)
            merged.add(kept)
    return len(merged)


def _merge(op: Operator, kept: Operator) -> None:
    """Let what reads the pieces of one Split read those of another."""
    program, sizes = op.program, op.input(1)
    pairs = [(v, new) for v, new in zip(op.outputs, kept.outputs, strict=True) if v is not None and new is not None]
    for old, new in pairs:
        program.replace_uses(old, new)
    program.remove_operator(op)
    for old, _ in pairs:
        program.remove_variable(old)
    if sizes is not None:
        drop_unread(sizes)


def _make_up(variable: Variable, pieces: list[Piece]) -> bool:
    """Whether pieces lie one behind the other along one axis, of which nothing is left."""
    axes = {piece.axis for piece in pieces}
    ends = [0, *(piece.end for piece in pieces)]
    starts = [*(piece.start for piece in pieces), (variable.shape or ())[pieces[0].axis]]
    return len(axes) == 1 and starts == ends


def _pieces(variable: Variable) -> Iterator[Piece]:
    for op, slot in variable.readers:
        found = piece_of(op) if slot == 0 and op.program is variable.program else None
        if found is not None:
            yield found


def piece_of(op: Operator) -> Piece | None:
    """The piece that a Slice along one axis takes, or a Gather of one place; None of any other operator."""
    variable = op.input(0)
    if op.domain or variable is None or variable.shape is None or op.type not in ("Slice", "Gather"):
        return None
    return _slice(op, variable) if op.type == "Slice" else _picked(op, variable)


def _slice(op: Operator, variable: Variable) -> Piece | None:
    numbers = [constant_number(v) for v in op.inputs[1:]]
    if not 3 <= len(numbers) <= 4 or None in numbers:
        return None
    start, end, axis, step = map(int, (*numbers, 1)[:4])
    axis, size = _along(variable, axis)
    if size is None or step != 1:
        return None
    start, end = (min(max(at + size * (at < 0), 0), size) for at in (start, end))
    return Piece(op, axis, start, end, True) if start < end else None


def _picked(op: Operator, variable: Variable) -> Piece | None:
    at = constant_array(op.input(1))
    axis, size = _along(variable, int(op.attrs.get("axis", 0)))
    if at is None or at.size != 1 or at.ndim > 1 or size is None or not -size <= at.item() < size:
        return None
    start = int(at.item()) % size
    return Piece(op, axis, start, start + 1, at.ndim == 1)


def _along(variable: Variable, axis: int) -> tuple[int, int | None]:
    """The axis from 0 on, and its size where it is fixed."""
    shape = variable.shape or ()
    if not -len(shape) <= axis < len(shape):
        return axis, None
    size = shape[axis]
    return axis % len(shape), size if isinstance(size, int) else None


def _split(variable: Variable, pieces: list[Piece]) -> None:
    program, axis = variable.program, pieces[0].axis
    results = [piece.op.outputs[0] for piece in pieces]
    for piece in pieces:
        bounds = [v for v in piece.op.inputs[1:] if v is not None]
        program.remove_operator(piece.op)
        for bound in dict.fromkeys(bounds):
            drop_unread(bound)
    one = [1 if i == axis else size for i, size in enumerate(variable.shape or ())]
    parts = [
        result if piece.keeps else program.fresh_variable(f"{variable.name}.tmp", variable.dtype, one)
        for piece, result in zip(pieces, results, strict=True)
    ]
    sizes = program.add_constant(f"{variable.name}.sizes", np.array([piece.end - piece.start for piece in pieces]))
    program.add_operator("Split", [variable, sizes], parts, attrs={"axis": axis}, like=pieces[0].op)
    for piece, part, result in zip(pieces, parts, results, strict=True):
        if not piece.keeps:
            along = program.add_constant(f"{variable.name}.axis", np.array([axis]))
            program.add_operator("Squeeze", [part, along], [result], name=piece.op.name, like=piece.op)
