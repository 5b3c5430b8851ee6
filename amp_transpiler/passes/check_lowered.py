"""Prove the gates of a training step on the ONNX model that a place runs (point 6 of ``check_step``).

Give it the model that lowering makes, or the one that a session wrote as its optimised form.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..errors import StepError
from ..ir.program import OWN, Program
from ..ops.scaling import GATE
from ..ops.update import LAYOUTS
from .lowering import Lowered

#: Operators that hand a value on as it is, or in another element type or shape.
_MOVES = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
#: What lies between a gate's condition and the sums that the verdict looks at.
_VERDICT = _MOVES | {"Equal", "And", "Or", "IsNaN", "IsInf", "Mul", "Add", "Sum", "Concat", "Abs", "Max", "Min"}
_DROPS_NAN = frozenset({"ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "TopK"})


def check_lowered(program: Program, lowered: Lowered) -> None:
    """Check that every gated state of ``program`` is ``Where(ok, new, old)`` in ``lowered``, with a sound ``ok``.

    StepError lists every state that is written without a gate, through one with its branches swapped,
    through one whose condition goes through Not (which the runtime fuses by swapping branches), and
    every verdict that is taken with an operator that drops NaN on CPU.
    """
    gates = _Gates(lowered)
    for state, new in program.updates.items():
        op = new.producer
        if op is not None and op.domain == OWN and (op.type == GATE or op.type in LAYOUTS) and op.input(0) is not None:
            gates.check(state.name)
    if len(gates.verdicts) > 1:
        gates.found.append(f"gates follow {len(gates.verdicts)} verdicts: {', '.join(sorted(gates.verdicts))}")
    if gates.found:
        listed = "\n".join(f"  6: {violation}" for violation in dict.fromkeys(gates.found))
        raise StepError(
            f"the lowered step of program '{program.name}' ({lowered.place}) breaks the step protocol:\n{listed}"
        )


class _Gates:
    def __init__(self, lowered: Lowered) -> None:
        self.producers = {name: node for node in lowered.model.graph.node for name in node.output}
        self.states = {port.variable: port.tensor for port in lowered.states}
        self.updates = {port.variable: port.tensor for port in lowered.updates}
        self.verdicts: set[str] = set()
        self.found: list[str] = []

    def check(self, state: str) -> None:
        """Record what is wrong with the gate of ``state``."""
        if state not in self.updates or state not in self.states:
            self.found.append(f"state '{state}' is not carried from step to step")
            return
        old = self.states[state]
        gate = self.producers.get(self._behind(self.updates[state]))
        if gate is None or gate.op_type != "Where":
            self.found.append(f"state '{state}' is written without a gate")
        elif self._behind(gate.input[2]) != old:
            how = "has its branches swapped" if self._behind(gate.input[1]) == old else "does not keep the old value"
            self.found.append(f"the gate of state '{state}' ({gate.name or gate.output[0]}) {how}")
        else:
            self._condition(state, gate.input[0])

    def _behind(self, tensor: str) -> str:
        while tensor in self.producers and self.producers[tensor].op_type in _MOVES:
            tensor = self.producers[tensor].input[0]
        return tensor

    def _condition(self, state: str, tensor: str) -> None:
        verdicts = 0
        for node in self._ancestors(tensor):
            if node.op_type == "Not":
                self.found.append(f"the gate of state '{state}' goes through Not ({node.name or node.output[0]})")
            elif node.op_type in _DROPS_NAN:
                self.found.append(f"the verdict looks for NaN with {node.op_type} ({node.name or node.output[0]}), "
                                  "which drops NaN on CPU")  # fmt: skip
            elif node.op_type in ("IsNaN", "IsInf"):
                verdicts += 1
                self.verdicts.add(node.output[0])
        if not verdicts:
            self.found.append(f"the gate of state '{state}' follows no test for NaN")

    def _ancestors(self, tensor: str) -> Iterator[onnx.NodeProto]:
        """Nodes behind a condition, down to the reductions."""
        seen: set[str] = set()
        stack = [tensor]
        while stack:
            name = stack.pop()
            node = self.producers.get(name)
            if node is None or name in seen:
                continue
            seen.add(name)
            yield node
            if node.op_type in _VERDICT or node.op_type == "Not":
                stack.extend(node.input)
