"""Which operators write state that a bad step keeps, and which state that is."""

from __future__ import annotations

from ..ir.program import OWN, Operator, Variable
from ..ops.average import AVERAGE, average_states
from ..ops.scaling import GATE
from ..ops.update import LAYOUTS


def gated_states(op: Operator | None) -> list[Variable | None]:
    """The states that the operator keeps where its first input, the verdict, is true, one for each output; else []."""
    if op is None or op.domain != OWN:
        return []
    if op.type == GATE:
        return [op.input(1)]
    if op.type == AVERAGE:
        return average_states(op.inputs)
    return LAYOUTS[op.type].states(op.inputs) if op.type in LAYOUTS else []


def gated_state(new: Variable) -> Variable | None:
    """The state that the producer of ``new`` keeps on a bad step, None where it keeps none."""
    states = gated_states(new.producer)
    return states[new.producer_slot] if new.producer_slot < len(states) else None


__all__ = ["gated_state", "gated_states"]
