"""Activations, arithmetic, selection and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..ir import names
from ..ir.context import default_startup_program
from ..ir.program import Variable
from ..ir.types import ONNX_TYPES, element_type
from ..ops.random import MASK_ID, rng_state
from .building import FLOATING, append, append_many, axis_of, operand, variable

Axis = int | Sequence[int] | None
#: Names that the ``act`` argument of a layer takes: operator type and attributes.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("Relu", {}),
    "gelu": ("Gelu", {}),
    "sigmoid": ("Sigmoid", {}),
    "tanh": ("Tanh", {}),
    "softmax": ("Softmax", {"axis": -1}),
    "log_softmax": ("LogSoftmax", {"axis": -1}),
}


def check_activation(call: str, act: str | None) -> None:
    """ArgumentError for a name that is no activation."""
    if act is not None and act not in ACTIVATIONS:
        raise ArgumentError(f"{call}: act={act!r} is no activation; known are {', '.join(ACTIVATIONS)}")


def activate(call: str, x: Variable, act: str | None, prefix: str) -> Variable:
    """``x`` through the activation called ``act``; ``x`` itself where that is None."""
    if act is None:
        return x
    type_, attrs = ACTIVATIONS[act]
    return append(call, type_, [x], attrs=attrs, prefix=prefix)


def _unary(call: str, type_: str, x: Variable, **attrs: Any) -> Variable:
    return append(call, type_, [variable(call, "x", x, dtypes=FLOATING)], attrs=attrs)


def relu(x: Variable) -> Variable:
    """max(x, 0). ``x``: float, any shape."""
    return _unary("relu", "Relu", x)


def gelu(x: Variable, approximate: bool = False) -> Variable:
    """x * Phi(x) (Hendrycks & Gimpel 2016); with ``approximate`` its tanh form. ``x``: float, any shape."""
    return _unary("gelu", "Gelu", x, approximate="tanh" if approximate else "none")


def sigmoid(x: Variable) -> Variable:
    """1 / (1 + exp(-x)). ``x``: float, any shape."""
    return _unary("sigmoid", "Sigmoid", x)


def tanh(x: Variable) -> Variable:
    """Hyperbolic tangent. ``x``: float, any shape."""
    return _unary("tanh", "Tanh", x)


def exp(x: Variable) -> Variable:
    """e to the power ``x``. ``x``: float, any shape."""
    return _unary("exp", "Exp", x)


def log(x: Variable) -> Variable:
    """Natural logarithm. ``x``: float, any shape."""
    return _unary("log", "Log", x)


def sqrt(x: Variable) -> Variable:
    """Square root. ``x``: float, any shape."""
    return _unary("sqrt", "Sqrt", x)


def softmax(x: Variable, axis: int = -1) -> Variable:
    """exp(x) over its sum along ``axis``. ``x``: float, at least one dimension."""
    return _unary("softmax", "Softmax", x, axis=axis_of("softmax", axis, x))


def log_softmax(x: Variable, axis: int = -1) -> Variable:
    """Logarithm of :func:`softmax`. ``x``: float, at least one dimension."""
    return _unary("log_softmax", "LogSoftmax", x, axis=axis_of("log_softmax", axis, x))


def binary(call: str, type_: str, x: Any, y: Any) -> Variable:
    """A broadcasting operator on two operands, one of them a variable; a number takes the other's element type."""
    like = x if isinstance(x, Variable) else y
    if not isinstance(like, Variable):
        found = f"{type(x).__name__} and {type(y).__name__}"
        raise ArgumentTypeError(f"{call}: one of the operands must be a Variable, not {found}")
    return append(call, type_, [operand(call, x, like), operand(call, y, like)])


def pow(x: Any, y: Any) -> Variable:
    """``x`` to the power ``y``, broadcast; one of them may be a number."""
    return binary("pow", "Pow", x, y)


def matmul(x: Variable, y: Variable, transpose_x: bool = False, transpose_y: bool = False) -> Variable:
    """Matrix product over the last two dimensions, the others broadcast.

    ``transpose_x``, ``transpose_y``: swap the last two dimensions of that operand first. Both of one float type.
    """
    call = "matmul"
    operands = []
    for name, value, transposed in (("x", x, transpose_x), ("y", y, transpose_y)):
        variable(call, name, value, min_rank=2 if transposed else 1)
        if transposed:
            rank = len(value.shape or ())
            value = append("transpose", "Transpose", [value], attrs={"perm": [*range(rank - 2), rank - 1, rank - 2]})
        operands.append(value)
    return append(call, "MatMul", operands)


def where(condition: Variable, x: Any, y: Any) -> Variable:
    """``x`` where ``condition`` (bool) is True, ``y`` elsewhere, broadcast; one of them may be a number."""
    call = "where"
    variable(call, "condition", condition, dtypes=("bool",))
    like = x if isinstance(x, Variable) else y
    if not isinstance(like, Variable):
        raise ArgumentTypeError(f"{call}: one of x and y must be a Variable")
    return append(call, "Where", [condition, operand(call, x, like), operand(call, y, like)])


def cast(x: Variable, dtype: Any) -> Variable:
    """``x`` as element type ``dtype``."""
    return append("cast", "Cast", [variable("cast", "x", x)], attrs={"to": ONNX_TYPES[element_type(dtype)]})


def _reduce(call: str, type_: str, x: Variable, axis: Axis, keepdim: bool) -> Variable:
    variable(call, "x", x)
    attrs: dict[str, Any] = {"keepdims": keepdim}
    inputs: list[Any] = [x]
    if axis is not None:
        axes = [axis_of(call, a, x) for a in (axis if isinstance(axis, (list, tuple)) else [axis])]
        if len(set(axes)) != len(axes) or not axes:
            raise ArgumentError(f"{call}: axis {axis!r} must name each axis once, and at least one")
        inputs.append(np.array(axes, np.int64))
    return append(call, type_, inputs, attrs=attrs)


def mean(x: Variable, axis: Axis = None, keepdim: bool = False) -> Variable:
    """Mean over ``axis`` (one or several); over everything, to a scalar of shape [], where it is None."""
    return _reduce("mean", "ReduceMean", x, axis, keepdim)


def sum(x: Variable, axis: Axis = None, keepdim: bool = False) -> Variable:
    """Sum over ``axis`` (one or several); over everything, to a scalar of shape [], where it is None."""
    return _reduce("sum", "ReduceSum", x, axis, keepdim)


def dropout(x: Variable, p: float = 0.5, training: bool = True) -> Variable:
    """Each element 0 with probability ``p``, else divided by 1 - p (Srivastava et al. 2014). ``0 <= p < 1``.

    The mask is a hash of the program's seed and step, so a repeated run repeats it. A clone for testing, and
    ``training=False``, pass ``x`` through.
    """
    call = "dropout"
    variable(call, "x", x, dtypes=FLOATING)
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise ArgumentTypeError(f"{call}: p must be a number, not {p!r}")
    if not 0 <= p < 1:
        raise ArgumentError(f"{call}: p must be in [0, 1), not {p}")
    if not training or p == 0:
        return x
    return append_dropout(call, x, p, names.generate(call))


def append_dropout(call: str, x: Variable, p: float, prefix: str) -> Variable:
    """ONNX Dropout in training mode with a mask of its own."""
    rng_state(x.program, default_startup_program())
    y, mask = append_many(call, "Dropout", [x, np.array(p, np.float32), np.array(True)], 2, prefix=prefix)
    assert y.producer is not None
    y.producer.metadata[MASK_ID] = str(mask.key)  # a key is unique in its program, and the number outlives clones
    return y
