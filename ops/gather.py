"""Elements by their indices: lookups, scatters, the largest ones. Their gradients scatter and look up, in fp32 sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, any_of, same
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, own, range_rule, traits
from amp_transpiler.ops.common import Grads, padded_axis, shape_of, size_of, sliced
from amp_transpiler.ops.row_sums import added_rows, remember_rows

#: Rows of a table, for each one that is added to it, from which on onnxruntime's ScatterElements is faster on CPU: it
#: writes over the zeros, where ScatterND copies them, but takes 16 ns for an element.
_FEW = 64


def _scatter_rows(e: Emitter, shape: Sequence[int], indices: Value, rows: Value) -> Value:
    """Zeros of ``shape`` with ``rows`` added, in fp32, at ``indices`` [.., k] of the first k dimensions."""
    rows = e.f32(rows)
    zeros = e.zeros(shape, rows.dtype)
    at = indices.shape or ()
    if e.at.host and len(at) == len(shape) == 2 and at[1] == 1 and at[0] * _FEW <= shape[0]:
        every = e.Expand(e.cast(indices, "int64"), e.ints(at[0], shape[1]), shape=(at[0], shape[1]))
        made = e.ScatterElements(zeros, every, rows, axis=0, reduction="add", shape=shape)
    else:
        made = added_rows(e, zeros, e.cast(indices, "int64"), rows)
    return remember_rows(e, made, e.reshape(indices, at[:1]), rows) if len(at) == 2 and at[1] == 1 else made


@gradient("Gather", reads="x1 dy0", native=True)
def gather(e: Emitter, op: Operator, indices: Value, dy: Value) -> Grads:
    shape = shape_of(e, 0)
    axis = int(op.attrs.get("axis", 0)) % len(shape)
    count, rank, known = math.prod(size_of(indices)), len(shape), e.known(op.inputs[0])
    first = None if known is None else _begin(known, shape[axis])
    if first is not None:  # such as the first token: zeros around it
        kept = e.reshape(dy, [*shape[:axis], count, *shape[axis + 1 :]])
        return [padded_axis(e, kept, axis, first, shape[axis] - count - first)]
    flat = e.reshape(indices, [count, 1])
    rows = e.reshape(dy, [*shape[:axis], count, *shape[axis + 1 :]])
    rows = e.transpose(rows, [axis, *(i for i in range(rank) if i != axis)])
    rest = [d for i, d in enumerate(shape) if i != axis]
    table = _scatter_rows(e, [shape[axis], *rest], flat, rows)
    return [e.transpose(table, [*range(1, axis + 1), 0, *range(axis + 1, rank)])]


@gradient("GatherElements", reads="x1 dy0", native=True)
def gather_elements(e: Emitter, op: Operator, indices: Value, dy: Value) -> Grads:
    wide = e.f32(dy)
    zeros = e.zeros(shape_of(e, 0), wide.dtype)
    return [e.ScatterElements(zeros, indices, wide, axis=op.attrs.get("axis", 0), reduction="add")]


@gradient("GatherND", reads="x1 dy0", native=True)
def gather_nd(e: Emitter, op: Operator, indices: Value, dy: Value) -> Grads:
    batch, at, shape = int(op.attrs.get("batch_dims", 0)), size_of(indices), shape_of(e, 0)
    known = None if batch or at[-1] != 1 else e.known(op.inputs[0])
    first = None if known is None else _begin(known, shape[0])
    if first is not None:
        count = math.prod(at)
        return [padded_axis(e, e.reshape(dy, [count, *shape[1:]]), 0, first, shape[0] - count - first)]
    if batch:
        # ScatterND has no batch dimensions: their coordinates become part of the index.
        grid = np.indices(at[:batch]).transpose([*range(1, batch + 1), 0])
        grid = grid.reshape([*at[:batch], *[1] * (len(at) - batch - 1), batch])
        coordinates = np.broadcast_to(grid, [*at[:-1], batch]).astype(np.int64)
        whole = (*at[:-1], batch + at[-1])
        indices = e.Concat(e.const(coordinates), e.cast(indices, "int64"), axis=-1, shape=whole)
    return [_scatter_rows(e, shape, indices, dy)]


def _begin(indices: np.ndarray, size: int) -> int | None:
    """The first of places along an axis that follow each other; None where they do not."""
    at = indices.reshape(-1) % size if size else indices[:0]
    return int(at[0]) if at.size and (np.diff(at) == 1).all() else None


def _adds(op: Operator) -> bool:
    return bool(op.attrs.get("reduction", "none") == "add")


def _other_reduction(op: Operator) -> str:
    reduction = op.attrs.get("reduction", "none")
    if reduction in ("none", "add"):
        return ""
    return (
        f"its gradient exists for reduction 'none' and 'add', not for '{reduction}'. Gather the elements, combine "
        "them with Mul, Max or Min, and scatter the result with 'none'"
    )


@gradient("ScatterElements", reads="x1 dy0", inputs=[0, 2], native=True, refuse=_other_reduction)
def scatter_elements(e: Emitter, op: Operator, indices: Value, dy: Value) -> Grads:
    """Added, the updates and the data share dy; written, dy goes to the one that the result holds."""
    axis, adds = op.attrs.get("axis", 0), _adds(op)
    d_data = d_updates = None
    if e.wants(0):
        zeros = e.zeros(size_of(indices), dy.dtype)
        d_data = dy if adds else e.ScatterElements(dy, indices, zeros, axis=axis, shape=dy.shape)
    if e.wants(2):
        for i, size in enumerate(size_of(indices)):
            if i != axis % len(size_of(dy)):
                dy = sliced(e, dy, i, 0, size)
        d_updates = e.GatherElements(dy, indices, axis=axis, shape=indices.shape)
    return [d_data, None, d_updates]


@gradient("ScatterND", reads="x1 dy0", inputs=[0, 2], native=True, refuse=_other_reduction)
def scatter_nd(e: Emitter, op: Operator, indices: Value, dy: Value) -> Grads:
    """As for ScatterElements; each index names a slice."""
    adds, shape = _adds(op), size_of(dy)
    at = e.cast(indices, "int64")
    rows = [*size_of(indices)[:-1], *shape[size_of(indices)[-1] :]]
    d_data = d_updates = None
    if e.wants(0):
        d_data = dy if adds else e.ScatterND(dy, at, e.zeros(rows, dy.dtype), shape=shape)
    if e.wants(2):
        d_updates = e.GatherND(dy, at, shape=rows)
    return [d_data, None, d_updates]


@gradient("TopK", reads="y1 dy0", inputs=[0], native=True)
def top_k(e: Emitter, op: Operator, indices: Value, dy: Value) -> Grads:
    zeros = e.zeros(shape_of(e, 0), dy.dtype)
    return [e.ScatterElements(zeros, indices, dy, axis=op.attrs.get("axis", -1))]


_LOOKUPS = ("Gather", "GatherElements", "GatherND")
_SCATTERS = ("Scatter", "ScatterElements", "ScatterND")
traits(*_LOOKUPS, moves=(0,), exact=True, lookup=True, part=True)
# Not exact: with reduction="add" they add.
traits(*_SCATTERS, moves=(0, 2), combines="reduction")
traits("TensorScatter", moves=(0, 1))
traits("TopK", exact=True, carries_large=True)
traits(own("TopKGrad"), own("ScatterElementsGrad"), own("ScatterNDGrad"), exact=True)
range_rule(*_LOOKUPS)(same)


@range_rule(*_SCATTERS)
def _scatter_range(op: Operator, ranges: Ranges) -> Interval | None:
    return any_of(op, ranges) if op.attrs.get("reduction", "none") in ("none", b"none") else None
