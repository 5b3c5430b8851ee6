"""Elements by their indices: lookups, scatters, the largest ones. Their gradients scatter and look up, in fp32 sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, any_of, same
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined, gradient, own, range_rule, traits
from amp_transpiler.ops.attention import positions_of
from amp_transpiler.ops.common import Grads, comparable, padded_axis, shape_of, size_of, sliced
from amp_transpiler.ops.row_sums import added_rows, places_of_rows, remember_rows

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


def _product(op: Operator) -> str:
    if op.attrs.get("reduction", "none") != "mul":
        return ""
    return (
        "its gradient exists for reduction 'none', 'add', 'max' and 'min', not for 'mul'. Gather them, multiply "
        "them with Mul, and scatter the result with 'none'"
    )


_Move = Callable[[Value], Value]
_Put = Callable[..., Value]


def _scattered(e: Emitter, op: Operator, values: Sequence[Value], taken: _Move, put: _Put) -> Grads:
    """Gradients of a scatter's data and updates; ``taken`` takes what lies at its indices, ``put`` puts updates there.

    Added, updates and data share dy; written, dy goes to the one that the result holds. Of a largest or smallest it is
    dealt out in equal parts among all that equal it, as torch's ``scatter_reduce`` deals it.
    """
    data, updates, made, dy = values
    reduction = op.attrs.get("reduction", "none")
    if reduction in ("max", "min"):
        wide = e.f32(dy)
        data, updates, made = (comparable(e, value) for value in (data, updates, made))
        won, held = (e.cast(e.Equal(v, w), wide.dtype) for v, w in ((updates, taken(made)), (data, made)))
        count = e.Max(put(held, won, "add"), e.const(1, wide.dtype))
        dy = e.Div(wide, count)
        return [e.Mul(dy, held) if e.wants(0) else None, None, e.Mul(taken(dy), won) if e.wants(2) else None]
    d_data = None
    if e.wants(0):
        d_data = dy if reduction == "add" else put(dy, e.zeros(size_of(updates), dy.dtype))
    return [d_data, None, taken(dy) if e.wants(2) else None]


@gradient("ScatterElements", reads="x0 x1 x2 y0 dy0", inputs=[0, 2], native=True, refuse=_product)
def scatter_elements(
    e: Emitter, op: Operator, data: Value, indices: Value, updates: Value, made: Value, dy: Value
) -> Grads:
    axis, rows = int(op.attrs.get("axis", 0)), places_of_rows(e, indices)
    sizes = size_of(updates)  # those of the indices; an exporter may compute these of data

    def taken(value: Value) -> Value:
        for i, size in enumerate(sizes):
            if i != axis % len(sizes):
                value = sliced(e, value, i, 0, size)
        if rows is not None and axis % len(sizes) == 0:
            return e.op("Gather", value, e.reshape(rows, size_of(rows)[:1]), axis=0, shape=sizes)
        return e.GatherElements(value, indices, axis=axis, shape=sizes)

    def put(value: Value, changes: Value, reduction: str = "none") -> Value:
        return e.ScatterElements(value, indices, changes, axis=axis, reduction=reduction, shape=value.shape)

    return _scattered(e, op, [data, updates, made, dy], taken, put)


@gradient("ScatterND", reads="x0 x1 x2 y0 dy0", inputs=[0, 2], native=True, refuse=_product)
def scatter_nd(e: Emitter, op: Operator, data: Value, indices: Value, updates: Value, made: Value, dy: Value) -> Grads:
    """As for ScatterElements; each index names a slice."""
    at = e.cast(indices, "int64")

    def taken(value: Value) -> Value:
        return e.GatherND(value, at, shape=updates.shape)

    def put(value: Value, changes: Value, reduction: str = "none") -> Value:
        return e.ScatterND(value, at, changes, reduction=reduction, shape=value.shape)

    return _scattered(e, op, [data, updates, made, dy], taken, put)


@gradient("TopK", reads="y1 dy0", inputs=[0], native=True)
def top_k(e: Emitter, op: Operator, indices: Value, dy: Value) -> Grads:
    zeros = e.zeros(shape_of(e, 0), dy.dtype)
    return [e.ScatterElements(zeros, indices, dy, axis=op.attrs.get("axis", -1))]


@decomposition("Compress")
def compress(d: Parts, op: Operator, x: Variable, condition: Variable) -> list[Variable]:
    """Where the condition holds; where it ends before the axis does, it does not."""
    places, axis = d.Squeeze(d.NonZero(condition), [0]), op.attrs.get("axis")
    return [d.Gather(d.Reshape(x, [-1]), places) if axis is None else d.Gather(x, places, axis=axis)]


@decomposition("TensorScatter")
def tensor_scatter(
    d: Parts, op: Operator, past: Variable, update: Variable, begins: Variable | None = None
) -> list[Variable]:
    """The update [B, .., T, ..] over the past from the place on where it begins, in each of the batch."""
    rank = d.rank(past)
    axis = d.whole("axis", -2) % rank
    places = d.Unsqueeze(positions_of(d, update, axis), [0])
    if begins is not None:
        places = d.Add(places, d.Unsqueeze(begins, [1]))
        if op.attrs.get("mode", "linear") == "circular":
            size = d.size(past, axis)
            places = d.Mod(places, d.Shape(past, start=axis, end=axis + 1) if size is None else d.const(size, "int64"))
    others = [i for i in range(1, rank) if i != axis]
    places = d.Expand(d.Unsqueeze(places, others) if others else places, d.Shape(update))
    return [d.ScatterElements(past, places, update, axis=axis)]


_LOOKUPS = ("Gather", "GatherElements", "GatherND")
_SCATTERS = ("Scatter", "ScatterElements", "ScatterND")
traits(*_LOOKUPS, moves=(0,), exact=True, lookup=True, part=True)
traits("Compress", moves=(0,), exact=True, selects=True)
# Not exact: with reduction="add" they add.
traits(*_SCATTERS, moves=(0, 2), combines="reduction")
traits("TensorScatter", moves=(0, 1))
traits("TopK", exact=True, carries_large=True, ranks=1)
traits(own("TopKGrad"), own("ScatterElementsGrad"), own("ScatterNDGrad"), exact=True)
range_rule(*_LOOKUPS, "Compress")(same)


@range_rule(*_SCATTERS)
def _scatter_range(op: Operator, ranges: Ranges) -> Interval | None:
    return any_of(op, ranges) if combined(op) == "none" else None
