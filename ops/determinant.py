"""Det: the determinant of each matrix of a batch, which exporters write for ``logdet`` too.

Its gradient is the determinant times the transposed inverse (Jacobi's formula), by onnxruntime's own operator: a matrix
that has none makes it NaN, a bad step. Where a place has no kernels, both are computed by Gaussian elimination.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ops.common import Grads, exchanged, size_of, sliced
from amp_transpiler.ops.place_bodies import Asked, body

#: Rows of the largest matrix that is eliminated, each with a dozen operators.
_MOST = 64


@gradient("Det", "x0 y0 dy0")
def det(e: Emitter, op: Operator, x: Value, y: Value, dy: Value) -> Grads:
    batch = size_of(x)[:-2]
    inverse = e.op("Inverse", x, domain=DOMAIN, shape=size_of(x))
    turned = exchanged(e, inverse)
    return [e.Mul(e.reshape(e.Mul(dy, y), (*batch, 1, 1)), turned)]


@body("Det")
def _product_of_pivots(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    """In fp32. Two rows that change places turn the sign."""
    if x.shape is None or not 0 < x.shape[-1] <= _MOST:
        return None
    lead, n = x.shape[:-2], x.shape[-1]
    rows, total = e.reshape(e.f32(x), (math.prod(lead), n, n)), e.const(1.0, "float32")
    for left in range(n, 0, -1):
        step = _step(e, rows, left)
        turned = e.Where(e.Equal(step.place, e.const(0, "int64")), step.pivot, e.Neg(step.pivot))
        total = e.Mul(total, turned)
        if left > 1:
            zero = e.Equal(step.pivot, e.const(0.0, "float32"))
            row = e.Div(step.row, e.Where(zero, e.const(1.0, "float32"), step.pivot))
            rows = _without(e, step.others, row)
    return [e.cast(e.reshape(total, lead), x.dtype)]


@body(f"{DOMAIN}::Inverse")
def _by_elimination(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    """In fp32: the other half of rows whose first half is eliminated. A matrix that has none gives NaN."""
    if x.shape is None or not 0 < x.shape[-1] <= _MOST:
        return None
    count, n = math.prod(x.shape[:-2]), x.shape[-1]
    half = e.const(np.broadcast_to(np.eye(n), (count, n, n)), "float32")
    rows = e.op("Concat", e.reshape(e.f32(x), (count, n, n)), half, axis=2, shape=(count, n, 2 * n))
    for left in range(n, 0, -1):
        step = _step(e, rows, left)
        row = e.Div(step.row, step.pivot)
        done = sliced(e, row, 2, 1, size_of(row)[2])
        rest = [_without(e, step.others, row)] if n > 1 else []
        rows = e.op("Concat", *rest, done, axis=1, shape=(count, n, size_of(done)[2]))
    return [e.cast(e.reshape(rows, x.shape), x.dtype)]


class _Step(NamedTuple):
    """Of rows [matrices, rows, columns]: the largest first number and where it stands, [matrices, 1, 1], its row, and
    the others, of which the first has taken its place."""

    pivot: Value
    place: Value
    row: Value
    others: Value


def _step(e: Emitter, rows: Value, left: int) -> _Step:
    """The step of an elimination that has ``left`` rows to choose from."""
    count, height, width = size_of(rows)
    first = sliced(e, sliced(e, rows, 2, 0, 1), 1, 0, left)
    place = e.op("ArgMax", e.Abs(first), axis=1, keepdims=1, dtype="int64", shape=(count, 1, 1))
    chosen = e.Equal(e.const(np.arange(height)[:, None], "int64"), place, shape=(count, height, 1))
    alone = e.Where(chosen, rows, e.const(0.0, "float32"), shape=size_of(rows))
    row = e.ReduceSum(alone, e.ints(1), keepdims=1, shape=(count, 1, width))
    moved = e.Where(chosen, sliced(e, rows, 1, 0, 1), rows, shape=size_of(rows))
    return _Step(sliced(e, row, 2, 0, 1), place, row, sliced(e, moved, 1, 1, height))


def _without(e: Emitter, others: Value, row: Value) -> Value:
    """The others without as much of a row, of which the first number is 1, as makes theirs 0, which are left out."""
    count, height, width = size_of(others)
    some = e.Mul(sliced(e, others, 2, 0, 1), sliced(e, row, 2, 1, width), shape=(count, height, width - 1))
    return e.Sub(sliced(e, others, 2, 1, width), some, shape=(count, height, width - 1))


traits("Det", overflows=Kind.MULTIPLIES)
