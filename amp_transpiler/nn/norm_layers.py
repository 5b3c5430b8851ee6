"""Normalisation layers. Their statistics are computed in fp32 in every mode.

``param_attr=False`` leaves the scale out (1), ``bias_attr=False`` the bias (0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.metadata import ASKED, SYNCHRONIZED
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.activation_functions import activate, check_activation
from amp_transpiler.nn.building import (
    FLOATING,
    Builder,
    Input,
    append,
    axis_of,
    describe,
    fixed,
    integers,
    layer_name,
    real,
    variable,
    whole,
)
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.initializer import Constant
from amp_transpiler.nn.parameters import Attr, parameter
from amp_transpiler.nn.windows import LAYOUTS, Image, channels_last
from amp_transpiler.option_checks import switch
from amp_transpiler.program import default_main_program

_STATISTICS = (("w_1", 0.0), ("w_2", 1.0))


def _image(call: str, x: Variable, data_layout: str | None) -> Image:
    """``x`` [batch, channels, …], or with its channels last."""
    rank = len(variable(call, "x", x, dtypes=FLOATING, min_rank=2).shape or ()) - 2
    if data_layout in (None, "NCHW", "NHWC"):  # of any number of axes
        return Image(call, x, data_layout == "NHWC")
    if rank not in LAYOUTS:
        raise ArgumentError(f"{call}: data_layout={data_layout!r} is of an image; x is {describe(x)}")
    return Image(call, x, channels_last(call, data_layout, rank, "data_layout"))


def _scale_and_bias(
    call: str, name: str, shape: list[int], dtype: str, param_attr: Attr, bias_attr: Attr
) -> list[Input]:
    """The parameters w_0 and b_0, or constants where they are left out."""
    found: list[Input] = []
    for suffix, attr, start in (("w_0", param_attr, 1.0), ("b_0", bias_attr, 0.0)):
        if attr is False:
            found.append(np.full(shape, start, numpy_dtype(dtype)))
        else:
            found.append(parameter(call, f"{name}.{suffix}", shape, dtype, attr, Constant(start)))
    return found


def _epsilon(call: str, epsilon: Any) -> float:
    value = real(call, "epsilon", epsilon)
    if value < 0:
        raise ArgumentError(f"{call}: epsilon must not be negative, it is {value:g}")
    return value


@paddle_arguments("nn.layer", "nn.batch_norm")
def batch_norm(
    x: Variable,
    act: str | None = None,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    is_test: bool = False,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    name: str | None = None,
    data_layout: str = "NCHW",
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    use_global_stats: bool = False,
    synchronized: bool = False,
) -> Variable:
    """Batch normalisation (Ioffe & Szegedy 2015) over every dimension but the second.

    ``x``: float [batch, channels, …]. Scale w_0 (1), bias b_0 (0), running mean w_1 (0) and variance w_2 (1) are
    [channels], fp32 also where ``x`` is 16-bit; after a run ``w_1 = momentum * w_1 + (1 - momentum) * mean`` and w_2
    alike, with the variance over N elements, not N - 1. ``is_test``, ``use_global_stats``, and a clone for testing, use
    the running statistics and leave them alone. ``moving_mean_name`` and ``moving_variance_name`` are other names of
    w_1 and w_2. ``data_layout``: "NHWC", "NLC" or "NDHWC" where channels come last. ``synchronized``: where several
    ranks train, the statistics are those of the batches of all of them.
    """
    call = "batch_norm"
    at = _image(call, x, data_layout)
    channels = at.channels
    check_activation(call, act)
    if not 0 <= real(call, "momentum", momentum) <= 1:
        raise ArgumentError(f"{call}: momentum must be in [0, 1], not {momentum}")
    attrs = {"epsilon": _epsilon(call, epsilon), "momentum": float(momentum)}
    dtype = "float64" if x.dtype == "float64" else "float32"
    name = layer_name(call, name)
    affine = _scale_and_bias(call, name, [channels], dtype, param_attr, bias_attr)
    states = [
        parameter(call, f"{name}.{suffix}", [channels], dtype, attr, Constant(start), False)
        for (suffix, start), attr in zip(_STATISTICS, (moving_mean_name, moving_variance_name), strict=True)
    ]
    switch(f"{call}: synchronized", synchronized)
    training = not (is_test or use_global_stats)
    y = _batch_normalised(Builder(call, name), at, affine, states, attrs, training, synchronized)
    return activate(y, act, name)


def _batch_normalised(
    put: Builder,
    at: Image,
    affine: Sequence[Input],
    states: Sequence[Variable],
    attrs: Any,
    training: bool,
    synchronized: bool,
) -> Variable:
    inputs: list[Input] = [at.channels_first(put), *affine, *states]
    if not training:
        return at.as_given(put, put("BatchNormalization", *inputs, **attrs))
    attrs = attrs | {"training_mode": 1}
    updates = default_main_program().updates  # a call before this one has moved shared statistics already
    inputs = [*inputs[:3], *(updates.get(state, state) for state in states)]
    y, *statistics = put.several(3, "BatchNormalization", *inputs, **attrs)
    _update(states, statistics)
    if synchronized and y.producer is not None:
        y.producer.metadata[SYNCHRONIZED] = ASKED
    return at.as_given(put, y)


def _update(states: Sequence[Variable], values: Sequence[Variable]) -> None:
    """Let each state take its new value, named ``<state>@NEW``, when a step ends."""
    program = default_main_program()
    for state, value in zip(states, values, strict=True):
        program.rename_variable(value, program.unique(f"{state.name}@NEW"))
        value.stop_gradient = True
        program.set_update(state, value)


@paddle_arguments("nn.weights", "nn.act")
def layer_norm(
    x: Variable | None = None,
    begin_norm_axis: int | None = None,
    epsilon: float = 1e-5,
    act: str | None = None,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    name: str | None = None,
    scale: bool = True,
    shift: bool = True,
    *,
    input: Variable | None = None,
) -> Variable:
    """Layer normalisation (Ba et al. 2016) over the dimensions from ``begin_norm_axis`` on.

    That is the last dimension by default, as transformers use it. ``x``: float, the normalised sizes known. Scale w_0
    (1) and bias b_0 (0) have these sizes; ``scale=False`` and ``shift=False`` leave them out too. ``input``: Paddle's
    name of ``x``; its default axis is 1, so one must be given where that is another.
    """
    call = "layer_norm"
    if input is not None:
        if x is not None:
            raise ArgumentTypeError(f"{call}: 'input' is another name of 'x', which is given as well")
        x = variable(call, "input", input, min_rank=1)
        if begin_norm_axis is None and len(x.shape or ()) > 2:
            raise ArgumentError(
                f"{call}: input=... is Paddle's spelling, where begin_norm_axis is 1 unless given; "
                "here it is the last axis. Give begin_norm_axis"
            )
    begin_norm_axis = -1 if begin_norm_axis is None else begin_norm_axis
    x = variable(call, "x", x, dtypes=FLOATING, min_rank=1)
    check_activation(call, act)
    axis = axis_of(call, begin_norm_axis, x, "begin_norm_axis")
    shape = [fixed(call, "x", x, i) for i in range(axis, len(x.shape or ()))]
    attrs = {"axis": axis, "epsilon": _epsilon(call, epsilon)}
    name = layer_name(call, name)
    weight, bias = _scale_and_bias(
        call, name, shape, str(x.dtype), param_attr if scale else False, bias_attr if shift else False
    )
    inputs = [x, weight, *([bias] if isinstance(bias, Variable) else [])]
    return activate(Builder(call, name)("LayerNormalization", *inputs, **attrs), act, name)


@paddle_arguments("nn.layer", "nn.layout")
def group_norm(
    x: Variable,
    groups: int,
    epsilon: float = 1e-5,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    act: str | None = None,
    data_layout: str = "NCHW",
    name: str | None = None,
) -> Variable:
    """Group normalisation (Wu & He 2018): over the positions and channels of each of ``groups`` groups of channels.

    ``x``: float [batch, channels, …]. Scale w_0 (1) and bias b_0 (0) are [channels].
    """
    call = "group_norm"
    at = _image(call, x, data_layout)
    check_activation(call, act)
    channels, count = at.channels, whole(call, "groups", groups)
    if channels % count:
        raise ArgumentError(f"{call}: groups={count} must divide the {channels} channels of {describe(x)}")
    attrs = {"num_groups": count, "epsilon": _epsilon(call, epsilon)}
    name = layer_name(call, name)
    inputs = _scale_and_bias(call, name, [channels], str(x.dtype), param_attr, bias_attr)
    put = Builder(call, name)
    return activate(at.as_given(put, put("GroupNormalization", at.channels_first(put), *inputs, **attrs)), act, name)


@paddle_arguments("nn.input", "nn.weights")
def instance_norm(
    x: Variable,
    epsilon: float = 1e-5,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    name: str | None = None,
    data_format: str | None = None,
) -> Variable:
    """Instance normalisation (Ulyanov et al. 2016): over the positions of each channel of each example.

    ``x``: float [batch, channels, axis, …]. Scale w_0 (1) and bias b_0 (0) are [channels].
    """
    call = "instance_norm"
    variable(call, "x", x, dtypes=FLOATING, min_rank=3)
    at = _image(call, x, data_format)
    channels, attrs = at.channels, {"epsilon": _epsilon(call, epsilon)}
    name = layer_name(call, name)
    inputs = _scale_and_bias(call, name, [channels], str(x.dtype), param_attr, bias_attr)
    put = Builder(call, name)
    return at.as_given(put, put("InstanceNormalization", at.channels_first(put), *inputs, **attrs))


# -- functions of given parameters ----------------------------------------------------------------------------------
@function()
def functional_layer_norm(
    x: Variable,
    normalized_shape: int | Sequence[int],
    weight: Variable | None = None,
    bias: Variable | None = None,
    epsilon: float = 1e-5,
    *,
    name: str | None = None,
) -> Variable:
    """Layer normalisation over the last dimensions, which have the sizes ``normalized_shape``, as ``weight`` and
    ``bias`` have, where they are given."""
    call = "layer_norm"
    given = normalized_shape if isinstance(normalized_shape, (list, tuple)) else [normalized_shape]
    sizes = integers(call, "normalized_shape", given, 1)
    variable(call, "x", x, dtypes=FLOATING, min_rank=len(sizes))
    axis = len(x.shape or ()) - len(sizes)
    if not sizes or list((x.shape or ())[axis:]) != sizes:
        raise ArgumentError(f"{call}: normalized_shape={normalized_shape!r} must be the last sizes of {describe(x)}")
    ones: Input = np.ones(sizes, numpy_dtype(str(x.dtype)))
    inputs = [x, ones if weight is None else weight, *([] if bias is None else [bias])]
    attrs = {"axis": axis, "epsilon": _epsilon(call, epsilon)}
    return append(call, "LayerNormalization", inputs, attrs=attrs)
