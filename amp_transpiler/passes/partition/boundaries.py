"""Tensors that cross into and out of nested graphs: one element type on both sides.

What an If gives comes from both of its branches, what a Scan reads or stacks has the type of its slices.
State that a Loop or Scan carries from step to step keeps its type: rounding errors would add up in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from amp_transpiler.ir.control import carried_slots
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.precision.rules import Decision
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.typing import signature_of


@dataclass(frozen=True, eq=False)
class Boundary:
    """Slots of a control-flow operator, and the variables of its graphs that go with them.

    ``read``: an input slot and the variable that it feeds; ``made``: an output slot and the variables it takes.
    """

    op: Operator
    read: tuple[int, Variable] | None = None
    made: tuple[int, tuple[Variable, ...]] | None = None

    def outer(self) -> Variable:
        """The variable of the graph around."""
        variable = self.op.inputs[self.read[0]] if self.read else self.op.outputs[self.made[0]] if self.made else None
        assert variable is not None
        return variable

    def inner(self) -> tuple[Variable, ...]:
        """The variables of the nested graphs."""
        return (self.read[1],) if self.read else self.made[1] if self.made else ()

    def constants(self) -> tuple[Variable, ...]:
        """Those variables that hold what they give."""
        return tuple(filter(is_constant, self.inner()))

    def retype(self, decision: Decision, dtype: str) -> None:
        """Let both sides have this element type: the slot in the operator's decision, and the inner variables."""
        if self.read:
            decision.slots.inputs[self.read[0]] = dtype
        elif self.made:
            decision.slots.outputs[self.made[0]] = dtype
        for variable in self.inner():
            if not is_constant(variable):  # the content of a constant follows
                variable.dtype = dtype
        slots = (*decision.slots.outputs, *decision.slots.inputs)
        decision.precision = next(kind for kind in slots if kind in FLOATS)


def boundaries(op: Operator, dtype: str) -> list[Boundary]:
    """The boundaries of a control-flow operator whose type may be chosen: float32 or ``dtype`` on both sides."""
    return [b for b in _boundaries(op) if _free(b, dtype)]


def _boundaries(op: Operator) -> Iterator[Boundary]:
    nested = op.attrs.programs
    if op.domain or not nested:
        return
    if op.type == "If":
        for slot, variable in enumerate(op.outputs):
            if variable is not None and all(slot < len(program.outputs) for program in nested):
                yield Boundary(op, made=(slot, tuple(program.outputs[slot] for program in nested)))
    elif op.type == "Loop":
        for slot in range(len(carried_slots(op)), len(op.outputs)):
            if op.outputs[slot] is not None:
                yield Boundary(op, made=(slot, (nested[0].outputs[slot + 1],)))
    elif op.type == "Scan" and op.program.opset() >= 9:
        carried = len(carried_slots(op))
        for slot in range(carried, len(op.inputs)):
            if op.inputs[slot] is not None:
                yield Boundary(op, read=(slot, nested[0].inputs[slot]))
        for slot in range(carried, len(op.outputs)):
            if op.outputs[slot] is not None:
                yield Boundary(op, made=(slot, (nested[0].outputs[slot],)))


def _free(boundary: Boundary, dtype: str) -> bool:
    sides = (boundary.outer(), *boundary.inner())
    sig = signature_of(boundary.op)
    slot = sig and (
        sig.input(boundary.read[0]) if boundary.read else sig.output(boundary.made[0] if boundary.made else 0)
    )
    if sig is None or dtype not in sig.admits[str(slot)]:
        return False
    if len({v.dtype for v in sides}) != 1 or sides[0].dtype not in (dtype, "float32") or sides[0].dtype not in FLOATS:
        return False
    if boundary.read:
        return True
    return all(map(_own, boundary.inner()))


def _own(variable: Variable) -> bool:
    """Whether an output is a value of its graph alone: not captured, fed or given twice, nor a constant that is read
    beside, or is 16 bit already."""
    if variable.outer is not None or variable.program.outputs.count(variable) > 1:
        return False
    if is_constant(variable):
        return variable.dtype == "float32" and not variable.readers
    return variable.producer is not None
