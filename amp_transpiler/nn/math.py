"""Python operators on variables: ``x @ w + b``, ``x[:, 0]``. Loading this module says what they build.

A number or array beside a variable takes its element type; integers are divided in float32. ``==`` and ``!=`` compare
the elements with a number; of two variables they say whether it is one (``F.equal`` compares their elements).
"""

from __future__ import annotations

from typing import Any

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.variable_operators import Arithmetic, set_arithmetic
from amp_transpiler.nn.building import append, variable
from amp_transpiler.nn.elementwise_functions import (
    binary,
    cast,
    equal,
    logical_and,
    logical_not,
    logical_or,
    not_equal,
)
from amp_transpiler.nn.indexing import item
from amp_transpiler.nn.number_functions import floor_divide, mod, true_divide

_NAMED = {
    called.__name__: called
    for called in (equal, floor_divide, logical_and, logical_not, logical_or, mod, not_equal, true_divide)
}


def _unary(call: str, type_: str, x: Variable) -> Variable:
    return append(call, type_, [variable(call, "x", x)])


def _named(name: str, *operands: Any) -> Variable:
    return _NAMED[name](*operands)


set_arithmetic(Arithmetic(binary, _named, _unary, item, cast))
