"""Python operators on variables: ``x @ w + b``, ``x[:, 0]``. Importing this module attaches them.

A number or array beside a variable takes its element type. ``==`` keeps its meaning, identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn.building import append, variable
from amp_transpiler.nn.elementwise_functions import abs, binary, cast
from amp_transpiler.nn.indexing import item

#: python's method name -> (function name, ONNX operator)
_BINARY = {
    "add": ("add", "Add"),
    "sub": ("subtract", "Sub"),
    "mul": ("multiply", "Mul"),
    "truediv": ("divide", "Div"),
    "pow": ("pow", "Pow"),
    "matmul": ("matmul", "MatMul"),
}
_COMPARE = {
    "lt": ("less_than", "Less"),
    "le": ("less_equal", "LessOrEqual"),
    "gt": ("greater_than", "Greater"),
    "ge": ("greater_equal", "GreaterOrEqual"),
}


def _forward(call: str, type_: str) -> Callable[[Variable, Any], Variable]:
    return lambda x, y: binary(call, type_, x, y)


def _reflected(call: str, type_: str) -> Callable[[Variable, Any], Variable]:
    return lambda x, y: binary(call, type_, y, x)


def _negative(x: Variable) -> Variable:
    return append("negative", "Neg", [variable("negative", "x", x)])


def _iterated(x: Variable) -> None:
    raise ArgumentTypeError(f"variable '{x.name}' cannot be iterated over; F.unstack gives its pieces along an axis")


def _attach() -> None:
    for name, (call, type_) in _BINARY.items():
        setattr(Variable, f"__{name}__", _forward(call, type_))
        setattr(Variable, f"__r{name}__", _reflected(call, type_))
    for name, (call, type_) in _COMPARE.items():
        setattr(Variable, f"__{name}__", _forward(call, type_))
    others = {"__neg__": _negative, "__abs__": abs, "__getitem__": item, "__iter__": _iterated, "astype": cast}
    for name, method in others.items():
        setattr(Variable, name, method)
    # numpy must not take `array * variable` apart element by element.
    setattr(Variable, "__array_ufunc__", None)  # noqa: B010


_attach()
