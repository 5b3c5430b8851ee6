"""Which operators computed the elements of a tensor, past those that only move them."""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined, traits_of
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.reached import reached


def computed_by(variable: Variable | None) -> list[Operator] | None:
    """The operators that computed the elements of a tensor, which may have been moved, cast, or set beside zeros since.

    None where some of them are fed or constant, or were combined in one place.
    """
    found: dict[Operator, None] = {}
    for at in reached([] if variable is None else [variable], _moved):
        op = source(at).producer
        if op is None or combined(op) != "none":
            return None
        if traits_of(op).moves == ():
            found[op] = None
    return list(found)


def _moved(variable: Variable) -> list[Variable | None]:
    """The tensors whose elements this one holds as they are."""
    op = source(variable).producer
    if op is None:
        return []
    slots = traits_of(op).moves
    return list(op.inputs) if slots is None else [op.input(slot) for slot in slots]
