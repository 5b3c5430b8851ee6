"""Layers: functions that create parameters and add operators.

A layer called without a name is called ``<type>_<n>`` (``conv2d_0``); its parameters are ``<name>.w_0`` and
``<name>.b_0``, its outputs ``<name>.tmp_<n>``. A name used again, with equal shapes, shares the parameters.

``param_attr`` and ``bias_attr`` say how a parameter is made: None or True for the default; an
``amp.nn.initializer`` or an array for its initial value; a string for its name; a :class:`ParamAttr` for several of
these; a variable to share it; for a bias that the layer can do without, False for none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.activation_functions import activate, check_activation
from amp_transpiler.nn.building import FLOATING, INTEGER, append, constant, describe, fixed, fresh, variable, whole
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.initializer import Constant, XavierUniform
from amp_transpiler.nn.parameters import Attr, parameter, required


@paddle_arguments("nn.layer")
def fc(
    x: Variable,
    size: int,
    act: str | None = None,
    num_flatten_dims: int = 1,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    name: str | None = None,
) -> Variable:
    """Fully connected layer: x @ w_0 + b_0 on the flattened trailing dimensions.

    ``x``: float; its first ``num_flatten_dims`` dimensions are kept, the others, whose sizes are known, are
    one. Result: [kept dimensions, size]. w_0 [in, size] starts Xavier uniform, b_0 [size] at 0.
    ArgumentError: a rank not above ``num_flatten_dims``, an unknown trailing size.
    """
    call = "fc"
    if isinstance(x, (list, tuple)):
        raise ArgumentTypeError(f"{call}: x is a {type(x).__name__}; call {call} for each variable and add the results")
    variable(call, "x", x, dtypes=FLOATING, min_rank=1)
    check_activation(call, act)
    rank = len(x.shape or ())
    size, kept = whole(call, "size", size), whole(call, "num_flatten_dims", num_flatten_dims, -rank)
    kept = kept + rank if kept < 0 else kept
    if not 0 < kept < rank:
        raise ArgumentError(
            f"{call}: x {describe(x)} must have more than {kept} dimensions: num_flatten_dims={kept} of them are kept, "
            "at least 1, the others are the features"
        )
    features = math.prod(fixed(call, "x", x, axis) for axis in range(kept, rank))
    required(call, "param_attr", param_attr)
    name = name or unique_name.generate(call)
    weight = parameter(call, f"{name}.w_0", [features, size], x.dtype, param_attr, XavierUniform())
    bias = parameter(call, f"{name}.b_0", [size], x.dtype, bias_attr, Constant()) if bias_attr is not False else None
    if rank > kept + 1:
        x = _merged(call, x, kept, features, name)
    y = append(call, "MatMul", [x, weight], prefix=name)
    if bias is not None:
        y = append(call, "Add", [y, bias], prefix=name)
    return activate(call, y, act, name)


def _merged(call: str, x: Variable, kept: int, features: int, prefix: str) -> Variable:
    """All dimensions from ``kept`` on as one."""
    if kept == 1:
        return append(call, "Flatten", [x], attrs={"axis": 1}, prefix=prefix)
    return append(call, "Reshape", [x, np.array([0] * kept + [features], np.int64)], prefix=prefix)


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
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise ArgumentError(f"{call}: size must be [rows, width], not {size!r}")
    shape = [whole(call, "size", item) for item in size]
    row = _padding_row(call, padding_idx, shape[0])
    required(call, "param_attr", param_attr)
    name = name or unique_name.generate(call)
    table = parameter(call, f"{name}.w_0", shape, dtype, param_attr, XavierUniform())
    table.sparse = table.sparse or bool(is_sparse)
    return _rows(call, table, x, row, name)


def _padding_row(call: str, padding_idx: int | None, rows: int) -> int | None:
    if padding_idx is None:
        return None
    row = whole(call, "padding_idx", padding_idx, -rows)
    if row >= rows:
        raise ArgumentError(f"{call}: padding_idx={row} is outside the {rows} rows of the table")
    return row % rows


def _rows(call: str, table: Variable, x: Variable, padding: int | None, prefix: str) -> Variable:
    y = append(call, "Gather", [table, x], attrs={"axis": 0}, prefix=prefix)
    if padding is None:
        return y
    pads = append(call, "Equal", [x, constant(x, padding)], prefix=prefix)
    column = append(call, "Unsqueeze", [pads, np.array([-1], np.int64)], prefix=prefix)
    return append(call, "Where", [column, constant(y, 0), y], prefix=prefix)


@function()
def functional_embedding(
    x: Variable, weight: Variable, padding_idx: int | None = None, sparse: bool = False
) -> Variable:
    """Rows ``x`` (int64 or int32, any shape) of the table ``weight`` [rows, width]; see :func:`amp.nn.embedding`."""
    call = "embedding"
    variable(call, "x", x, dtypes=INTEGER)
    variable(call, "weight", weight, dtypes=FLOATING, rank=2)
    row = None if padding_idx is None else _padding_row(call, padding_idx, fixed(call, "weight", weight, 0))
    weight.sparse = weight.sparse or bool(sparse)
    return _rows(call, weight, x, row, fresh(call))


@paddle_arguments("nn.input", "nn.weights")
def prelu(
    x: Variable, mode: str, param_attr: Attr = None, data_format: str = "NCHW", name: str | None = None
) -> Variable:
    """``x`` where it is above 0, w_0 * x elsewhere (He et al. 2015); the slopes w_0 start at 0.25.

    ``mode``: "all" for one slope [1], "channel" for one a channel [channels], "element" for one an element
    [1, sizes behind the batch], which are known. ``x``: float [batch, channels, …], or, with ``data_format`` "NHWC",
    its channels last.
    """
    call = "prelu"
    rank = len(variable(call, "x", x, dtypes=FLOATING, min_rank=2).shape or ())
    if mode not in ("all", "channel", "element"):
        raise ArgumentError(f'{call}: mode={mode!r}; known are "all", "channel" and "element"')
    if data_format not in ("NCHW", "NHWC"):
        raise ArgumentError(f"{call}: data_format={data_format!r}; known are NCHW and NHWC")
    axis = rank - 1 if data_format == "NHWC" else 1
    shape = [1]
    if mode == "channel":
        shape = [fixed(call, "x", x, axis)]
    elif mode == "element":
        shape = [1, *(fixed(call, "x", x, i) for i in range(1, rank))]
    required(call, "param_attr", param_attr)
    name = name or unique_name.generate(call)
    slope = parameter(call, f"{name}.w_0", shape, x.dtype, param_attr, Constant(0.25))
    if mode == "channel" and axis != rank - 1:
        slope = append(call, "Reshape", [slope, np.array([-1, *[1] * (rank - 2)], np.int64)], prefix=name)
    return append(call, "PRelu", [x, slope], prefix=name)
