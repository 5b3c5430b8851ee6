"""Embeddings: rows of a table, and sums of bags of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.metadata import FULL
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import ONNX_TYPES, numpy_dtype
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.building import (
    FLOATING,
    INTEGER,
    Builder,
    appending,
    constant,
    fixed,
    layer_name,
    variable,
    whole,
)
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.initializer import XavierUniform
from amp_transpiler.nn.parameters import Attr, parameter, required
from amp_transpiler.option_checks import choice, switch


@paddle_arguments("nn.input", "nn.weights", "nn.embedding")
def embedding(
    x: Variable,
    size: Sequence[int],
    dtype: Any = "float32",
    param_attr: Attr = None,
    name: str | None = None,
    padding_idx: int | None = None,
    is_sparse: bool = False,
) -> Variable:
    """Rows of a table: result [shape of ``x``, width].

    ``x``: int64 or int32 row numbers, any shape. ``size``: [rows, width]. The table w_0 starts Xavier uniform. Where
    ``x`` is ``padding_idx`` (below 0: counted from the last row), the result is 0, and that row gets no gradient.
    With ``is_sparse`` the gradient is that of the rows in ``x`` alone: a step takes time and memory of these, where the
    optimizer leaves the others as they are (SGD, Adagrad, and Momentum, Adam and AdamW with ``lazy_mode=True``).
    """
    call = "embedding"
    variable(call, "x", x, dtypes=INTEGER)
    name = layer_name(call, name)
    table = _table(call, size, dtype, param_attr, name, is_sparse)
    return _rows(Builder(call, name), table, x, _padding_row(call, padding_idx, table))


@paddle_arguments("nn.weights")
def embedding_bag(
    x: Variable,
    size: Sequence[int],
    offsets: Variable | None = None,
    mode: str = "mean",
    dtype: Any = "float32",
    param_attr: Attr = None,
    name: str | None = None,
    padding_idx: int | None = None,
    is_sparse: bool = False,
) -> Variable:
    """Sums, means or largest elements of the rows of each bag: result [bags, width].

    ``x``: int64 or int32 row numbers, [bags, rows of each bag], or, with ``offsets``, [all rows], bag after bag;
    ``offsets``: int64 or int32 [bags], where each bag begins in ``x``, ascending from 0; two that are equal make the
    first bag empty, and its result 0. Where ``x`` is ``padding_idx``, it counts for nothing. ``mode``: "sum", "mean" or
    "max", whose gradient goes to the first row that has the largest element. 16-bit tables are added up in fp32. The
    other arguments: see :func:`embedding`.
    """
    call = "embedding_bag"
    _bags(call, x, offsets, mode)
    name = layer_name(call, name)
    table = _table(call, size, dtype, param_attr, name, is_sparse)
    return _bagged(Builder(call, name), table, x, offsets, mode, _padding_row(call, padding_idx, table))


def _table(call: str, size: Any, dtype: Any, param_attr: Attr, name: str, is_sparse: bool) -> Variable:
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise ArgumentError(f"{call}: size must be [rows, width], not {size!r}")
    shape = [whole(call, "size", item) for item in size]
    required(call, "param_attr", param_attr)
    table = parameter(call, f"{name}.w_0", shape, dtype, param_attr, XavierUniform())
    table.sparse = switch(f"{call}: is_sparse", is_sparse) or table.sparse
    return table


def _padding_row(call: str, padding_idx: int | None, table: Variable) -> int | None:
    if padding_idx is None:
        return None
    rows = fixed(call, "weight", table, 0)
    row = whole(call, "padding_idx", padding_idx, -rows)
    if row >= rows:
        raise ArgumentError(f"{call}: padding_idx={row} is outside the {rows} rows of the table")
    return row % rows


def _rows(put: Builder, table: Variable, x: Variable, padding: int | None) -> Variable:
    y = put("Gather", table, x, axis=0)
    if padding is None:
        return y
    pads = put("Equal", x, constant(x, padding))
    column = put("Unsqueeze", pads, np.array([-1], np.int64))
    return put("Where", column, constant(y, 0), y)


@function()
def functional_embedding(
    x: Variable, weight: Variable, padding_idx: int | None = None, sparse: bool = False, *, name: str | None = None
) -> Variable:
    """Rows ``x`` (int64 or int32, any shape) of the table ``weight`` [rows, width]; see :func:`amp.nn.embedding`."""
    call = "embedding"
    variable(call, "x", x, dtypes=INTEGER)
    variable(call, "weight", weight, dtypes=FLOATING, rank=2)
    weight.sparse = switch(f"{call}: sparse", sparse) or weight.sparse
    return _rows(appending(call), weight, x, _padding_row(call, padding_idx, weight))


@function()
def functional_embedding_bag(
    x: Variable,
    weight: Variable,
    offsets: Variable | None = None,
    mode: str = "mean",
    padding_idx: int | None = None,
    sparse: bool = False,
    *,
    name: str | None = None,
) -> Variable:
    """Sums, means or largest elements of rows of ``weight`` [rows, width]; see :func:`amp.nn.embedding_bag`."""
    call = "embedding_bag"
    _bags(call, x, offsets, mode)
    variable(call, "weight", weight, dtypes=FLOATING, rank=2)
    weight.sparse = switch(f"{call}: sparse", sparse) or weight.sparse
    return _bagged(appending(call), weight, x, offsets, mode, _padding_row(call, padding_idx, weight))


def _bags(call: str, x: Variable, offsets: Variable | None, mode: str) -> None:
    choice(f"{call}: mode", mode, ("sum", "mean", "max"))
    variable(call, "x", x, dtypes=INTEGER, rank=2 if offsets is None else 1)
    if offsets is not None:
        variable(call, "offsets", offsets, dtypes=INTEGER, rank=1)


def _bagged(
    put: Builder, table: Variable, x: Variable, offsets: Variable | None, mode: str, padding: int | None
) -> Variable:
    return bags_of_rows(put, _rows(put, table, x, padding), x, offsets, mode, padding)


def bags_of_rows(
    put: Builder, found: Variable, x: Variable, offsets: Variable | None, mode: str, padding: int | None
) -> Variable:
    """:func:`embedding_bag` of rows that were looked up: ``found`` has one more dimension than ``x``."""

    def cast(value: Variable, dtype: str | None) -> Variable:
        return value if value.dtype == dtype else put("Cast", value, to=ONNX_TYPES[str(dtype)])

    along = np.array([1], np.int64)
    if mode == "max":
        pads = None if padding is None else put("Unsqueeze", put("Equal", x, constant(x, padding)), np.array([-1]))
        return _largest(put, found, None if offsets is None else _bag_of_each(put, x, cast(offsets, "int64")), pads)
    rows = cast(found, "float32")
    ones = None
    if mode == "mean":
        counts = put("Equal", x, x) if padding is None else put("Not", put("Equal", x, constant(x, padding)))
        ones = cast(counts, "float32")
    if offsets is None:
        total = put("ReduceSum", rows, along, keepdims=0)
        count = None if ones is None else put("ReduceSum", ones, along, keepdims=1)
    else:
        bag, start = _bag_of_each(put, x, cast(offsets, "int64"))
        flat = np.ones((1, fixed(put.call, "weight", found, 1)), np.float32)
        total = _added(put, put("Mul", start, flat), bag, rows)
        count = None if ones is None else _added(put, start, bag, put("Unsqueeze", ones, along))
    if count is not None:
        total = put("Div", total, put("Max", count, np.ones((1, 1), np.float32)))
    return cast(total, found.dtype)


def _bag_of_each(put: Builder, x: Variable, offsets: Variable) -> tuple[Variable, Variable]:
    """The bag [all rows, 1] of each row, and zeros [bags, 1]: counted at the offsets, behind all rows too."""
    zeros = put("Cast", put("Sub", x, x), to=ONNX_TYPES["int64"])
    none = put("Sub", offsets, offsets)
    counts = put("Concat", zeros, np.zeros(1, np.int64), axis=0)
    ones = put("Add", none, np.ones(1, np.int64))
    begins = put("ScatterElements", counts, offsets, ones, axis=0, reduction="add")
    number = put("Sub", put("CumSum", begins, np.array(0, np.int64)), np.ones(1, np.int64))
    number = put("Slice", number, np.array([0], np.int64), np.array([-1], np.int64), np.array([0], np.int64))
    start = put("Cast", put("Unsqueeze", none, np.array([1], np.int64)), to=ONNX_TYPES["float32"])
    return put("Unsqueeze", number, np.array([1], np.int64)), start


def _largest(put: Builder, rows: Variable, bags: tuple[Variable, Variable] | None, pads: Variable | None) -> Variable:
    """The elements of each bag's rows that are largest, the first of equal ones, taken out of ``rows``; 0 where there
    are none. ``bags``: as of :func:`_bag_of_each`; ``pads``: True for rows that are left out, which are 0."""

    def full(type_: str, *inputs: Any, **attrs: Any) -> Variable:
        made = put(type_, *inputs, **attrs)
        assert made.producer is not None
        made.producer.metadata[FULL] = str(Reason(Kind.COMPARES, rows.name))
        return made

    wide = put("Cast", rows, to=ONNX_TYPES["float32"])
    low = np.array(-np.inf, np.float32)
    compared = wide if pads is None else full("Where", pads, low, wide)
    if bags is None:
        first = full("ArgMax", compared, axis=1, keepdims=1)
        return put("Squeeze", put("GatherElements", rows, first, axis=1), np.array([1], np.int64))
    bag, start = bags
    width = np.zeros((1, fixed("embedding_bag", "weight", rows, 1)), np.float32)
    # CUDA's kernel of ScatterElements has largest and smallest ones, that of ScatterND has sums alone.
    every = put("Add", bag, width.astype(np.int64))
    top = full("ScatterElements", put("Add", start, width + low), every, compared, axis=0, reduction="max")
    is_top = full("Equal", compared, full("GatherND", top, bag))
    if pads is not None:
        is_top = put("And", is_top, put("Not", pads))
    # Rows are counted from 1 on, so that 0 is a row of zeros for bags that have none.
    beyond, none = np.array(2**31 - 1), np.zeros(1, np.int64)
    number = put("CumSum", put("Add", put("Sub", bag, bag), np.ones(1, np.int64)), np.array(0, np.int64))
    numbers = put("Where", is_top, number, beyond)
    nobody = put("Add", put("Cast", put("Add", start, width), to=ONNX_TYPES["int64"]), beyond)
    first = put("ScatterElements", nobody, every, numbers, axis=0, reduction="min")
    place = put("Where", put("Equal", first, beyond), none, first)
    behind = put("Concat", width.astype(numpy_dtype(str(rows.dtype))), rows, axis=0)
    return put("GatherElements", behind, place, axis=0)


def _added(put: Builder, start: Variable, bag: Variable, values: Variable) -> Variable:
    total: Variable = put("ScatterND", start, bag, values, reduction="add")
    assert total.producer is not None
    total.producer.metadata[FULL] = str(Reason(Kind.ADDS_UP))
    return total
