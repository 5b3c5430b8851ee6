"""Which operators write state that a bad step keeps, and which state that is."""

from __future__ import annotations

from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ops.training.average import AVERAGE, average_states
from amp_transpiler.ops.training.scaling import GATE
from amp_transpiler.ops.training.update import LAYOUTS


def gated_states(op: Operator | None) -> list[Variable | None]:
    """The states that the operator keeps where its first input, the verdict, is true, one for each output; else []."""
    if op is None or op.domain != OWN:
        return []
    if op.type == GATE:
        return [op.input(1)]
    if op.type == AVERAGE:
        return average_states(op.inputs)
    return LAYOUTS[op.type].states(op.inputs) if op.type in LAYOUTS else []


class GatedStates:
    """What each state is kept as on a bad step; an operator over many parameters is read once."""

    def __init__(self) -> None:
        self._states: dict[int, list[Variable | None]] = {}

    def of(self, new: Variable) -> Variable | None:
        """The state that the producer of ``new`` keeps on a bad step, None where it keeps none."""
        op = new.producer
        if op is None:
            return None
        if op.key not in self._states:
            self._states[op.key] = gated_states(op)
        states = self._states[op.key]
        return states[new.producer_slot] if new.producer_slot < len(states) else None


__all__ = ["GatedStates", "gated_states"]
