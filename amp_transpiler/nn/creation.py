"""Variables of given content: numbers, arrays, ranges."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import element_type, numpy_dtype
from amp_transpiler.nn.building import append, appending, fresh, integers, real, variable
from amp_transpiler.nn.calls import function
from amp_transpiler.program import default_main_program


def _filled(call: str, shape: Sequence[int], value: Any, dtype: Any) -> Variable:
    given = shape if isinstance(shape, (list, tuple)) else [shape]
    if any(size is None or isinstance(size, Variable) for size in given):
        raise ArgumentTypeError(
            f"{call}: shape has a size that only the run knows; F.{call}_like(x) takes the sizes of a variable, "
            "which one such as x[:, :1] may have"
        )
    sizes = np.array(integers(call, "shape", shape, 0), np.int64)
    number = np.array(value if isinstance(value, bool) else real(call, "fill_value", value))
    content = number.astype(numpy_dtype(element_type(dtype)))
    return append(call, "Expand", [content, sizes])


@function()
def full(shape: Sequence[int], fill_value: float, dtype: Any = "float32", *, name: str | None = None) -> Variable:
    """``fill_value`` in every element. ``shape``: fixed sizes (of a variable's shape: :func:`full_like`)."""
    return _filled("full", shape, fill_value, dtype)


@function()
def zeros(shape: Sequence[int], dtype: Any = "float32", *, name: str | None = None) -> Variable:
    """0 in every element; see :func:`full`."""
    return _filled("zeros", shape, 0, dtype)


@function()
def ones(shape: Sequence[int], dtype: Any = "float32", *, name: str | None = None) -> Variable:
    """1 in every element; see :func:`full`."""
    return _filled("ones", shape, 1, dtype)


@function()
def full_like(x: Variable, fill_value: float, dtype: Any = None, *, name: str | None = None) -> Variable:
    """``fill_value`` in the shape of ``x``, and in its element type unless ``dtype`` gives another."""
    call = "full_like"
    put = appending(call)
    shape = put("Shape", variable(call, "x", x))
    kind = element_type(x.dtype if dtype is None else dtype)
    content = np.array(real(call, "fill_value", fill_value)).astype(numpy_dtype(kind))
    y = put("Expand", content, shape)
    y.shape = x.shape  # which inference does not find behind a Shape
    return y


@function()
def zeros_like(x: Variable, dtype: Any = None, *, name: str | None = None) -> Variable:
    """0 in the shape of ``x``; see :func:`full_like`."""
    return full_like(x, 0, dtype)


@function()
def ones_like(x: Variable, dtype: Any = None, *, name: str | None = None) -> Variable:
    """1 in the shape of ``x``; see :func:`full_like`."""
    return full_like(x, 1, dtype)


@function()
def arange(
    start: float = 0, end: float | None = None, step: float = 1, dtype: Any = None, *, name: str | None = None
) -> Variable:
    """Numbers from ``start`` (0 where only one is given) up to, and without, ``end``; int64 if all are integers."""
    call = "arange"
    start, end = (0, start) if end is None else (start, end)
    for name, value in (("start", start), ("end", end), ("step", step)):
        if not math.isfinite(real(call, name, value)):
            raise ArgumentError(f"{call}: {name} is {value}; expected a finite number")
    if step == 0:
        raise ArgumentError(f"{call}: a step of 0 does not move")
    integral = all(isinstance(value, numbers.Integral) for value in (start, end, step))
    kind = element_type(dtype or ("int64" if integral else "float32"))
    return assign(np.arange(start, end, step).astype(numpy_dtype(kind)))


@function("nn.assigned")
def assign(x: Any, *, name: str | None = None) -> Variable:
    """A copy of a variable; or an array, a list or a number as a constant."""
    if isinstance(x, Variable):
        return append("assign", "Identity", [variable("assign", "x", x)])
    array = np.asarray(x)
    if array.dtype.kind not in "biuf":
        raise ArgumentTypeError(f"assign: x must be a variable or numbers, not {x!r}")
    program, name = default_main_program(), fresh("assign")
    if not isinstance(x, np.ndarray) and array.dtype == np.float64:
        array = array.astype(np.float32)
    return program.add_constant(f"{name}.const", array)


@function()
def detach(x: Variable, *, name: str | None = None) -> Variable:
    """A copy of a variable in which the backward pass ends, as in a target; the variable itself keeps its gradient."""
    copy = append("detach", "Identity", [variable("detach", "x", x)])
    copy.stop_gradient = True
    return copy
