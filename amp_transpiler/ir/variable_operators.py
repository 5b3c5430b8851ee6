"""Python's operators on variables: ``x @ w + b``, ``x[:, 0]``. What they build, ``nn/math.py`` says."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from amp_transpiler.errors import ArgumentTypeError

if TYPE_CHECKING:
    from amp_transpiler.ir.nodes import Variable

#: What may stand beside a variable: a number or array takes its element type.
Operand: TypeAlias = "Variable | float | np.number[Any] | np.ndarray[Any, Any] | list[Any] | tuple[Any, ...]"


@dataclass(frozen=True)
class Arithmetic:
    """What builds the operators behind Python's on variables: types and shapes are the layer builder's subject.

    ``binary`` and ``unary`` take the name of the call, for messages, the operator type and the operands; ``named`` the
    name of a function, and the operands.
    """

    binary: Callable[[str, str, Any, Any], Variable]
    named: Callable[..., Variable]
    unary: Callable[[str, str, Any], Variable]
    item: Callable[[Any, Any], Variable]
    cast: Callable[[Any, Any], Variable]


_arithmetic: Arithmetic


def set_arithmetic(arithmetic: Arithmetic) -> None:
    """Let ``arithmetic`` build the operators behind Python's; ``amp_transpiler.nn`` calls this when it is loaded."""
    global _arithmetic
    _arithmetic = arithmetic


class PythonOperators:
    """What :class:`.nodes.Variable` has of them."""

    __slots__ = ()

    name: str

    #: numpy must not take ``array * variable`` apart element by element.
    __array_ufunc__ = None

    def __add__(self, other: Operand) -> Variable:
        return _arithmetic.binary("add", "Add", self, other)

    def __radd__(self, other: Operand) -> Variable:
        return _arithmetic.binary("add", "Add", other, self)

    def __sub__(self, other: Operand) -> Variable:
        return _arithmetic.binary("subtract", "Sub", self, other)

    def __rsub__(self, other: Operand) -> Variable:
        return _arithmetic.binary("subtract", "Sub", other, self)

    def __mul__(self, other: Operand) -> Variable:
        return _arithmetic.binary("multiply", "Mul", self, other)

    def __rmul__(self, other: Operand) -> Variable:
        return _arithmetic.binary("multiply", "Mul", other, self)

    def __truediv__(self, other: Operand) -> Variable:
        return _arithmetic.named("true_divide", self, other)

    def __rtruediv__(self, other: Operand) -> Variable:
        return _arithmetic.named("true_divide", other, self)

    def __floordiv__(self, other: Operand) -> Variable:
        return _arithmetic.named("floor_divide", self, other)

    def __rfloordiv__(self, other: Operand) -> Variable:
        return _arithmetic.named("floor_divide", other, self)

    def __mod__(self, other: Operand) -> Variable:
        return _arithmetic.named("mod", self, other)

    def __rmod__(self, other: Operand) -> Variable:
        return _arithmetic.named("mod", other, self)

    def __pow__(self, other: Operand) -> Variable:
        return _arithmetic.binary("pow", "Pow", self, other)

    def __rpow__(self, other: Operand) -> Variable:
        return _arithmetic.binary("pow", "Pow", other, self)

    def __matmul__(self, other: Operand) -> Variable:
        return _arithmetic.binary("matmul", "MatMul", self, other)

    def __rmatmul__(self, other: Operand) -> Variable:
        return _arithmetic.binary("matmul", "MatMul", other, self)

    # ``Any``: what numpy declares for the other side of a comparison overlaps with anything narrower.
    def __lt__(self, other: Any) -> Variable:
        return _arithmetic.binary("less_than", "Less", self, other)

    def __le__(self, other: Any) -> Variable:
        return _arithmetic.binary("less_equal", "LessOrEqual", self, other)

    def __gt__(self, other: Any) -> Variable:
        return _arithmetic.binary("greater_than", "Greater", self, other)

    def __ge__(self, other: Any) -> Variable:
        return _arithmetic.binary("greater_equal", "GreaterOrEqual", self, other)

    # Variables are found in lists and tables as what they are; a number beside one is compared with its elements.
    __hash__ = object.__hash__

    def __eq__(self, other: float) -> Variable:  # type: ignore[override]
        if other is None or isinstance(other, PythonOperators):
            return self is other
        if not isinstance(other, numbers.Real):
            return NotImplemented
        return _arithmetic.named("equal", self, other)

    def __ne__(self, other: float) -> Variable:  # type: ignore[override]
        if other is None or isinstance(other, PythonOperators):
            return self is not other
        if not isinstance(other, numbers.Real):
            return NotImplemented
        return _arithmetic.named("not_equal", self, other)

    def __and__(self, other: Variable) -> Variable:
        return _arithmetic.named("logical_and", self, other)

    def __or__(self, other: Variable) -> Variable:
        return _arithmetic.named("logical_or", self, other)

    def __invert__(self) -> Variable:
        return _arithmetic.named("logical_not", self)

    def __neg__(self) -> Variable:
        return _arithmetic.unary("negative", "Neg", self)

    def __abs__(self) -> Variable:
        return _arithmetic.unary("abs", "Abs", self)

    def __getitem__(self, key: Any) -> Variable:
        return _arithmetic.item(self, key)

    def __iter__(self) -> NoReturn:
        raise ArgumentTypeError(
            f"variable '{self.name}' cannot be iterated over; F.unstack gives its pieces along an axis"
        )

    def astype(self, dtype: Any) -> Variable:
        """The variable as element type ``dtype``."""
        return _arithmetic.cast(self, dtype)
