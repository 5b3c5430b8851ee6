"""Layers: functions that create parameters and add operators.

A layer called without a name is called ``<type>_<n>`` (``conv2d_0``); its parameters are ``<name>.w_0`` and
``<name>.b_0``, its outputs ``<name>.tmp_<n>``. A name used again, with equal shapes, shares the parameters.

``param_attr`` and ``bias_attr`` say how a parameter is made: None or True for the default; an
``amp.nn.initializer`` or an array for its initial value; a string for its name; a :class:`ParamAttr` for several of
these; a variable to share it; for a bias that the layer can do without, False for none.
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.activation_functions import activate, check_activation
from amp_transpiler.nn.building import FLOATING, Builder, describe, fixed, layer_name, variable, whole
from amp_transpiler.nn.initializer import Constant, XavierUniform
from amp_transpiler.nn.parameters import Attr, parameter, required
from amp_transpiler.option_checks import choice

_FLATTENED = "num_flatten_dims=-1 keeps all dimensions but the last, as for a layer at each step of a sequence"


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
    features = math.prod(fixed(call, "x", x, axis, _FLATTENED) for axis in range(kept, rank))
    required(call, "param_attr", param_attr)
    name = layer_name(call, name)
    put = Builder(call, name)
    weight = parameter(call, f"{name}.w_0", [features, size], x.dtype, param_attr, XavierUniform())
    bias = parameter(call, f"{name}.b_0", [size], x.dtype, bias_attr, Constant()) if bias_attr is not False else None
    if rank > kept + 1:
        x = _merged(put, x, kept, features)
    y = put("MatMul", x, weight)
    if bias is not None:
        y = put("Add", y, bias)
    return activate(y, act, name)


def _merged(put: Builder, x: Variable, kept: int, features: int) -> Variable:
    """All dimensions from ``kept`` on as one."""
    if kept == 1:
        return put("Flatten", x, axis=1)
    return put("Reshape", x, np.array([0] * kept + [features], np.int64))


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
    choice(f"{call}: mode", mode, ("all", "channel", "element"))
    choice(f"{call}: data_format", data_format, ("NCHW", "NHWC"))
    axis = rank - 1 if data_format == "NHWC" else 1
    shape = [1]
    if mode == "channel":
        shape = [fixed(call, "x", x, axis)]
    elif mode == "element":
        shape = [1, *(fixed(call, "x", x, i) for i in range(1, rank))]
    required(call, "param_attr", param_attr)
    name = layer_name(call, name)
    put = Builder(call, name)
    slope = parameter(call, f"{name}.w_0", shape, x.dtype, param_attr, Constant(0.25))
    if mode == "channel" and axis != rank - 1:
        slope = put("Reshape", slope, np.array([-1, *[1] * (rank - 2)], np.int64))
    return put("PRelu", x, slope)
