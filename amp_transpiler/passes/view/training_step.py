"""The training step of a program, read in one place: losses, finite check, loss scale, updates and what they keep.

Which input and output of an operator is what stands in its definition (``ir.opdef.Slots``). Nothing is judged here: of
a broken step there is what there is, and None for the rest; ``passes.step_check`` says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.accumulation_window import AccumulationWindow
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import SCALING, Operator, Variable
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ops.training.average import AVERAGE
from amp_transpiler.ops.training.clip import CLIPS
from amp_transpiler.ops.training.scaling import CHECK, COUNT_BAD, GATE, UPDATE_SCALE
from amp_transpiler.ops.training.schedule import LEARNING_RATE
from amp_transpiler.ops.training.seeds import SEED, STEP


@dataclass(frozen=True)
class StepOperator:
    """An operator of the training step, read by the names of its slots."""

    operator: Operator
    slots: Slots

    def read(self, name: str) -> Variable | None:
        """The input of this name."""
        return self.operator.input(self.slots.inputs.index(name))

    def made(self, name: str) -> Variable | None:
        """The output of this name."""
        return self.operator.output(self.slots.outputs.index(name))

    @property
    def found_inf(self) -> Variable | None:
        """What tells a bad step."""
        return self.read("found_inf")

    @property
    def states(self) -> list[tuple[Variable | None, Variable | None]]:
        """(state, its new value), in the order of the outputs."""
        op = self.operator
        return [(op.input(old), op.output(new)) for new, old in self.slots.replacements(len(op.inputs))]


@dataclass(frozen=True)
class FiniteCheck(StepOperator):
    """``CheckFiniteAndUnscale``: divides gradients by the scale, and makes ``found_inf`` over all of them."""

    @property
    def found_inf(self) -> Variable | None:
        """Whether a gradient is not finite, bool [1]."""
        return self.made("found_inf")

    @property
    def scale(self) -> Variable | None:
        """What gradients are divided by."""
        return self.read("scale")

    @property
    def gradients(self) -> list[tuple[Variable | None, Variable | None]]:
        """(scaled gradient, unscaled one)."""
        op = self.operator
        return [(op.input(slot), op.output(slot)) for slot in range(1, max(len(op.inputs), len(op.outputs)))]


@dataclass(frozen=True)
class ScaleUpdate(StepOperator):
    """``UpdateLossScaling``: moves the loss scale and its counters."""

    @property
    def scale(self) -> Variable | None:
        """The loss scale."""
        return self.read("scale")

    @property
    def good(self) -> Variable | None:
        """The counter of good steps."""
        return self.read("good")

    @property
    def bad(self) -> Variable | None:
        """The counter of bad steps."""
        return self.read("bad")


@dataclass(frozen=True)
class ParameterUpdate:
    """One parameter of an update. ``accumulators`` are its moments, velocity and so on, by the names of their slots."""

    operator: Operator
    parameter: Variable | None
    gradient: Variable | None
    master: Variable | None
    accumulators: Mapping[str, Variable | None]


@dataclass(frozen=True)
class Update(StepOperator):
    """An operator that updates a group of parameters."""

    @property
    def kind(self) -> str:
        """The type of the operator: "Adam"."""
        return self.operator.type

    @property
    def learning_rate(self) -> Variable | None:
        """The learning rate of the group."""
        return self.read("learning_rate")

    @property
    def scalars(self) -> dict[str, Variable | None]:
        """State that the whole group shares, by the names of its slots ("beta1_pow_acc")."""
        return {name: self.read(name) for name in self.slots.outputs}

    @property
    def rows(self) -> list[ParameterUpdate]:
        """The parameters of the group."""
        kinds = self.slots.accumulators
        return [
            ParameterUpdate(
                self.operator,
                row.get("parameter"),
                row.get("gradient"),
                row.get("master"),
                {kind: row.get(kind) for kind in kinds},
            )
            for row in self.slots.rows(self.operator.inputs)
        ]


@dataclass(frozen=True)
class TrainingStep:
    """The parts of one program's step, in the order of the program; what is absent is None or empty.

    ``scaled_losses`` are what gradients were taken of, ``losses`` what the user built of it. ``clips`` clip gradients;
    ``counters`` count bad steps for an alarm; ``schedules`` make learning rates; ``averages`` follow weights. ``gated``
    are all operators that keep state on a bad step. ``window``: the step is spread over several runs. ``rng_seed`` and
    ``rng_step`` are the seed and the counter of randomness.
    """

    program: Graph
    scaled_losses: tuple[Variable, ...] = ()
    losses: tuple[Variable, ...] = ()
    checks: tuple[FiniteCheck, ...] = ()
    scale_updates: tuple[ScaleUpdate, ...] = ()
    counters: tuple[StepOperator, ...] = ()
    clips: tuple[StepOperator, ...] = ()
    schedules: tuple[StepOperator, ...] = ()
    updates: tuple[Update, ...] = ()
    averages: tuple[StepOperator, ...] = ()
    gated: tuple[StepOperator, ...] = ()
    accumulation: AccumulationWindow | None = None
    rng_seed: Variable | None = None
    rng_step: Variable | None = None

    @property
    def rows(self) -> list[ParameterUpdate]:
        """What every update does, parameter by parameter."""
        return [row for update in self.updates for row in update.rows]

    @property
    def gradients(self) -> list[tuple[Variable, Variable]]:
        """(parameter, its gradient): unscaled where there is a finite check, and not clipped.

        Without updates, those of a backward pass alone.
        """
        found = [
            (row.parameter, _unclipped(row.gradient))
            for row in self.rows
            if row.parameter is not None and row.gradient is not None
        ]
        variables = self.program.variables if not found else ()
        return found or [(v.grad_of, v) for v in variables if v.grad_of is not None and v.grad_of.is_parameter]

    @property
    def learning_rates(self) -> list[Variable]:
        """The learning rates of the updates, each once."""
        return list(dict.fromkeys(rate for update in self.updates if (rate := update.learning_rate) is not None))

    @property
    def found_inf(self) -> Variable | None:
        """The variable that gates the updates; without updates, that of the first check."""
        parts = self.updates or self.checks
        return parts[0].found_inf if parts else None

    @property
    def scale(self) -> Variable | None:
        """The loss scale that gradients are divided by."""
        return next((scale for check in self.checks if (scale := check.scale) is not None), None)

    @property
    def tested(self) -> list[Variable]:
        """What tells whether the step is bad: all that the checks make, or gradients, and losses; else outputs."""
        checked = [v for check in self.checks for v in check.operator.outputs if v is not None]
        gradients = [] if checked else [gradient for _, gradient in self.gradients]
        return list(dict.fromkeys([*checked, *gradients, *self.losses])) or list(self.program.outputs)

    # -- a window of accumulation ----------------------------------------------------------------------
    @property
    def sums(self) -> dict[Variable, Variable]:
        """The sums of gradients over micro-batches, each with its parameter."""
        spread = {} if self.accumulation is None else self.accumulation.updates
        return {state: new.grad_of for state, new in spread.items() if new.grad_of is not None}

    @property
    def before_window(self) -> dict[Variable, Variable]:
        """State that holds what another, which micro-batches write, was before their window; each with that one."""
        written = () if self.accumulation is None else self.accumulation.updates
        news = ((state, self.program.updates.get(state)) for state in written)
        olds = ((state, replaced(new, GATE)) for state, new in news if new is not None)
        return {old: state for state, old in olds if old is not None and old is not state}

    # -- averages --------------------------------------------------------------------------------------
    def averaged(self, average: StepOperator) -> list[tuple[Variable, Variable]]:
        """(parameter, its moving average) of one of ``averages``; what follows no updated parameter is left out."""
        owners = {state: row.parameter for row in self.rows for state in (row.parameter, row.master)}
        found = []
        for row in average.slots.rows(average.operator.inputs):
            weight, value = row.get("weight"), row.get("average")
            parameter = None if weight is None else owners.get(replaced(weight))
            if parameter is not None and value is not None:
                found.append((parameter, value))
        return found


def training_step(program: Graph) -> TrainingStep:
    """The parts of ``program``'s step. ArgumentTypeError: no program."""
    if not isinstance(program, Graph):
        raise ArgumentTypeError(f"expected the training program, a Program, got {program!r}")
    found = [StepOperator(op, slots) for op in program.operators if (slots := slots_of(op.type, op.domain)) is not None]

    def parts(*types: str) -> tuple[StepOperator, ...]:
        return tuple(part for part in found if part.operator.type in types)

    scaled = dict.fromkeys(v.grad_of for v in program.variables if v.grad_of is not None and v.is_constant)
    return TrainingStep(
        program,
        scaled_losses=tuple(scaled),
        losses=tuple(dict.fromkeys(loss for each in scaled for loss in _unscaled(each))),
        checks=tuple(FiniteCheck(part.operator, part.slots) for part in parts(CHECK)),
        scale_updates=tuple(ScaleUpdate(part.operator, part.slots) for part in parts(UPDATE_SCALE)),
        counters=parts(COUNT_BAD),
        clips=parts(*CLIPS),
        schedules=parts(LEARNING_RATE),
        updates=tuple(Update(part.operator, part.slots) for part in found if part.slots.updates),
        averages=parts(AVERAGE),
        gated=tuple(part for part in found if part.slots.gated),
        accumulation=program.accumulation,
        rng_seed=program.var(SEED) if program.has_var(SEED) else None,
        rng_step=program.var(STEP) if program.has_var(STEP) else None,
    )


def replaced(new: Variable, *types: str) -> Variable | None:
    """The variable that an operator of the step (of these types) made ``new`` the new value of; None otherwise."""
    op = new.producer
    slots = None if op is None or (types and op.type not in types) else slots_of(op.type, op.domain)
    place = None if slots is None else slots.replaced(new.producer_slot)
    return None if op is None or place is None else op.input(place)


def kept_on_bad_step(new: Variable) -> Variable | None:
    """The state whose value ``new`` is on a bad step; None where its producer gates nothing."""
    op = new.producer
    slots = None if op is None else slots_of(op.type, op.domain)
    return replaced(new) if slots is not None and slots.gated else None


def ungated(new: Variable) -> Variable | None:
    """What the gate of a state lets through as ``new`` on a good step; ``new`` itself where no gate made it."""
    op = new.producer
    slots = None if op is None or op.type != GATE else slots_of(GATE, op.domain)
    return new if op is None or slots is None else op.input(slots.inputs.index("new"))


def _unscaled(loss: Variable) -> list[Variable]:
    """The losses that the user built, from the one that gradients were taken of: widened, added, shared out, scaled."""
    op = loss.producer
    if op is None or op.role != SCALING or op.type not in ("Mul", "Cast", "Div", "Sum"):
        return [loss]
    terms = op.inputs if op.type == "Sum" else op.inputs[:1]
    return [each for term in terms if term is not None for each in _unscaled(term)]


def _unclipped(gradient: Variable) -> Variable:
    while (source := replaced(gradient, *CLIPS)) is not None:
        gradient = source
    return gradient
