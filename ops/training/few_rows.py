"""Gradients of large tables of which a step looks up few rows, without the zeros of all the others.

An update that goes over a table in chunks takes the rows as they were before they were scattered into zeros: the
gradient of a chunk that holds some of them is made there, that of any other one is a single zero. Nothing reads the
whole gradient then, and it is not made. What comes out is the same, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import size_of, sliced
from amp_transpiler.ops.row_sums import added_rows, rows_within
from amp_transpiler.ops.training.branches import either
from amp_transpiler.ops.training.chunks import by_chunks
from amp_transpiler.ops.training.sparse import named_rows, numbered

#: Rows of a table for each one that is added, from which on: in a chunk an element that is added takes 16 ns, reading
#: and writing one of the whole gradient a nanosecond.
_FEW = 16


def few_rows(e: Emitter, gradient: Value | None, chunks: int) -> tuple[Value, Value] | None:
    """The rows within the gradient of a table that is worked on in chunks; None where it is better read as a whole."""
    found = rows_within(e, gradient) if gradient is not None and chunks > 1 else None
    if found is None or gradient is None or size_of(found[0])[0] * _FEW > size_of(gradient)[0]:
        return None
    return found


def unscaled_rows(e: Emitter, gradient: Value, found: tuple[Value, Value], inverse: Value) -> tuple[Value, Value]:
    """The rows ``found`` within a gradient once it is unscaled: their numbers, and their sums times ``inverse``."""
    rows, totals, _ = _merged(e, *found, math.prod(size_of(gradient)))
    return rows, e.Mul(totals, e.cast(inverse, totals.dtype))


def by_chunks_with_rows(
    e: Emitter, found: tuple[Value, Value], states: Sequence[Value], write: Callable[..., Sequence[Value]]
) -> list[Value]:
    """What ``write(gradient, *chunks)`` makes of the chunks of the states [chunks, size of one], for all of them.

    The gradient of a chunk is of its size, or a scalar zero.
    """
    chunks, size = size_of(states[0])
    rows, values, distinct = _merged(e, *found, chunks * size)
    count, width = size_of(values)

    def upto(number: Value) -> Value:
        """For each chunk, how many of the rows have its number at most."""
        zeros, ones = (e.const(np.full(n, i)) for i, n in enumerate((chunks + 1, count)))
        each = e.ScatterElements(zeros, number, ones, axis=0, reduction="add", shape=(chunks + 1,))
        return sliced(e, e.CumSum(each, e.const(0, "int64"), shape=(chunks + 1,)), 0, 0, chunks)

    starts, wide = e.Mul(rows, e.const(np.int64(width))), e.const(np.int64(size))
    ends = e.Add(starts, e.const(np.int64(width - 1)))
    # Rows that end before a chunk begins, and those that begin before it ends.
    bounds = (
        upto(e.Add(e.Div(ends, wide), e.const(np.int64(1)))),
        e.Min(upto(e.Div(starts, wide)), distinct),
        e.const(np.arange(chunks) * size),
    )

    def gradient(first: Value, end: Value, begin: Value) -> Value:
        span = e.reshape(first, (1,)), e.reshape(end, (1,)), e.ints(0)
        here, added = e.Slice(rows, *span), e.Slice(values, *span)
        start = e.Sub(e.Mul(e.op("Reshape", here, e.ints(-1, 1)), e.const(np.int64(width))), begin)
        at = e.Add(start, e.const(np.arange(width).reshape(1, width)))
        inside = e.And(e.op("Less", e.const(np.int64(-1)), at), e.op("Less", at, e.const(np.int64(size))))
        flat = (e.op("Reshape", e.Where(inside, v, e.like(0, v)), e.ints(-1)) for v in (at, added))
        return e.ScatterElements(e.zeros((size,), values.dtype), *flat, axis=0, reduction="add", shape=(size,))

    def chunk(*read: Value) -> Sequence[Value]:
        *olds, first, end, begin = read
        none = e.const(0.0, values.dtype)
        holds = e.op("Less", first, end, shape=())
        return either(e, holds, lambda: write(gradient(first, end, begin), *olds), lambda: write(none, *olds))

    return by_chunks(e, [*states, *bounds], chunk)


def _merged(e: Emitter, rows: Value, values: Value, size: int) -> tuple[Value, Value, Value]:
    """Of a table of so many elements: rows in ascending order, the sums of what each is given [n, width], their number.

    Behind those the last one is repeated, with zeros.
    """
    count, width = size_of(rows)[0], math.prod(size_of(values)[1:])
    rows, values = named_rows(e, rows, size // width), e.reshape(values, (count, width))
    if count < 2:
        return rows, values, e.const(np.int64(count))
    distinct, whose = numbered(e, rows)
    totals = added_rows(e, e.zeros((count, width), values.dtype), e.reshape(whose, (count, 1)), values)
    last = e.op("ReduceMax", whose, keepdims=0, shape=())
    return distinct, totals, e.Add(last, e.const(np.int64(1)))
