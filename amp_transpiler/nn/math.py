"""Python operators on variables: ``x @ w + b``, ``x[:, 0]``. Loading this module says what they build.

A number or array beside a variable takes its element type. ``==`` keeps its meaning, identity.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Arithmetic, Variable, set_arithmetic
from amp_transpiler.nn.building import append, variable
from amp_transpiler.nn.elementwise_functions import binary, cast
from amp_transpiler.nn.indexing import item


def _unary(call: str, type_: str, x: Variable) -> Variable:
    return append(call, type_, [variable(call, "x", x)])


set_arithmetic(Arithmetic(binary, _unary, item, cast))
