"""Layers: functions that create parameters and add operators.

A layer called without a name is called ``<type>_<n>`` (``conv2d_0``); its parameters are ``<name>.w_0`` and
``<name>.b_0``, its outputs ``<name>.tmp_<n>``. A name used again, with equal shapes, shares the parameters.

``param_attr`` and ``bias_attr`` say how a parameter is made: None or True for the default; an
``amp.nn.initializer`` or an array for its initial value; a string for its name; a variable to share it; for
a bias that the layer can do without, False for none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..ir import names
from ..ir.context import default_main_program
from ..ir.program import Variable
from .building import (
    FLOATING,
    INTEGER,
    append,
    append_many,
    axis_of,
    check_window,
    describe,
    fixed,
    pads,
    pair,
    variable,
    whole,
)
from .elementwise import activate, check_activation
from .initializer import Constant, KaimingNormal, XavierUniform
from .parameters import Attr, parameter


def _required(call: str, argument: str, attr: Attr) -> Attr:
    if attr is False:
        raise ArgumentError(f"{call}: {argument}=False, but the layer cannot do without this parameter")
    return attr


def conv2d(x: Variable, num_filters: int, filter_size: int | Sequence[int], stride: int | Sequence[int] = 1,
           padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
           param_attr: Attr = None, bias_attr: Attr = None, act: str | None = None,
           name: str | None = None) -> Variable:  # fmt: skip
    """2-D convolution (cross-correlation) with a bias.

    ``x``: float [batch, channels, height, width], channels known. ``padding``: one int, (height, width), or
    (top, bottom, left, right). Filters w_0 [num_filters, channels / groups, height, width] start Kaiming normal
    (as Paddle's, standard deviation sqrt(2 / fan in)), the bias b_0 [num_filters] at 0.
    ArgumentError: unknown channels, groups that do not divide them, a filter larger than the padded image.
    """
    call = "conv2d"
    variable(call, "x", x, dtypes=FLOATING, rank=4)
    check_activation(call, act)
    num_filters, groups = whole(call, "num_filters", num_filters), whole(call, "groups", groups)
    kernel = pair(call, "filter_size", filter_size)
    strides, dilations, pad = pair(call, "stride", stride), pair(call, "dilation", dilation), pads(call, padding)
    channels = fixed(call, "x", x, 1)
    if channels % groups or num_filters % groups:
        raise ArgumentError(f"{call}: groups={groups} must divide the {channels} channels of '{x.name}' and the "
                            f"{num_filters} filters")  # fmt: skip
    check_window(call, x, kernel, pad, dilations)
    name = name or names.generate(call)
    shape = [num_filters, channels // groups, *kernel]
    param_attr = _required(call, "param_attr", param_attr)
    inputs = [x, parameter(call, f"{name}.w_0", shape, x.dtype, param_attr, KaimingNormal())]
    if bias_attr is not False:
        inputs.append(parameter(call, f"{name}.b_0", [num_filters], x.dtype, bias_attr, Constant()))
    attrs = {"kernel_shape": kernel, "strides": strides, "pads": pad, "dilations": dilations, "group": groups}
    return activate(call, append(call, "Conv", inputs, attrs=attrs, prefix=name), act, name)


def fc(x: Variable, size: int, act: str | None = None, num_flatten_dims: int = 1, param_attr: Attr = None,
       bias_attr: Attr = None, name: str | None = None) -> Variable:  # fmt: skip
    """Fully connected layer: x @ w_0 + b_0 on the flattened trailing dimensions.

    ``x``: float; its first ``num_flatten_dims`` dimensions are kept, the others, whose sizes are known, are
    one. Result: [kept dimensions, size]. w_0 [in, size] starts Xavier uniform, b_0 [size] at 0.
    ArgumentError: a rank not above ``num_flatten_dims``, an unknown trailing size.
    """
    call = "fc"
    variable(call, "x", x, dtypes=FLOATING, min_rank=1)
    check_activation(call, act)
    size, kept = whole(call, "size", size), whole(call, "num_flatten_dims", num_flatten_dims)
    rank = len(x.shape or ())
    if rank <= kept:
        raise ArgumentError(
            f"{call}: x {describe(x)} must have more than {kept} dimensions: num_flatten_dims={kept} of them are kept, "
            "the others are the features"
        )
    features = math.prod(fixed(call, "x", x, axis) for axis in range(kept, rank))
    name = name or names.generate(call)
    weight = parameter(call, f"{name}.w_0", [features, size], x.dtype, _required(call, "param_attr", param_attr),
                       XavierUniform())  # fmt: skip
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


def _channels(call: str, x: Variable) -> int:
    variable(call, "x", x, dtypes=FLOATING, min_rank=2)
    return fixed(call, "x", x, 1)


def batch_norm(x: Variable, act: str | None = None, momentum: float = 0.9, epsilon: float = 1e-5, is_test: bool = False,
               param_attr: Attr = None, bias_attr: Attr = None, name: str | None = None) -> Variable:  # fmt: skip
    """Batch normalisation (Ioffe & Szegedy 2015) over every dimension but the second.

    ``x``: float [batch, channels, …]. Scale w_0 (1), bias b_0 (0), running mean w_1 (0) and variance w_2 (1) are
    [channels], fp32 also where ``x`` is 16-bit; after a run ``w_1 = momentum * w_1 + (1 - momentum) * mean`` and w_2
    alike, with the variance over N elements, not N - 1. ``is_test``, and a clone for testing, use the
    running statistics and leave them alone.
    """
    call = "batch_norm"
    channels = _channels(call, x)
    check_activation(call, act)
    if not 0 <= momentum <= 1:
        raise ArgumentError(f"{call}: momentum must be in [0, 1], not {momentum}")
    dtype = "float64" if x.dtype == "float64" else "float32"
    name = name or names.generate(call)
    inputs = [x]
    for suffix, attr, start, trainable in (("w_0", _required(call, "param_attr", param_attr), 1.0, True),
                                           ("b_0", _required(call, "bias_attr", bias_attr), 0.0, True),
                                           ("w_1", None, 0.0, False), ("w_2", None, 1.0, False)):  # fmt: skip
        inputs.append(parameter(call, f"{name}.{suffix}", [channels], dtype, attr, Constant(start), trainable))
    attrs = {"epsilon": float(epsilon), "momentum": float(momentum)}
    if is_test:
        y = append(call, "BatchNormalization", inputs, attrs=attrs, prefix=name)
    else:
        attrs["training_mode"] = 1
        y, *statistics = append_many(call, "BatchNormalization", inputs, 3, attrs=attrs, prefix=name)
        _update(inputs[3:], statistics)
    return activate(call, y, act, name)


def _update(states: Sequence[Variable], values: Sequence[Variable]) -> None:
    """Let each state take its new value, named ``<state>@NEW``, when a step ends."""
    program = default_main_program()
    for state, value in zip(states, values, strict=True):
        program.rename_variable(value, program.unique(f"{state.name}@NEW"))
        program.set_update(state, value)


def layer_norm(x: Variable, begin_norm_axis: int = -1, epsilon: float = 1e-5, act: str | None = None,
               param_attr: Attr = None, bias_attr: Attr = None, name: str | None = None) -> Variable:  # fmt: skip
    """Layer normalisation (Ba et al. 2016) over the dimensions from ``begin_norm_axis`` on.

    That is the last dimension by default, as transformers use it (Paddle's default is 1). ``x``: float, the
    normalised sizes known. Scale w_0 (1) and bias b_0 (0) have these sizes; ``bias_attr=False`` leaves the bias out.
    """
    call = "layer_norm"
    variable(call, "x", x, dtypes=FLOATING, min_rank=1)
    check_activation(call, act)
    axis = axis_of(call, begin_norm_axis, x, "begin_norm_axis")
    shape = [fixed(call, "x", x, i) for i in range(axis, len(x.shape or ()))]
    name = name or names.generate(call)
    scale = parameter(call, f"{name}.w_0", shape, x.dtype, _required(call, "param_attr", param_attr), Constant(1.0))
    inputs = [x, scale]
    if bias_attr is not False:
        inputs.append(parameter(call, f"{name}.b_0", shape, x.dtype, bias_attr, Constant()))
    attrs = {"axis": axis, "epsilon": float(epsilon)}
    return activate(call, append(call, "LayerNormalization", inputs, attrs=attrs, prefix=name), act, name)


def embedding(x: Variable, size: Sequence[int], dtype: Any = "float32", param_attr: Attr = None,
              name: str | None = None) -> Variable:  # fmt: skip
    """Rows of a table: result [shape of ``x``, width].

    ``x``: int64 or int32 row numbers, any shape. ``size``: [rows, width]. The table w_0 starts Xavier uniform.
    """
    call = "embedding"
    variable(call, "x", x, dtypes=INTEGER)
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise ArgumentError(f"{call}: size must be [rows, width], not {size!r}")
    name = name or names.generate(call)
    shape = [whole(call, "size", item) for item in size]
    table = parameter(call, f"{name}.w_0", shape, dtype, _required(call, "param_attr", param_attr), XavierUniform())
    return append(call, "Gather", [table, x], attrs={"axis": 0}, prefix=name)
