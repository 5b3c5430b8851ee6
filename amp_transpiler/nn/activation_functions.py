"""Activations: functions of one variable, elementwise or along one axis. Formulas: the operators' specifications
(https://onnx.ai/onnx/operators/) and Paddle's functions of the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.decompose import decompose_operator
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn.building import (
    FLOATING,
    append,
    appending,
    as_type,
    axis_of,
    clip_bounds,
    constant,
    describe,
    fixed,
    prefixed,
    real,
    variable,
    whole,
)
from amp_transpiler.nn.calls import function, simple
from amp_transpiler.option_checks import choice, switch

_FORMS = ("none", "tanh")


def _checked(call: str, x: Variable) -> Variable:
    return variable(call, "x", x, dtypes=FLOATING)


def _one(call: str, type_: str, x: Variable, **attrs: Any) -> Variable:
    return append(call, type_, [_checked(call, x)], attrs=attrs)


relu = simple("relu", "Relu", "max(x, 0).")
sigmoid = simple("sigmoid", "Sigmoid", "1 / (1 + exp(-x)).", "nn.cudnn")
tanh = simple("tanh", "Tanh", "Hyperbolic tangent.")
softsign = simple("softsign", "Softsign", "x / (1 + |x|).")
mish = simple("mish", "Mish", "x * tanh(softplus(x)) (Misra 2019).")
hardswish = simple("hardswish", "HardSwish", "x * min(max(x + 3, 0), 6) / 6 (Howard et al. 2019).")


@function()
def relu6(x: Variable, *, name: str | None = None) -> Variable:
    """min(max(x, 0), 6). ``x``: float, any shape."""
    return hardtanh(x, 0.0, 6.0)


@function()
def hardtanh(x: Variable, min: float = -1.0, max: float = 1.0, *, name: str | None = None) -> Variable:
    """``x`` within [``min``, ``max``]. ``x``: float, any shape."""
    call = "hardtanh"
    return append(call, "Clip", [_checked(call, x), *clip_bounds(call, x, min, max)])


@function()
def gelu(x: Variable, approximate: bool | str = False, *, name: str | None = None) -> Variable:
    """x * Phi(x) (Hendrycks & Gimpel 2016); with ``approximate`` (True or "tanh"; False or "none": not) its tanh form.

    ``x``: float, any shape.
    """
    form = approximate if isinstance(approximate, str) else _FORMS[switch("gelu: approximate", approximate)]
    return _one("gelu", "Gelu", x, approximate=choice("gelu: approximate", form, _FORMS))


@function()
def silu(x: Variable, *, name: str | None = None) -> Variable:
    """x * sigmoid(x) (Elfwing et al. 2017). ``x``: float, any shape."""
    call = "silu"
    put = appending(call)
    return put("Mul", x, put("Sigmoid", _checked(call, x)))


swish = silu


@function()
def hardsigmoid(x: Variable, slope: float = 1 / 6, offset: float = 0.5, *, name: str | None = None) -> Variable:
    """min(max(slope * x + offset, 0), 1). ``x``: float, any shape."""
    call = "hardsigmoid"
    return _one(call, "HardSigmoid", x, alpha=real(call, "slope", slope), beta=real(call, "offset", offset))


@function("nn.leaky_relu")
def leaky_relu(x: Variable, negative_slope: float = 0.01, *, name: str | None = None) -> Variable:
    """``x`` where it is above 0, ``negative_slope * x`` elsewhere. ``x``: float, any shape."""
    call = "leaky_relu"
    return _one(call, "LeakyRelu", x, alpha=real(call, "negative_slope", negative_slope))


@function()
def elu(x: Variable, alpha: float = 1.0, *, name: str | None = None) -> Variable:
    """``x`` where it is above 0, ``alpha * (exp(x) - 1)`` elsewhere (Clevert et al. 2015). ``x``: float, any shape."""
    return _one("elu", "Elu", x, alpha=real("elu", "alpha", alpha))


@function()
def celu(x: Variable, alpha: float = 1.0, *, name: str | None = None) -> Variable:
    """``x`` where it is above 0, ``alpha * (exp(x / alpha) - 1)`` elsewhere (Barron 2017). ``x``: float, any shape.

    Made of Elu: no GPU place has a kernel of Celu. ArgumentError for an ``alpha`` of 0.
    """
    scale = real("celu", "alpha", alpha)
    if scale == 0:
        raise ArgumentError("celu: alpha=0 divides by zero; relu is what it comes close to")
    made = _one("celu", "Celu", x, alpha=scale)
    assert made.producer is not None
    decompose_operator(made.producer)
    return made


@function()
def selu(
    x: Variable, scale: float = 1.0507009873554805, alpha: float = 1.6732632423543772, *, name: str | None = None
) -> Variable:
    """``scale * elu(x, alpha)`` (Klambauer et al. 2017). ``x``: float, any shape."""
    return _one("selu", "Selu", x, gamma=real("selu", "scale", scale), alpha=real("selu", "alpha", alpha))


@function()
def thresholded_relu(x: Variable, threshold: float = 1.0, *, name: str | None = None) -> Variable:
    """``x`` where it is above ``threshold``, 0 elsewhere. ``x``: float, any shape."""
    call = "thresholded_relu"
    return _one(call, "ThresholdedRelu", x, alpha=real(call, "threshold", threshold))


@function()
def hardshrink(x: Variable, threshold: float = 0.5, *, name: str | None = None) -> Variable:
    """``x`` where |x| is above ``threshold``, 0 elsewhere. ``x``: float, any shape."""
    return _one("hardshrink", "Shrink", x, lambd=real("hardshrink", "threshold", threshold))


@function()
def softshrink(x: Variable, threshold: float = 0.5, *, name: str | None = None) -> Variable:
    """``x`` moved towards 0 by ``threshold``, 0 where |x| is not above it. ``x``: float, any shape."""
    limit = real("softshrink", "threshold", threshold)
    return _one("softshrink", "Shrink", x, lambd=limit, bias=limit)


@function()
def tanhshrink(x: Variable, *, name: str | None = None) -> Variable:
    """x - tanh(x). ``x``: float, any shape."""
    call = "tanhshrink"
    put = appending(call)
    return put("Sub", x, put("Tanh", _checked(call, x)))


@function("nn.softplus")
def softplus(x: Variable, beta: float = 1.0, *, name: str | None = None) -> Variable:
    """log(1 + exp(beta * x)) / beta. ``x``: float, any shape."""
    call = "softplus"
    if real(call, "beta", beta) == 1:
        return _one(call, "Softplus", x)
    if beta <= 0:
        raise ArgumentError(f"{call}: beta must be above 0, not {beta}")
    put = appending(call)
    scaled = put("Mul", _checked(call, x), constant(x, beta))
    return put("Div", put("Softplus", scaled), constant(x, beta))


@function()
def log_sigmoid(x: Variable, *, name: str | None = None) -> Variable:
    """log(1 / (1 + exp(-x))), finite for every x. ``x``: float, any shape."""
    call = "log_sigmoid"
    put = appending(call)
    value = put("Neg", _checked(call, x))
    return put("Neg", put("Softplus", value))


@function("nn.cudnn")
def softmax(x: Variable, axis: int = -1, dtype: Any = None, *, name: str | None = None) -> Variable:
    """exp(x) over its sum along ``axis``. ``x``: float, at least one dimension; cast to ``dtype`` first if given."""
    return _one("softmax", "Softmax", as_type(x, dtype), axis=axis_of("softmax", axis, x))


@function()
def log_softmax(x: Variable, axis: int = -1, dtype: Any = None, *, name: str | None = None) -> Variable:
    """Logarithm of :func:`softmax`."""
    return _one("log_softmax", "LogSoftmax", as_type(x, dtype), axis=axis_of("log_softmax", axis, x))


@function()
def prelu(x: Variable, weight: Variable, *, name: str | None = None) -> Variable:
    """``x`` where it is above 0, ``weight * x`` elsewhere (He et al. 2015).

    ``x``: float [batch, channels, …]. ``weight``: float, of one element or one for each channel.
    """
    call = "prelu"
    rank = len(variable(call, "x", x, dtypes=FLOATING, min_rank=2).shape or ())
    variable(call, "weight", weight, dtypes=(str(x.dtype),), rank=1)
    size, channels = fixed(call, "weight", weight, 0), fixed(call, "x", x, 1)
    if size not in (1, channels):
        raise ArgumentError(
            f"{call}: weight {describe(weight)} must have 1 element, or one for each of the {channels} "
            f"channels of {describe(x)}"
        )
    put = appending(call)
    if size > 1 and rank > 2:
        ones = np.array([size, *[1] * (rank - 2)], np.int64)
        weight = put("Reshape", weight, ones)
    return put("PRelu", x, weight)


@function()
def glu(x: Variable, axis: int = -1, *, name: str | None = None) -> Variable:
    """The first half of ``x`` along ``axis`` times the sigmoid of the second (Dauphin et al. 2017)."""
    call = "glu"
    _checked(call, x)
    at = axis_of(call, axis, x)
    if fixed(call, "x", x, at) % 2:
        raise ArgumentError(f"{call}: dimension {at} of {describe(x)} must be even")
    put = appending(call)
    half = np.full(2, fixed(call, "x", x, at) // 2, np.int64)
    first, second = put.several(2, "Split", x, half, axis=at)
    return put("Mul", first, put("Sigmoid", second))


@function()
def maxout(x: Variable, groups: int, axis: int = 1, *, name: str | None = None) -> Variable:
    """The maximum of each ``groups`` neighbouring channels (Goodfellow et al. 2013), channels being ``axis``."""
    call = "maxout"
    _checked(call, x)
    at, count = axis_of(call, axis, x), whole(call, "groups", groups)
    channels = fixed(call, "x", x, at)
    if channels % count:
        raise ArgumentError(f"{call}: groups={count} must divide dimension {at} of {describe(x)}")
    put = appending(call)
    tail = [fixed(call, "x", x, i) for i in range(at + 1, len(x.shape or ()))]
    shape = np.array([0] * at + [channels // count, count, *tail], np.int64)
    apart = put("Reshape", x, shape)
    return put("ReduceMax", apart, np.array([at + 1], np.int64), keepdims=0)


#: What the ``act`` argument of a layer names; those alone whose constants are the same wherever they are named so.
ACTIVATIONS: Mapping[str, Callable[[Variable], Variable]] = {
    f.__name__: f
    for f in (
        relu,
        gelu,
        sigmoid,
        tanh,
        softmax,
        log_softmax,
        relu6,
        silu,
        hardswish,
        elu,
        celu,
        selu,
        softplus,
        softsign,
        mish,
        log_sigmoid,
        hardshrink,
        softshrink,
        tanhshrink,
        thresholded_relu,
    )
} | {"swish": silu, "hard_swish": hardswish}


def check_activation(call: str, act: str | None) -> None:
    """ArgumentError for a name that is no activation, or one of several; ArgumentTypeError for what is no name."""
    if act is None or (isinstance(act, str) and act in ACTIVATIONS):
        return
    if not isinstance(act, str):
        raise ArgumentTypeError(
            f"{call}: act must be the name of an activation, not {act!r}; give other arguments by name"
        )
    if act in ("leaky_relu", "hardsigmoid", "hard_sigmoid", "hardtanh", "prelu"):
        raise ArgumentError(
            f"{call}: act={act!r} does not say its constants; apply the function of that name in "
            "amp.nn.functional, or amp.nn.prelu, to the result"
        )
    raise ArgumentError(f"{call}: act={act!r} is no activation; known are {', '.join(ACTIVATIONS)}")


def activate(x: Variable, act: str | None, prefix: str) -> Variable:
    """``x`` through the activation called ``act``; ``x`` itself where that is None."""
    if act is None:
        return x
    with prefixed(prefix):
        return ACTIVATIONS[act](x)
