"""The gradient of an If whose condition is computed in the run: an If on the same condition.

Each of its branches computes the forward branch again and then the gradients of what that branch reads from
outside; a tensor that only the other branch reads gets zeros. Such a program cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from amp_transpiler.ir.clone import clone_graph
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import BACKWARD, Operator, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS, numpy_dtype


class Sweep(Protocol):
    """What is asked of the reverse sweep that meets the If."""

    needs: set[int]

    def reaches(self, variable: Variable) -> bool:
        """Whether the variable has a gradient."""

    def total(self, variable: Variable) -> Variable:
        """The gradient of a variable whose readers have all contributed."""

    def contribution(self, variable: Variable) -> Variable:
        """A new variable for one reader's part of the gradient."""

    def nested(
        self, order: list[Operator], seeds: list[tuple[Variable, Variable]], wanted: Iterable[Variable]
    ) -> Sweep:
        """A sweep over the operators of a nested program."""


def captured_floats(op: Operator, needs: set[int]) -> list[Variable]:
    """The float variables of ``needs`` that nested graphs of the operator read."""
    return [v for v in op.captures if v.key in needs and v.dtype in FLOATS]


def append_if_gradient(op: Operator, sweep: Sweep) -> None:
    """Append the gradient of ``op``, an If, to its program."""
    known = [(slot, sweep.total(v)) for slot, v in enumerate(op.outputs) if v is not None and sweep.reaches(v)]
    captured = captured_floats(op, sweep.needs)
    outputs = [sweep.contribution(v) for v in captured]
    branches = {name: _branch(clone_graph(branch), known, captured, sweep) for name, branch in op.attrs.graphs.items()}
    grad = op.program.add_operator("If", [op.inputs[0]], outputs, attrs=dict(branches))
    for branch in branches.values():
        for variable in branch.variables:
            if variable.outer is not None:
                grad.add_capture(variable.outer)
    grad.scope, grad.guard, grad.why = op.scope, op.guard, Reason(Kind.GRADIENT, op.label)


def _branch(branch: Graph, known: list[tuple[int, Variable]], captured: list[Variable], sweep: Sweep) -> Graph:
    """A branch that gives the gradients of ``captured`` instead of its outputs."""
    inner = {v.outer: v for v in branch.variables if v.outer is not None}
    seeds = [(branch.outputs[slot], _from_outside(branch, gradient, inner)) for slot, gradient in known]
    wanted = [inner[v] for v in captured if v in inner]
    within = sweep.nested(branch.operators, seeds, wanted)
    branch.outputs = [
        within.total(inner[v]) if v in inner and within.reaches(inner[v]) else _zeros(branch, v, inner)
        for v in captured
    ]
    for op in branch.operators:  # also those that only say a shape: lowering emits what the outputs need
        op.role = BACKWARD
    return branch


def _from_outside(branch: Graph, variable: Variable, inner: dict[Variable, Variable]) -> Variable:
    if variable not in inner:
        new = branch.fresh_variable(variable.name, variable.dtype, variable.shape)
        new.outer = variable
        inner[variable] = new
    return inner[variable]


def _zeros(branch: Graph, variable: Variable, inner: dict[Variable, Variable]) -> Variable:
    """Zeros like a variable around the branch."""
    assert variable.dtype is not None
    like = _from_outside(branch, variable, inner)
    size = branch.fresh_variable(f"{variable.name}.shape", "int64", None)
    zeros = branch.fresh_variable(f"{variable.name}@GRAD", variable.dtype, variable.shape)
    branch.add_operator("Shape", [like], [size])
    branch.add_operator("ConstantOfShape", [size], [zeros], attrs={"value": np.zeros(1, numpy_dtype(variable.dtype))})
    return zeros
