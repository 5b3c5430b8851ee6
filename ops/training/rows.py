"""Rows of an operator of the training step, worked on together where the lowering says so.

``joined`` makes one tensor of theirs, and ``parts`` takes one apart again. Both remember what is what, so that a rule
which joins the parts that another rule has made gets the tensor of which they are the parts, and nobody pays for taking
it apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.flat import Rows
from amp_transpiler.ir.nodes import Operator


def rows_of(e: Emitter, op: Operator, count: int) -> list[Rows]:
    """The ``count`` rows of an operator as they are worked on: together, or each alone."""
    together = list(e.rows.get(op.key, ()))
    taken = {number for rows in together for number in rows.numbers}
    return together + [Rows((number,)) for number in range(count) if number not in taken]


def joined(e: Emitter, rows: Rows, values: Sequence[Value]) -> Value:
    """One tensor for ``values``, which belong to the rows; zeros fill what lies between them."""
    if not rows.shapes:
        return values[0]
    key = _key(values)
    if key not in e.shared:
        pieces, end = list[Value](), 0
        for value, offset, shape in zip(values, rows.offsets, rows.shapes, strict=True):
            if offset > end:
                pieces.append(e.const(np.zeros((1, offset - end)), value.dtype))
            pieces.append(e.reshape(value, (1, math.prod(shape))))
            end = offset + math.prod(shape)
        e.shared[key] = (pieces[0] if len(pieces) == 1 else e.Concat(*pieces, axis=1, shape=rows.shape),)
    found = e.shared[key][0]
    return Value(found.name, values[0].dtype, found.shape)


def parts(e: Emitter, rows: Rows, value: Value) -> list[Value]:
    """The tensors of the rows, out of the one for all of them."""
    if not rows.shapes:
        return [value]
    sizes = [math.prod(shape) for shape in rows.shapes]
    ends = [*rows.offsets[1:], rows.shape[1]]
    gaps = [end - offset - size for offset, size, end in zip(rows.offsets, sizes, ends, strict=True)]
    lengths = [length for pair in zip(sizes, gaps, strict=True) for length in pair if length]
    pieces = iter(e.op("Split", value, e.ints(*lengths), outputs=len(lengths), dtype=value.dtype, axis=1))
    found = []
    for size, gap, shape in zip(sizes, gaps, rows.shapes, strict=True):
        piece = next(pieces)
        found.append(e.reshape(Value(piece.name, piece.dtype, (1, size)), shape))
        if gap:
            next(pieces)
    remember(e, found, value)
    return found


def remember(e: Emitter, values: Sequence[Value], whole: Value) -> None:
    """That ``values`` are the parts of ``whole``."""
    e.shared[_key(values)] = (whole,)


def _key(values: Sequence[Value]) -> str:
    return "\0".join(["one of", *(value.name for value in values)])
