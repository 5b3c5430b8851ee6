"""What a state may be updated by: a variable of its type and shape."""

from __future__ import annotations

from typing import Any

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.nodes import Variable


def same_shape(one: Any, other: Any) -> bool:
    """Whether two shapes can be one: equal rank, and equal sizes where both are numbers."""
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(
        a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in zip(one, other, strict=True)
    )


def update_fault(state: Variable, new: Variable) -> str | None:
    """What keeps ``new`` from being what ``state`` becomes; None where nothing does."""
    if not state.persistable:
        return f"variable '{state.name}' is not persistable and cannot be updated"
    said = f"the update of '{state.name}'"
    if new.dtype not in (None, state.dtype):  # of a model that is being read types come later
        return f"{said} ({state.dtype}) is '{new.name}' ({new.dtype}); an update keeps the type, and a cast gives it"
    if not same_shape(state.shape, new.shape):
        return f"{said} {_listed(state)} is '{new.name}' {_listed(new)}; an update keeps the shape"
    return None


def check_update(state: Variable, new: Variable) -> None:
    """GraphError where something does."""
    fault = update_fault(state, new)
    if fault is not None:
        raise GraphError(fault)


def _listed(variable: Variable) -> str:
    return str(list(variable.shape or ()))
