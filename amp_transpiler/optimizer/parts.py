"""Pieces of a training step that a decorated optimizer puts together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import ArgumentError
from ..ir.decompose import has_decomposition
from ..ir.program import Program, Variable
from ..ir.types import ONNX_TYPES
from ..passes.backward import standardize
from .pairs import checked_loss


def checked_losses(loss: Any) -> list[Variable]:
    """One loss or several, all of one program; errors for anything else."""
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    if not losses:
        raise ArgumentError("there is no loss in the list of losses")
    for each in losses:
        checked_loss(each)
        if each.program is not losses[0].program:
            raise ArgumentError(f"losses '{losses[0].name}' and '{each.name}' belong to different programs")
    return losses


def wide_loss(loss: Variable) -> Variable:
    """The loss in fp32."""
    if loss.dtype == "float32":
        return loss
    wide = loss.program.add_variable(loss.program.unique(f"{loss.name}.cast_fp32"), "float32", loss.shape)
    loss.program.add_operator("Cast", [loss], [wide], attrs={"to": ONNX_TYPES["float32"]})
    return wide


def made_of(sources: Iterable[Variable]) -> set[Variable]:
    """The variables, and all that is computed from them."""
    found, queue = set(sources), list(sources)
    while queue:
        for op, _ in queue.pop().readers:
            new = [v for v in op.outputs if v is not None and v not in found]
            found.update(new)
            queue += new
    return found


def take_apart(program: Program) -> None:
    """Operators that the lists do not know become those that they do, before the lists decide."""
    if any(has_decomposition(op) for op in program.walk()):
        standardize(program)
