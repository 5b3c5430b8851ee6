"""Which operators computed the elements of a tensor, past those that only move them."""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined, traits_of
from amp_transpiler.passes.view.names import source


def computed_by(variable: Variable | None) -> list[Operator] | None:
    """The operators that computed the elements of a tensor, which may have been moved, cast, or set beside zeros since.

    None where some of them are fed or constant, or were combined in one place.
    """
    found: dict[Operator, None] = {}
    seen: set[Variable] = set()
    queue = [variable]
    while queue:
        each = queue.pop()
        op = None if each is None else source(each).producer
        if each is None or op is None:
            return None
        if each in seen:
            continue
        seen.add(each)
        slots = traits_of(op).moves
        if slots == ():
            found[op] = None
        elif combined(op) != "none":
            return None
        else:
            queue += op.inputs if slots is None else [v for slot in slots if (v := op.input(slot)) is not None]
    return list(found)
