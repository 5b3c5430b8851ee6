"""Prove the step protocol on an emitted training program, before it is run.

What must hold (numbers as in the messages):

1. One verdict: one finite check reads the gradient of every updated parameter, and its ``found_inf``,
   unchanged, reaches every update.
2. A bad step changes the loss scale, its counters and the randomness counter, nothing else: every other
   state is written by an operator that is gated by the verdict and that read this very state.
3. Gradients are unscaled in fp32, by the scale that the loss was multiplied with, before they are clipped.
4. The scale and its counters are moved by ``UpdateLossScaling`` alone, with ratios and thresholds in range.
5. Masters: an updated 16-bit parameter and its fp32 master weight are written by one operator.
6. In the lowered model a gate is ``Where(ok, new, old)`` with ``ok`` free of Not, and the verdict is not
   looked for with ReduceMax or ReduceMin, which drop NaN on CPU.
"""

from __future__ import annotations

from ..errors import StepError
from ..ir.program import OWN, Operator, Program, Variable
from ..ir.types import HALF
from ..ops.clip import CLIPS
from ..ops.scaling import CHECK, GATE, UPDATE_SCALE, master_type
from ..ops.update import LAYOUTS, Row

#: State that advances on a bad step too.
UNGATED = frozenset({"@rng_step"})


def check_step(program: Program) -> None:
    """Check a program with loss scaling, as ``minimize`` of a decorated optimizer leaves it.

    StepError lists every violation with the operators and variables concerned.
    """
    found = _Step(program).violations()
    if found:
        listed = "\n".join(f"  {violation}" for violation in found)
        raise StepError(f"the training step of program '{program.name}' breaks the step protocol:\n{listed}")


def _own(program: Program, types: frozenset[str]) -> list[Operator]:
    return [op for op in program.operators if op.domain == OWN and op.type in types]


class _Step:
    """The operators of a step, and what is wrong with them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.checks = _own(program, frozenset({CHECK}))
        self.updates = _own(program, frozenset(LAYOUTS))
        self.scalings = _own(program, frozenset({UPDATE_SCALE}))
        self.gates = _own(program, frozenset({GATE}))
        self.found: list[str] = []

    def violations(self) -> list[str]:
        if len(self.checks) != 1:
            labels = ", ".join(op.label for op in self.checks) or "none"
            return [f"1: there must be one {CHECK}, and there are {len(self.checks)} ({labels})"]
        self.check = self.checks[0]
        self.verdict = self.check.output(0)
        if not self.updates:
            self._add(1, "no operator updates a parameter")
        self._one_verdict()
        self._unscaled()
        for update in self.updates:
            self._update(update)
        self._loss_scaling()
        self._states()
        return self.found

    def _add(self, point: int, text: str) -> None:
        self.found.append(f"{point}: {text}")

    # -- 1 -------------------------------------------------------------------------------------------
    def _one_verdict(self) -> None:
        for op in [*self.updates, *self.scalings, *self.gates]:
            if op.input(0) is not self.verdict or self.verdict is None:
                given = op.input(0)
                self._add(1, f"'{op.label}' ({op.type}) is gated by {given.name if given else 'nothing'}, not by the "
                             f"verdict of '{self.check.label}'")  # fmt: skip

    # -- 3 -------------------------------------------------------------------------------------------
    def _unscaled(self) -> None:
        scale = self.check.input(0)
        if scale is None or scale.dtype != "float32":
            self._add(3, f"'{self.check.label}' divides by {scale}; the scale is fp32")
            return
        readers = {op.type for op, _ in scale.readers if op is not self.check and op.type != UPDATE_SCALE}
        if "Mul" not in readers:
            self._add(3, f"no loss is multiplied by '{scale.name}', the scale that gradients are divided by")
        for raw, new in zip(self.check.inputs[1:], self.check.outputs[1:], strict=True):
            if raw is None or new is None:
                self._add(3, f"'{self.check.label}' has an empty slot")
            elif new.dtype != master_type(raw.dtype):
                self._add(3, f"gradient '{raw.name}' is unscaled in {new.dtype}, not in {master_type(raw.dtype)}")
            elif _through(raw, CLIPS):
                self._add(3, f"gradient '{raw.name}' is clipped before it is unscaled")

    # -- 1, 2, 5 for one update operator -------------------------------------------------------------
    def _update(self, op: Operator) -> None:
        layout = LAYOUTS[op.type]
        for state, new in zip(layout.states(op.inputs), op.outputs, strict=False):
            if state is not None and (new is None or self.program.updates.get(state) is not new):
                self._add(
                    2, f"'{op.label}' ({op.type}) computes a new '{state.name}' that '{state.name}' does not take"
                )
        for row in layout.read(op.inputs):
            self._row(op, row)

    def _row(self, op: Operator, row: Row[Variable | None]) -> None:
        parameter, grad, master = row.parameter, row.gradient, row.master
        if parameter is None or grad is None:
            self._add(1, f"'{op.label}' ({op.type}) has a row without parameter or gradient")
            return
        raw = self._scaled_gradient(grad)
        if raw is None:
            self._add(1, f"the gradient '{grad.name}' of parameter '{parameter.name}' does not come from "
                         f"'{self.check.label}'")  # fmt: skip
        elif raw.grad_of is not parameter:
            self._add(1, f"parameter '{parameter.name}' is updated with '{raw.name}', the gradient of another variable")
        if master is not None and (parameter.dtype not in HALF or master.dtype != "float32"):
            self._add(5, f"the master weight '{master.name}' ({master.dtype}) of '{parameter.name}' "
                         f"({parameter.dtype}) must be fp32, of a 16-bit parameter")  # fmt: skip

    def _scaled_gradient(self, grad: Variable) -> Variable | None:
        """The scaled gradient that ``grad`` is the unscaled, perhaps clipped, form of."""
        while grad.producer is not None and grad.producer.domain == OWN and grad.producer.type in CLIPS:
            source = grad.producer.input(grad.producer_slot)
            if source is None:
                return None
            grad = source
        if grad.producer is not self.check or grad.producer_slot < 1:
            return None
        return self.check.input(grad.producer_slot)

    # -- 4 -------------------------------------------------------------------------------------------
    def _loss_scaling(self) -> None:
        scale = self.check.input(0)
        if len(self.scalings) > 1:
            self._add(4, f"{len(self.scalings)} operators update the loss scale")
        for op in self.scalings:
            if op.input(1) is not scale:
                self._add(
                    4, f"'{op.label}' moves '{_name(op.input(1))}', but gradients are divided by '{_name(scale)}'"
                )
            for state, new in zip(op.inputs[1:4], op.outputs[:3], strict=True):
                if state is None or new is None or self.program.updates.get(state) is not new:
                    self._add(4, f"'{_name(state)}' does not take the value that '{op.label}' computes for it")
            attrs = op.attrs
            if attrs["incr_ratio"] < 1 or not 0 < attrs["decr_ratio"] <= 1:
                self._add(4, f"'{op.label}' has ratios {attrs['incr_ratio']:g} and {attrs['decr_ratio']:g}")
            if attrs["incr_every_n_steps"] < 1 or attrs["decr_every_n_nan_or_inf"] < 1:
                self._add(
                    4,
                    f"'{op.label}' has thresholds {attrs['incr_every_n_steps']} and {attrs['decr_every_n_nan_or_inf']}",
                )

    # -- 2 -------------------------------------------------------------------------------------------
    def _states(self) -> None:
        scaling = {state.key for op in self.scalings for state in op.inputs[1:4] if state is not None}
        for state, new in self.program.updates.items():
            if state.name in UNGATED or state.key in scaling:
                continue
            gated = _gated_state(new)
            if gated is None:
                made = f"'{new.producer.label}' ({new.producer.type})" if new.producer else "nothing"
                self._add(2, f"state '{state.name}' takes '{new.name}' from {made}, which no verdict gates")
            elif gated is not state:
                self._add(2, f"state '{state.name}' takes '{new.name}', the next value of '{gated.name}'")


def _gated_state(new: Variable) -> Variable | None:
    """The state that the producer of ``new`` keeps on a bad step, None where it keeps none."""
    op = new.producer
    if op is None or op.domain != OWN:
        return None
    if op.type == GATE:
        return op.input(1)
    if op.type in LAYOUTS:
        states = LAYOUTS[op.type].states(op.inputs)
        return states[new.producer_slot] if new.producer_slot < len(states) else None
    return None


def _through(variable: Variable, types: frozenset[str]) -> bool:
    return variable.producer is not None and variable.producer.domain == OWN and variable.producer.type in types


def _name(variable: Variable | None) -> str:
    return "nothing" if variable is None else variable.name


__all__ = ["UNGATED", "check_step"]
