"""Arithmetic, comparison and selection, element by element."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import element_type
from amp_transpiler.nn.building import (
    FLOATING,
    Builder,
    append,
    appending,
    as_type,
    clip_bounds,
    constant,
    operand,
    real,
    variable,
)
from amp_transpiler.nn.calls import OfTwoOperands, function, member, simple
from amp_transpiler.ops.training.random import MASK_ID
from amp_transpiler.ops.training.seeds import rng_state
from amp_transpiler.option_checks import choice, is_real, switch
from amp_transpiler.program import default_startup_program

abs = simple("abs", "Abs", "Absolute value.", dtypes=None)
sign = simple("sign", "Sign", "-1, 0 or 1. No gradient flows through it.", dtypes=None)
neg = simple("neg", "Neg", "-x.", dtypes=None)
exp = simple("exp", "Exp", "e to the power x.")
log = simple("log", "Log", "Natural logarithm.")
sqrt = simple("sqrt", "Sqrt", "Square root.")
reciprocal = simple("reciprocal", "Reciprocal", "1 / x.")
erf = simple("erf", "Erf", "The error function.")
sin = simple("sin", "Sin", "Sine.")
cos = simple("cos", "Cos", "Cosine.")
tan = simple("tan", "Tan", "Tangent.")
asin = simple("asin", "Asin", "The angle from -pi/2 to pi/2 whose sine is x; NaN beyond -1 and 1.")
acos = simple("acos", "Acos", "The angle from 0 to pi whose cosine is x; NaN beyond -1 and 1.")
atan = simple("atan", "Atan", "The angle between -pi/2 and pi/2 whose tangent is x.")
sinh = simple("sinh", "Sinh", "Hyperbolic sine.")
cosh = simple("cosh", "Cosh", "Hyperbolic cosine.")
asinh = simple("asinh", "Asinh", "The number whose hyperbolic sine is x.")
acosh = simple("acosh", "Acosh", "The number from 0 on whose hyperbolic cosine is x; NaN below 1.")
atanh = simple("atanh", "Atanh", "The number whose hyperbolic tangent is x; NaN beyond -1 and 1.")
floor = simple("floor", "Floor", "The next integer below. No gradient flows through it.")
ceil = simple("ceil", "Ceil", "The next integer above. No gradient flows through it.")
round = simple("round", "Round", "The nearest integer, the even one where two are near. No gradient flows through it.")
isnan = simple("isnan", "IsNaN", "True where x is NaN.")
isinf = simple("isinf", "IsInf", "True where x is infinite.")
logical_not = simple("logical_not", "Not", "True where x (bool) is False.", dtypes=("bool",))


@function()
def rsqrt(x: Variable, *, name: str | None = None) -> Variable:
    """1 / sqrt(x). ``x``: float, any shape."""
    put = _putting("rsqrt", x)
    return put("Reciprocal", put("Sqrt", x))


@function()
def square(x: Variable, *, name: str | None = None) -> Variable:
    """x * x, as a power: computed in fp32 by the default lists. ``x``: float, any shape."""
    return append("square", "Pow", [variable("square", "x", x, dtypes=FLOATING), constant(x, 2)])


@function()
def log2(x: Variable, *, name: str | None = None) -> Variable:
    """Logarithm to base 2. ``x``: float, any shape."""
    put = _putting("log2", x)
    return put("Mul", put("Log", x), constant(x, 1 / math.log(2)))


@function()
def log10(x: Variable, *, name: str | None = None) -> Variable:
    """Logarithm to base 10. ``x``: float, any shape."""
    put = _putting("log10", x)
    return put("Mul", put("Log", x), constant(x, 1 / math.log(10)))


@function()
def log1p(x: Variable, *, name: str | None = None) -> Variable:
    """log(1 + x), with the digits of an x far below 1. ``x``: float, any shape.

    Of u = 1 + x as it is rounded, log(u) + (x - (u - 1)) / u, through which no gradient goes. Below 1/2 u is exact.
    """
    call = "log1p"
    put, one = _putting(call, x), constant(x, 1)
    above = put("Add", x, one)
    lost = put("Div", put("Sub", x, put("Sub", above, one)), put("Max", above, constant(x, 0.5)))
    lost.stop_gradient = True
    return put("Add", put("Log", above), lost)


@function()
def expm1(x: Variable, *, name: str | None = None) -> Variable:
    """exp(x) - 1, with the digits of an x far below 1. ``x``: float, any shape.

    Between -1 and 1 it is 2 t / (1 - t) with t = tanh(x / 2).
    """
    call = "expm1"
    put, one = _putting(call, x), constant(x, 1)
    share = put("Tanh", put("Mul", put("Clip", x, constant(x, -1), one), constant(x, 0.5)))
    near = put("Div", put("Add", share, share), put("Sub", one, share))
    return put("Where", put("Less", put("Abs", x), one), near, put("Sub", put("Exp", x), one))


def _putting(call: str, x: Variable) -> Builder:
    """What adds operators of a function of ``x``, checked to be float."""
    variable(call, "x", x, dtypes=FLOATING)
    return appending(call)


# -- two operands -----------------------------------------------------------------------------------------------
def binary(call: str, type_: str, x: Any, y: Any) -> Variable:
    """A broadcasting operator on two operands, one of them a variable; a number takes the other's element type."""
    like = x if isinstance(x, Variable) else y
    if not isinstance(like, Variable):
        found = f"{type(x).__name__} and {type(y).__name__}"
        raise ArgumentTypeError(f"{call}: one of the operands must be a Variable, not {found}")
    return append(call, type_, [operand(call, x, like), operand(call, y, like)])


class _Pair(NamedTuple):
    name: str
    type: str
    text: str


def _pair(kind: _Pair, x: Any, y: Any, *, name: str | None = None) -> Variable:
    """{0.text}"""
    return binary(kind.name, kind.type, x, y)


def _of_two(name: str, type_: str, text: str, *tables: str) -> OfTwoOperands:
    """The function ``name`` of two operands that is one operator; ``text`` says what it computes."""
    return member(_pair, _Pair(name, type_, text), name, *tables)


_NUMBER = "broadcast; one of them may be a number or an array."
_SHARED = "broadcast; the gradient goes to x where they are equal."
add = _of_two("add", "Add", f"x + y, {_NUMBER}", "nn.elementwise")
subtract = _of_two("subtract", "Sub", f"x - y, {_NUMBER}", "nn.elementwise")
multiply = _of_two("multiply", "Mul", f"x * y, {_NUMBER}", "nn.elementwise")
divide = _of_two("divide", "Div", f"x / y, {_NUMBER}", "nn.elementwise")
pow = _of_two("pow", "Pow", "``x`` to the power ``y``, broadcast; one of them may be a number.", "nn.elementwise")
maximum = _of_two("maximum", "Max", f"The larger of x and y, {_SHARED}", "nn.elementwise")
minimum = _of_two("minimum", "Min", f"The smaller of x and y, {_SHARED}", "nn.elementwise")
equal = _of_two("equal", "Equal", "True where x is y, broadcast.")
less_than = _of_two("less_than", "Less", "True where x < y, broadcast.")
less_equal = _of_two("less_equal", "LessOrEqual", "True where x <= y, broadcast.")
greater_than = _of_two("greater_than", "Greater", "True where x > y, broadcast.")
greater_equal = _of_two("greater_equal", "GreaterOrEqual", "True where x >= y, broadcast.")
logical_and = _of_two("logical_and", "And", "True where both (bool) are True, broadcast.")
logical_or = _of_two("logical_or", "Or", "True where one of both (bool) is True, broadcast.")


@function()
def not_equal(x: Any, y: Any, *, name: str | None = None) -> Variable:
    """True where x is not y, broadcast."""
    put = appending("not_equal")
    return put("Not", binary("not_equal", "Equal", x, y))


# -- selection --------------------------------------------------------------------------------------------------
@function()
def where(condition: Variable, x: Any, y: Any, *, name: str | None = None) -> Variable:
    """``x`` where ``condition`` (bool) is True, ``y`` elsewhere, broadcast; one of them may be a number."""
    call = "where"
    variable(call, "condition", condition, dtypes=("bool",))
    like = x if isinstance(x, Variable) else y
    if not isinstance(like, Variable):
        raise ArgumentTypeError(f"{call}: one of x and y must be a Variable")
    return append(call, "Where", [condition, operand(call, x, like), operand(call, y, like)])


@function()
def clip(x: Variable, min: float | None = None, max: float | None = None, *, name: str | None = None) -> Variable:
    """``x`` within [``min``, ``max``]; None for no bound. The gradient is 0 where x lies outside.

    ``x``: float or integer, any shape.
    """
    call = "clip"
    variable(call, "x", x)
    if min is None and max is None:
        raise ArgumentError(f"{call}: one of min and max must be given")
    return append(call, "Clip", [x, *clip_bounds(call, x, min, max)])


@function()
def scale(
    x: Variable,
    scale: float = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: None = None,
    *,
    name: str | None = None,
) -> Variable:
    """``scale * x + bias``, or ``scale * (x + bias)`` where the bias does not come after the scale."""
    call = "scale"
    variable(call, "x", x, dtypes=FLOATING)
    if act is not None:
        raise ArgumentError(f"{call}: act={act!r} is not taken here; apply the activation to the result")
    steps = [("Mul", real(call, "scale", scale), 1.0), ("Add", real(call, "bias", bias), 0.0)]
    put, y = appending(call), x
    for type_, number, neutral in steps if switch(f"{call}: bias_after_scale", bias_after_scale) else steps[::-1]:
        if number != neutral:
            y = put(type_, y, constant(x, number))
    return y if y is not x else put("Identity", x)


@function()
def cast(x: Variable, dtype: Any, *, name: str | None = None) -> Variable:
    """``x`` as element type ``dtype``."""
    return as_type(x, element_type(dtype))


# -- dropout ------------------------------------------------------------------------------------------------------
@function("nn.dropout")
def dropout(
    x: Variable, p: float = 0.5, training: bool = True, mode: str = "upscale_in_train", *, name: str | None = None
) -> Variable:
    """Each element 0 with probability ``p``, else divided by 1 - p (Srivastava et al. 2014). ``0 <= p <= 1``.

    The mask is a hash of the program's seed and step, so a repeated run repeats it. A clone for testing, and
    ``training=False``, pass ``x`` through. ``mode="downscale_in_infer"``: training keeps elements as they are, and
    a test multiplies all by 1 - p.
    """
    call = "dropout"
    variable(call, "x", x, dtypes=FLOATING)
    if not is_real(p):
        raise ArgumentTypeError(f"{call}: p must be a number, not {p!r}")
    if not 0 <= p <= 1:
        raise ArgumentError(f"{call}: p must be in [0, 1], not {p}")
    choice(f"{call}: mode", mode, ("upscale_in_train", "downscale_in_infer"))
    training = switch(f"{call}: training", training)
    if p == 0 or (not training and mode == "upscale_in_train"):
        return x
    put = appending(call)
    y = append_dropout(put, x, p) if training else x
    return y if mode == "upscale_in_train" else put("Mul", y, constant(x, 1 - p))


def append_dropout(put: Builder, x: Variable, p: float) -> Variable:
    """ONNX Dropout in training mode with a mask of its own."""
    rng_state(x.program, default_startup_program())
    y, mask = put.several(2, "Dropout", x, np.array(p, np.float32), np.array(True))
    assert y.producer is not None
    y.producer.metadata[MASK_ID] = str(mask.key)  # a key is unique in its program, and the number outlives clones
    return y
