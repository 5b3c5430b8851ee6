"""Remainders, truth values as a whole, counts, and what is made of vectors. Formulas: Paddle's functions of the same
names."""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import INTEGERS, element_type, numpy_dtype
from amp_transpiler.nn.building import FLOATING, INTEGER, append, operand, real, variable, whole
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.creation import assign
from amp_transpiler.nn.elementwise_functions import binary, cast, divide, equal, isinf, isnan, logical_not, logical_or
from amp_transpiler.nn.manipulation import transpose, unsqueeze
from amp_transpiler.nn.reduction import Axis, max, min


@function("nn.elementwise")
def mod(x: Any, y: Any, *, name: str | None = None) -> Variable:
    """The remainder of ``x / y``, with the sign of ``y`` as python's, broadcast; one may be a number. Of floats it is
    ``x - floor(x / y) * y``."""
    call = "mod"
    like = x if isinstance(x, Variable) else y
    if variable(call, "x" if like is x else "y", like).dtype not in FLOATING:
        return binary(call, "Mod", x, y)
    return binary(call, "Sub", x, binary(call, "Mul", floor_divide(x, y), y))


@function("nn.elementwise")
def floor_divide(x: Any, y: Any, *, name: str | None = None) -> Variable:
    """``x / y`` rounded down, as python's ``//``, broadcast; one of them may be a number. No gradient flows."""
    call = "floor_divide"
    like = x if isinstance(x, Variable) else y
    if variable(call, "x" if like is x else "y", like).dtype in FLOATING:
        return append(call, "Floor", [binary(call, "Div", x, y)])
    return binary(call, "Div", binary(call, "Sub", x, mod(x, y)), y)


def true_divide(x: Any, y: Any) -> Variable:
    """``x / y``: of integers in float32, as Paddle's operator has it."""
    wide = [cast(v, "float32") if isinstance(v, Variable) and v.dtype in INTEGERS else v for v in (x, y)]
    return divide(*wide)


@function()
def isfinite(x: Variable, *, name: str | None = None) -> Variable:
    """True where ``x`` (float) is neither infinite nor NaN."""
    return logical_not(logical_or(isnan(x), isinf(x)))


@function("nn.reduction")
def any(x: Variable, axis: Axis = None, keepdim: bool = False, *, name: str | None = None) -> Variable:
    """Whether any element of ``x`` (bool) is True, over ``axis`` (one or several), or over everything."""
    return cast(max(cast(variable("any", "x", x, dtypes=("bool",)), "int32"), axis, keepdim), "bool")


@function("nn.reduction")
def all(x: Variable, axis: Axis = None, keepdim: bool = False, *, name: str | None = None) -> Variable:
    """Whether every element of ``x`` (bool) is True, over ``axis`` (one or several), or over everything."""
    return cast(min(cast(variable("all", "x", x, dtypes=("bool",)), "int32"), axis, keepdim), "bool")


@function("nn.elementwise")
def equal_all(x: Variable, y: Variable, *, name: str | None = None) -> Variable:
    """Whether both, of one shape, are the same in every element: bool of shape []."""
    return all(equal(x, y))


@function()
def numel(x: Variable, *, name: str | None = None) -> Variable:
    """How many elements ``x`` has in this run: int64 of shape []."""
    return append("numel", "Size", [variable("numel", "x", x)])


@function()
def shape(x: Variable, *, name: str | None = None) -> Variable:
    """The sizes of ``x`` in this run: int64 of shape [rank of ``x``]. What is known of them while building is
    ``x.shape``."""
    return append("shape", "Shape", [variable("shape", "x", x)])


@function()
def linspace(start: float, stop: float, num: int, dtype: Any = "float32", *, name: str | None = None) -> Variable:
    """``num`` numbers at equal distances, from ``start`` to ``stop`` and with both."""
    call = "linspace"
    first, last = real(call, "start", start), real(call, "stop", stop)
    if not np.isfinite([first, last]).all():
        raise ArgumentError(f"{call}: start and stop are {start} and {stop}; expected finite numbers")
    return assign(np.linspace(first, last, whole(call, "num", num)).astype(numpy_dtype(element_type(dtype))))


@function("nn.elementwise")
def outer(x: Variable, y: Variable, *, name: str | None = None) -> Variable:
    """The products of each element of the vector ``x`` [n] with each of ``y`` [m]: [n, m]."""
    call = "outer"
    return unsqueeze(variable(call, "x", x, rank=1), 1) * unsqueeze(variable(call, "y", y, rank=1), 0)


@function()
def t(x: Variable, *, name: str | None = None) -> Variable:
    """A matrix transposed; a vector, and a scalar, as it is."""
    rank = len(variable("t", "x", x).shape or ())
    if rank > 2:
        raise ArgumentError(f"t: 'x' has {rank} dimensions; expected at most 2 (transpose takes more)")
    return transpose(x, list(range(rank))[::-1])


@function()
def sequence_mask(x: Variable, maxlen: int, dtype: Any = "int64", *, name: str | None = None) -> Variable:
    """1 at the first ``x`` places of ``maxlen``, 0 behind them. ``x``: lengths, int64 or int32 of any shape; the result
    has a dimension of size ``maxlen`` more, and the element type ``dtype``."""
    call = "sequence_mask"
    lengths = unsqueeze(variable(call, "x", x, dtypes=INTEGER), -1)
    places = operand(call, np.arange(whole(call, "maxlen", maxlen)), x)
    return cast(append(call, "Less", [places, lengths]), dtype)
