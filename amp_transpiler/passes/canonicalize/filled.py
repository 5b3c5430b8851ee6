"""Tensors that are filled piece by piece become one Concat.

Keys of latent attention (DeepSeek, Kimi, GLM) are an empty tensor into which two slices are assigned. Exporters write
each assignment as a ScatterND of turned tensors, whose gradient gathers; that of a Concat is one Split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import constant_array
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.canonicalize.matching import maker, only_reader, remove
from amp_transpiler.passes.view.of_type import of_type


@dataclass(frozen=True)
class _Piece:
    """What is written to the rows from ``start`` to ``end``."""

    rows: Variable
    start: int
    end: int


def join_pieces(program: Graph) -> list[str]:
    """Put one Concat in the place of ScatterNDs that overwrite, between them, all rows of a tensor; in place."""
    count = 0
    for last in of_type(program, "ScatterND"):
        made = last.output(0)
        if made is None or made.producer is not last or made.dtype not in FLOATS or _goes_on(made):
            continue
        pieces = _pieces(last)
        if len(pieces) > 1 and _cover(pieces, made):
            _join(last, pieces)
            count += 1
    return [f"{count} tensors that were filled piece by piece are put together at once"] if count else []


def _goes_on(made: Variable) -> bool:
    """Whether more is written to it, turned back and forth or not, and it is read nowhere else."""
    reader, at = only_reader(made), made
    for _ in range(2):
        if reader is not None and reader.type == "Transpose" and reader.outputs[0] is not None:
            at = reader.outputs[0]
            reader = only_reader(at)
    return reader is not None and reader.type == "ScatterND" and reader.input(0) is at and _written(reader) is not None


def _written(op: Operator) -> Operator | None:
    """The ScatterND to whose result alone this one writes more."""
    before = op.input(0)
    alone = only_reader(before) is op
    back = maker(before, "Transpose")
    forth = maker(back.input(0), "Transpose") if back is not None else None
    if alone and back is not None and forth is not None:
        first, second = (list(turn.attrs.get("perm", ())) for turn in (forth, back))
        if [first[axis] for axis in second] == list(range(len(first))) and only_reader(back.input(0)) is back:
            before = forth.input(0)
            alone = only_reader(before) is forth
    return maker(before, "ScatterND") if alone else None


def _pieces(last: Operator) -> list[_Piece]:
    """The pieces, from the last that was written on, as long as each writes whole rows behind each other."""
    found: list[_Piece] = []
    op: Operator | None = last
    while op is not None:
        indices, rows = op.input(1), op.input(2)
        at = None if indices is None else constant_array(indices)
        if at is None or rows is None or at.ndim != 2 or at.shape[1] != 1 or at.size == 0:
            break
        numbers = at[:, 0]
        if op.attrs.get("reduction", "none") not in ("none", b"none") or numbers[0] < 0:
            break
        if not np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers))):
            break
        found.append(_Piece(rows, int(numbers[0]), int(numbers[-1]) + 1))
        op = _written(op)
    return found


def _cover(pieces: Sequence[_Piece], made: Variable) -> bool:
    """Whether the pieces are all rows, none of them twice: what they were written over is nowhere left."""
    ordered = sorted(pieces, key=lambda piece: piece.start)
    ends = [0, *(piece.end for piece in ordered)]
    return [*(piece.start for piece in ordered), (made.shape or (None,))[0]] == ends


def _join(last: Operator, pieces: Sequence[_Piece]) -> None:
    program, out, name = last.program, last.outputs[0], last.name
    rows = [piece.rows for piece in sorted(pieces, key=lambda piece: piece.start)]
    order, read = _before_turns(rows)
    assert out is not None
    if not order:
        remove(last, set(rows))
        program.add_operator("Concat", rows, [out], attrs={"axis": 0}, name=name, like=last)
        return
    sizes = dict(zip(order, out.shape or (), strict=True))
    whole = program.new_variable(out.name, out.dtype, tuple(sizes[axis] for axis in range(len(order))))
    program.add_operator("Concat", read, [whole], attrs={"axis": order[0]}, name=name, like=last)
    remove(last, {whole})
    for reader, _ in list(out.readers):
        again = list(reader.attrs.get("perm", ())) if reader.type == "Transpose" and not reader.domain else []
        if again:
            reader.set_input(0, whole)
            reader.attrs["perm"] = [order[axis] for axis in again]
    if out.readers or out in program.outputs:
        program.add_operator("Transpose", [whole], [out], attrs={"perm": order}, like=last)
    else:
        program.remove_variable(out)


def _before_turns(rows: Sequence[Variable]) -> tuple[list[int], list[Variable]]:
    """How all of them were turned, if in one way, and what they were before; no order where they were not."""
    turns = [maker(v, "Transpose") for v in rows]
    orders = {() if turn is None else tuple(turn.attrs.get("perm", ())) for turn in turns}
    read = [turn.inputs[0] for turn in turns if turn is not None and turn.inputs[0] is not None]
    return (list(orders.pop()), read) if len(orders) == 1 and len(read) == len(rows) else ([], [])
