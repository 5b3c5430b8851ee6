"""Weights of operators that a place's kernels make compute in fp32 are stored in 16 bit all the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import CAPTURE, Operator, Variable
from amp_transpiler.ir.opdef import lookup
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import SHORT
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.inner_roundings import ROUNDED
from amp_transpiler.passes.precision.casts import add_cast
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.typing import programs

#: Why operators are fp32 on a place that would read their weights in 16 bit otherwise.
_WIDE = ROUNDED | {Kind.NO_KERNEL_THERE}
#: Elements of a weight from which on its bytes matter.
_LARGE = 1024
#: The variables of nested graphs that stand for an outer one.
_Inside = Mapping[Variable, Sequence[Variable]]


def store_weights(program: Graph, constraints: Constraints | None, dtype: str) -> None:
    """Store in ``dtype`` what only operators read that a place's kernels keep fp32, with casts before them."""
    kept = constraints.tensors if constraints is not None else {}
    inside: dict[Variable, list[Variable]] = {}
    for nested in programs(program):
        for variable in nested.variables:
            if variable.outer is not None:
                inside.setdefault(variable.outer, []).append(variable)
    for variable in [
        v for each in programs(program) for v in each.variables if v not in kept and _only_wide(v, inside)
    ]:
        _store(variable, dtype)


def _only_wide(variable: Variable, inside: _Inside) -> bool:
    """Whether it is a large constant that only operators read which the place's kernels keep fp32."""
    if variable.dtype != "float32" or not constants.is_constant(variable):
        return False
    if math.prod(size if isinstance(size, int) else 1 for size in variable.shape or ()) < _LARGE:
        return False
    return _wide_readers(variable, inside)


def _wide_readers(variable: Variable, inside: _Inside) -> bool:
    """Whether somebody reads it, here or in nested graphs, and the place's kernels keep all of them fp32."""
    if variable in variable.program.outputs:
        return False
    if not variable.readers or not all(slot == CAPTURE or _is_wide(op, inside) for op, slot in variable.readers):
        return False
    return all(_wide_readers(inner, inside) for inner in inside.get(variable, ()))


def _is_wide(op: Operator, inside: _Inside) -> bool:
    """Whether the place's kernels keep an operator fp32, or it hands a weight on to such alone."""
    if op.why is not None and op.why.kind in _WIDE:
        return True
    found, made = lookup(op), op.output(0)
    if found is None or not found.exact or op.precision != "float32" or made is None:
        return False
    return _wide_readers(made, inside)


def _store(variable: Variable, dtype: str) -> None:
    program, name = variable.program, f"{variable.name}.cast_{SHORT[dtype]}"
    copy = program.find(name)
    if copy is not None and copy.dtype == dtype and copy.shape == variable.shape and constants.is_constant(copy):
        narrow = copy  # 16-bit operators read it too
    else:
        narrow = program.fresh_variable(name, dtype, variable.shape, data=constants.converted(variable, dtype, ""))
    wide = program.fresh_variable(f"{variable.name}.cast_{SHORT['float32']}", "float32", variable.shape)
    program.replace_uses(variable, wide)
    if variable.producer is not None:
        program.remove_operator(variable.producer)
    # The name goes: files of old formats list weights among their inputs, and onnxruntime ends the process where such
    # a one is cast before a convolution on WebGPU.
    program.remove_variable(variable)
    add_cast(narrow, wide)
