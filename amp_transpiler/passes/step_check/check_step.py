"""Prove the step protocol on an emitted training program, before it is run.

What must hold (numbers as in the messages):

1. One found_inf: the gradient of every updated parameter, dense or sparse, goes through a finite check; found_inf of
   every check, joined with Or where there are several and cleared by nothing, reaches every update.
2. A bad step changes the loss scale, its counters and the randomness counter, nothing else: every other
   state is written by an operator that is gated by found_inf and that read this very state.
3. Gradients are those of a loss that is multiplied by the scale. They are unscaled once, in fp32, by that scale, before
   they are clipped.
4. The scale and its counters are moved by one ``UpdateLossScaling`` alone, with ratios and thresholds in range.
5. Masters: an updated 16-bit parameter and its fp32 master weight are written by one operator.
6. In the lowered model every state is carried from step to step, a gate is ``Where(ok, new, old)`` with ``ok`` free of
   Not, found_inf looks at every unscaled gradient, not with ReduceMax or ReduceMin, which drop NaN on CPU, and a
   16-bit gradient is rounded before it is looked at.
"""

from __future__ import annotations

from collections.abc import Collection

from amp_transpiler.errors import ArgumentError, StepError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import place_traits
from amp_transpiler.ops.training.accumulate import ACCUMULATE, ACCUMULATE_ROWS, RESET
from amp_transpiler.ops.training.scaling import CHECK, master_type
from amp_transpiler.passes.lowering.lowering import lower_for
from amp_transpiler.passes.lowering.place import Place, check_place
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.step_check.check_lowered import check_lowered
from amp_transpiler.passes.step_check.gradient_flow import CLIPPED, SCALED, UNSCALED, GradientFlow
from amp_transpiler.passes.view.training_step import (
    FiniteCheck,
    ParameterUpdate,
    StepOperator,
    Update,
    kept_on_bad_step,
    replaced,
    training_step,
)

#: Operators through which a scaled loss stays one, beside views.
_LINEAR = frozenset({"Mul", "Div", "Add", "Sum", "Cast", "ReduceSum", "ReduceMean", "Neg"})


def check_step(
    program: Graph, place: Place | str | None = None, feed_shapes: dict[str, tuple[int, ...]] | None = None
) -> None:
    """Check a program with loss scaling, as ``minimize`` of a decorated optimizer leaves it.

    Points 1 to 5 are proved on the program. With ``place`` ("cpu" or "cuda", CUDAPlace(0); neither needs a GPU) the
    program is lowered for it, and point 6 is proved on the model that the place runs; ``feed_shapes`` gives the shapes
    of feeds whose declared shape is not fixed.

    StepError lists every violation with the operators and variables concerned. ArgumentError for a place whose lowered
    steps are not proved: on WebGPU gates and finite checks are made of other operators.
    """
    found = _Step(program).violations()
    if found:
        listed = "\n".join(f"  {violation}" for violation in dict.fromkeys(found))
        raise StepError(f"the training step of program '{program.name}' breaks the step protocol:\n{listed}")
    if place is None:
        return
    place = check_place(place, "check_step: place")
    lowered = lower_for(program, place, feed_shapes)
    if place_traits(place.kind).bodies:
        raise ArgumentError(
            f"check_step: what is lowered for {place} has gates and finite checks made of other operators, which are "
            "not proved; give CPUPlace() or CUDAPlace(0), or no place for points 1 to 5 alone"
        )
    check_lowered(program, lowered)


def _said(op: Operator | None) -> str:
    return "nothing" if op is None else f"'{op.label}' ({op.type})"


class _Step:
    """The operators of a step, and what is wrong with them."""

    def __init__(self, program: Graph) -> None:
        self.program = program
        self.step = training_step(program)
        #: What moves the scale and counts for it: every step, a bad one too.
        self.scaling = (*self.step.scale_updates, *self.step.counters)
        self.found: list[str] = []

    def violations(self) -> list[str]:
        step = self.step
        if not step.checks:
            return [f"1: there must be a {CHECK} over the gradients, and there is none"]
        self.first = step.checks[0].operator.label
        self.flow = GradientFlow(step)
        if not step.updates:
            self._add(1, "no operator updates a parameter")
        for part in (*step.gated, *self.scaling):
            self._gated_by_found_inf(part)
        for check in step.checks:
            self._unscaled(check)
        self._scaled_losses()
        for op, grad in self.flow.unscaled_outside:
            self._add(
                3,
                f"{_said(op)} applies the loss scale to gradient '{grad.name}' in {grad.dtype}; only {CHECK} "
                "unscales, in fp32",
            )
        for update in step.updates:
            self._update(update)
        self._loss_scaling()
        self._states()
        return self.found

    def _add(self, point: int, text: str) -> None:
        self.found.append(f"{point}: {text}")

    # -- 1 -------------------------------------------------------------------------------------------
    def _gated_by_found_inf(self, part: StepOperator) -> None:
        op, given = part.operator, part.found_inf
        if given is None:
            self._add(1, f"{_said(op)} is gated by nothing, not by found_inf of '{self.first}'")
            return
        joined, others = _joined(given, [v for check in self.step.checks if (v := check.found_inf) is not None])
        missing = [check.operator.label for check in self.step.checks if check.found_inf not in joined]
        if len(missing) == len(self.step.checks):
            made = f", made by {_said(given.producer)}" if given.producer else ""
            self._add(1, f"{_said(op)} is gated by {given.name}{made}, not by found_inf of '{missing[0]}'")
        elif missing:
            self._add(1, f"{_said(op)} is gated by {given.name}, which leaves out found_inf of '{missing[0]}'")
        elif others and part in self.scaling:
            self._add(1, f"{_said(op)} takes '{others[0].name}' for a bad step; the scale follows found_inf alone")

    # -- 3 -------------------------------------------------------------------------------------------
    def _unscaled(self, check: FiniteCheck) -> None:
        scale, label = check.scale, check.operator.label
        if scale is None or scale.dtype != "float32":
            self._add(3, f"'{label}' divides by {scale}; the scale is fp32")
        elif scale is not self.step.scale:
            self._add(3, f"'{label}' divides by '{scale.name}', '{self.first}' by '{_name(self.step.scale)}'")
        for raw, new in check.gradients:
            if raw is None or new is None:
                self._add(3, f"'{label}' has an empty slot")
                continue
            mask = self.flow.mask(raw)
            if new.dtype != master_type(raw.dtype):
                self._add(
                    3,
                    f"gradient '{raw.name}' is unscaled in {new.dtype} by '{label}', not in {master_type(raw.dtype)}",
                )
            if mask & UNSCALED:
                self._add(3, f"gradient '{raw.name}' is unscaled twice, the second time by '{label}'")
            elif mask & CLIPPED:
                self._add(3, f"gradient '{raw.name}' is clipped before it is unscaled, by {_said(self.flow.clip(raw))}")

    def _scaled_losses(self) -> None:
        """Every loss that gradients start from is multiplied by the scale."""
        scale = self.step.scale
        for loss in self.step.scaled_losses:
            if scale is not None and not _multiplied(loss, scale):
                self._add(
                    3,
                    f"the loss '{loss.name}' is not multiplied by '{scale.name}', the scale that its "
                    f"gradients are divided by; it comes from {_said(loss.producer)}",
                )

    # -- 1, 2, 5 for one update operator -------------------------------------------------------------
    def _update(self, update: Update) -> None:
        op = update.operator
        for state, new in update.states:
            if state is not None and (new is None or self.program.updates.get(state) is not new):
                self._add(2, f"{_said(op)} computes a new '{state.name}' that '{state.name}' does not take")
        for row in update.rows:
            self._row(row)

    def _row(self, row: ParameterUpdate) -> None:
        op, parameter, grad, master = row.operator, row.parameter, row.gradient, row.master
        if parameter is None or grad is None:
            self._add(1, f"{_said(op)} has a row without parameter or gradient")
            return
        mask = self.flow.mask(grad)
        if mask & SCALED or not mask & UNSCALED:
            alone = " alone" if mask & UNSCALED else ""
            self._add(
                1,
                f"the gradient '{grad.name}' of parameter '{parameter.name}' in {_said(op)} does not come "
                f"from '{self.first}'{alone}",
            )
        elif not self.flow.owned(grad, parameter):
            self._add(
                1,
                f"parameter '{parameter.name}' is updated by {_said(op)} with '{grad.name}', the gradient of "
                "another variable",
            )
        if master is not None and (parameter.dtype not in HALF or master.dtype != "float32"):
            self._add(
                5,
                f"the master weight '{master.name}' ({master.dtype}) of '{parameter.name}' "
                f"({parameter.dtype}) in {_said(op)} must be fp32, of a 16-bit parameter",
            )

    # -- 4 -------------------------------------------------------------------------------------------
    def _loss_scaling(self) -> None:
        scalings, scale = self.step.scale_updates, self.step.scale
        if len(scalings) > 1:
            labels = ", ".join(_said(scaling.operator) for scaling in scalings)
            self._add(4, f"{len(scalings)} operators update the loss scale: {labels}")
        for scaling in scalings:
            op = scaling.operator
            if scaling.scale is not scale:
                self._add(
                    4, f"{_said(op)} moves '{_name(scaling.scale)}', but gradients are divided by '{_name(scale)}'"
                )
            self._stored(scaling)
            attrs = op.attrs
            if attrs["incr_ratio"] < 1 or not 0 < attrs["decr_ratio"] <= 1:
                self._add(4, f"{_said(op)} has ratios {attrs['incr_ratio']:g} and {attrs['decr_ratio']:g}")
            steps = attrs["incr_every_n_steps"], attrs["decr_every_n_nan_or_inf"]
            if min(steps) < 1:
                self._add(4, f"{_said(op)} has thresholds {steps[0]} and {steps[1]}")
        for counter in self.step.counters:
            self._stored(counter)
        window = self.step.accumulation
        for state in self.program.variables:
            counts = state.persistable and not state.trainable and state.dtype == "int32" and state.producer is None
            moved = state in self.program.updates or (window is not None and state is window.counter)
            if counts and not moved and not state.readers:
                self._add(
                    4,
                    f"'{state.name}' counts for the loss scale, but nothing moves it: the operator that "
                    "updates the scale is gone",
                )

    def _stored(self, part: StepOperator) -> None:
        for state, new in part.states:
            if (state is not None or new is not None) and (state is None or self.program.updates.get(state) is not new):
                self._add(4, f"'{_name(state)}' does not take the value that {_said(part.operator)} computes for it")

    # -- 2 -------------------------------------------------------------------------------------------
    def _states(self) -> None:
        scaling = {state.key for part in self.scaling for state, _ in part.states if state is not None}
        for state, new in self.program.updates.items():
            if state is self.step.rng_step or state.key in scaling or self._sum_of_window(state):
                continue
            gated = kept_on_bad_step(new)
            if gated is None:
                self._add(
                    2, f"state '{state.name}' takes '{new.name}' from {_said(new.producer)}, which no found_inf gates"
                )
            elif gated is not state and not self._stands_for(gated, state, new):
                self._add(
                    2,
                    f"state '{state.name}' takes '{new.name}' from {_said(new.producer)}, the next value of "
                    f"'{gated.name}'",
                )
        self._window()

    def _sum_of_window(self, state: Variable) -> bool:
        """Whether this is a sum of gradients, which a window of micro-batches adds to and its end clears."""
        window, cleared = self.step.accumulation, self.program.updates.get(state)
        added = None if window is None else window.updates.get(state)
        if added is None or cleared is None:
            return False
        return replaced(added, ACCUMULATE, ACCUMULATE_ROWS) is state and replaced(cleared, RESET) is added

    def _stands_for(self, before: Variable, state: Variable, new: Variable) -> bool:
        """Whether ``before`` holds what ``state``, which micro-batches write, was when their window began."""
        window = self.step.accumulation
        inside = {} if window is None else window.updates
        return state in inside and before not in inside and self.program.updates.get(before) is new

    def _window(self) -> None:
        """What micro-batches write before their window ends must be taken back if it ends badly."""
        window = self.step.accumulation
        for state, new in {} if window is None else window.updates.items():
            if self._sum_of_window(state):
                if state.dtype in HALF:
                    self._add(3, f"{_said(new.producer)} adds up gradients in {state.dtype}, in '{state.name}'")
                continue
            kept = self.program.updates.get(state)
            before = None if kept is None else kept_on_bad_step(kept)
            if state is not self.step.rng_step and (before is None or before is state):
                self._add(
                    2,
                    f"state '{state.name}' takes '{new.name}' from {_said(new.producer)} in every "
                    "micro-batch, and a bad window does not take it back",
                )


def _joined(found_inf: Variable, checked: Collection[Variable]) -> tuple[set[Variable | None], list[Variable]]:
    """Each found_inf of ``checked`` that ``found_inf`` is true for, and the other variables that it is true for."""
    found: set[Variable | None] = set()
    others: list[Variable] = []
    stack, seen = [found_inf], {found_inf.key}
    while stack:
        variable = stack.pop()
        op = variable.producer
        if variable in checked:
            found.add(variable)
        elif op is not None and not op.domain and (op.type == "Or" or traits_of(op.type).view):
            sources = [v for v in (op.inputs if op.type == "Or" else op.inputs[:1]) if v is not None]
            stack += [v for v in sources if v.key not in seen]
            seen.update(v.key for v in sources)
        else:
            others.append(variable)
    return found, others


def _multiplied(loss: Variable, scale: Variable) -> bool:
    """Whether ``scale`` is a factor of ``loss``."""
    stack, seen = [loss], {loss.key}
    while stack:
        op = stack.pop().producer
        if op is None or op.domain or not (op.type in _LINEAR or traits_of(op.type).view):
            continue
        for v in op.inputs:
            if v is scale:
                return op.type == "Mul"
            if v is not None and v.key not in seen:
                seen.add(v.key)
                stack.append(v)
    return False


def _name(variable: Variable | None) -> str:
    return "nothing" if variable is None else variable.name


class CheckStep(Pass):
    """The training step is proved to keep its protocol: one verdict, gradients unscaled once, state gated."""

    name = "check-step"
    needs = (Property.UPDATES,)
    reads = True

    def run(self, graph: Graph, context: Context) -> bool:
        check_step(graph)
        return False
