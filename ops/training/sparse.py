"""Gradients of some rows of a table: a table of which a step looks up a few rows has none for the others.

``GatherRowsGrad(indices, dy) -> (rows, values)``: the row that each index names, and its gradient.
``MergeRows(rows1, values1, rows2, values2 …) -> (rows, values)``: each row once, with the sum of its values, added up
in fp32 and rounded once; divided by ``ranks`` where they are those of several.
``DenseRows(rows, values) -> gradient``: the gradient of the whole table, zeros for the other rows.

What ``MergeRows`` makes has a fixed size, that of all rows it is given: ``rows`` are int64 and ascend, and where a row
was named again, the last one is repeated at the end, with values of zero. So sums over the values are those of the
gradient, and it can be merged again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Shape, Types
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ops.common import row_lookup, shape_of, size_of, sliced
from amp_transpiler.ops.row_sums import added_rows, remember_rows
from amp_transpiler.ops.training.branches import as_tensor, emulating

GATHER, MERGE, DENSE = "GatherRowsGrad", "MergeRows", "DenseRows"


def _count(shapes: Sequence[Shape | None]) -> int | None:
    """How many elements tensors have together; None where that is not known."""
    sizes = [[d for d in shape or (None,) if isinstance(d, int)] for shape in shapes]
    known = all(shape is not None and len(found) == len(shape) for shape, found in zip(shapes, sizes, strict=True))
    return sum(map(math.prod, sizes)) if known else None


def _gather_types(op: Operator) -> Types:
    indices, dy = op.inputs
    assert indices is not None and dy is not None
    rest = None if dy.shape is None or indices.shape is None else dy.shape[len(indices.shape) :]
    count = _count([indices.shape])
    return [("int64", (count,)), (dy.dtype, None if rest is None else (count, *rest))]


@lowering_rule(own(GATHER), native=True, infer=_gather_types)
def gather_rows(e: Emitter, op: Operator, indices: Value, dy: Value) -> list[Value]:
    """``size``: the rows of the table, from whose end indices below 0 count."""
    rows, shape = named_rows(e, indices, int(op.attrs["size"])), size_of(indices)
    return [rows, e.reshape(dy, (*size_of(rows), *size_of(dy)[len(shape) :]))]


def named_rows(e: Emitter, indices: Value, size: int) -> Value:
    """The rows that indices name in a table of this size, from whose end those below 0 count."""
    count = math.prod(size_of(indices))
    rows = e.cast(e.reshape(indices, (count,)), "int64")
    below = e.op("Less", rows, e.like(0, rows), shape=(count,))
    return e.Where(below, e.Add(rows, e.like(size, rows), shape=(count,)), rows, shape=(count,))


def _merge_types(op: Operator) -> Types:
    rows, values = op.inputs[::2], op.inputs[1::2]
    count = _count([None if v is None else v.shape for v in rows])
    first = values[0]
    assert first is not None
    rest = None if first.shape is None else first.shape[1:]
    return [("int64", (count,)), (first.dtype, None if rest is None else (count, *rest))]


@lowering_rule(own(MERGE), native=True, infer=_merge_types)
def merge_rows(e: Emitter, op: Operator, *inputs: Value) -> list[Value]:
    """By the place of each row among the distinct ones. Each lookup's part is added up by itself, as dense ones are."""
    named, parts, ranks = inputs[::2], inputs[1::2], op.attrs.get("ranks", 1)
    rows = named[0] if len(named) == 1 else e.Concat(*named, axis=0, shape=(sum(size_of(v)[0] for v in named),))
    count, rest = size_of(rows)[0], size_of(parts[0])[1:]
    if count < 2:
        return [rows, parts[0] if len(parts) == 1 else e.Concat(*parts, axis=0, shape=(count, *rest))]
    distinct, whose = numbered(e, rows)
    totals, start = list[Value](), 0
    for part in parts:
        wide, end = e.f32(part), start + size_of(part)[0]
        column = e.reshape(sliced(e, whose, 0, start, end), (end - start, 1))
        totals.append(_added(e, e.zeros((count, *rest), wide.dtype), column, wide, ranks))
        start = end
    total = totals[0] if len(totals) == 1 else e.op("Sum", *totals, shape=(count, *rest))
    if ranks != 1:
        total = e.Div(total, e.like(ranks, total), shape=(count, *rest))
    return [distinct, total]


def _added(e: Emitter, total: Value, column: Value, values: Value, ranks: int) -> Value:
    """Values added to the rows that a column of places names.

    A device adds what goes to one row in any order, so that ranks would come to differ in the last bit. Each of several
    ranks has a row once: those of more than two are added one rank after the other, as the processor adds them.
    """
    turns = ranks if ranks > 2 and e.at.device else 1
    size = size_of(column)[0] // turns
    for start in range(0, size * turns, max(1, size)):
        at, part = (sliced(e, value, 0, start, start + size) for value in (column, values))
        total = added_rows(e, total, at, part)
    return total


def numbered(e: Emitter, rows: Value) -> tuple[Value, Value]:
    """Rows in ascending order, each once, the last one repeated at the end; and the place there of each given one."""
    count = size_of(rows)[0]
    if count < 2:
        return rows, e.const(np.zeros(count, np.int64))
    ascending, place = e.op(
        "TopK", rows, e.ints(count), outputs=2, dtype=("int64", "int64"), shape=(count,), largest=0, axis=0
    )
    again = e.op("Equal", sliced(e, ascending, 0, 1, count), sliced(e, ascending, 0, 0, count - 1), shape=(count - 1,))
    first = e.Sub(e.like(1, rows), e.cast(again, "int64"), shape=(count - 1,))
    number = e.CumSum(e.Concat(e.ints(0), first, axis=0, shape=(count,)), e.const(0, "int64"), shape=(count,))
    last = e.Expand(sliced(e, ascending, 0, count - 1, count), e.ints(count), shape=(count,))
    distinct = e.ScatterElements(last, number, ascending, axis=0, shape=(count,))
    return distinct, e.ScatterElements(e.const(np.zeros(count, np.int64)), place, number, axis=0, shape=(count,))


@lowering_rule(own(DENSE), native=True)
def dense_rows(e: Emitter, op: Operator, rows: Value, values: Value) -> list[Value]:
    shape = shape_of(e, 0)
    wide = e.f32(values)
    at = e.reshape(rows, (*size_of(rows), 1))
    return [remember_rows(e, added_rows(e, e.zeros(shape, wide.dtype), at, wide), rows, wide)]


def repeated(e: Emitter, rows: Value, values: Value) -> Value:
    """The values of merged rows, where a repeated row has the values of the first of its name: ready to be written."""
    count = size_of(rows)[0]
    if count < 2:
        return values
    key = f"the first of each of {rows.name}"
    if key not in e.shared:
        again = e.op("Equal", sliced(e, rows, 0, 1, count), sliced(e, rows, 0, 0, count - 1), shape=(count - 1,))
        times = e.op("ReduceSum", e.cast(again, "int32"), keepdims=0, shape=())
        last = e.Sub(e.const(count - 1, "int32"), times, shape=())
        e.shared[key] = (e.Min(e.const(np.arange(count, dtype=np.int32)), last, shape=(count,)),)
    return e.Gather(values, e.shared[key][0], axis=0, shape=values.shape)


def picked(e: Emitter, table: Value, rows: Value) -> Value:
    """The rows of a table, of a 16-bit one without widening the rest."""
    real, shape = as_tensor(e, table), (*size_of(rows), *size_of(table)[1:])
    with e.emulation(False):
        found = row_lookup(e, real, rows, shape)
    return emulating(e, found, Value("", table.dtype, shape))


def written(e: Emitter, table: Value, rows: Value, new: Value) -> Value:
    """The table with other values in these rows; it can be written where it lies."""
    at, real, values = e.reshape(rows, (*size_of(rows), 1)), as_tensor(e, table), as_tensor(e, new)
    with e.emulation(False):
        made = e.op("ScatterND", real, at, values, shape=table.shape)
    return emulating(e, made, table)
