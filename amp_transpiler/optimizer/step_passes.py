"""The passes of a training step: loss times scale, gradients unscaled and checked, state gated, parameters updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.context import operator_role
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import SCALING, Operator, Variable
from amp_transpiler.ops.training.seeds import STEP as RNG_STEP
from amp_transpiler.optimizer.accumulation import Accumulation
from amp_transpiler.optimizer.loss_scaling import check_finite_and_unscale, extend_check
from amp_transpiler.optimizer.pairs import Callback, ParamsGrads, called, in_parameter_order, latest_first, made_at
from amp_transpiler.optimizer.rank_means import all_reduced
from amp_transpiler.optimizer.scale_state import ScaleState
from amp_transpiler.optimizer.scaler import LossScaler
from amp_transpiler.optimizer.state import gated_value, startup_of
from amp_transpiler.optimizer.step_pieces import made_of, shares, wide_gradient, wide_loss
from amp_transpiler.optimizer.step_state import Stage, Step
from amp_transpiler.optimizer.update_rule import UpdateRule
from amp_transpiler.passes.autodiff.differentiate import GRADIENTS, SCALED_LOSS, Autodiff
from amp_transpiler.passes.canonicalize.standard_form import Canonicalize
from amp_transpiler.passes.numerics.known import KeepLosses
from amp_transpiler.passes.pipeline import Context, Pass, Pipeline, Property, Value
from amp_transpiler.passes.precision.modes import NARROWED, Precision
from amp_transpiler.passes.step_check.check_step import CheckStep
from amp_transpiler.passes.view.given import LOSS, losses_of
from amp_transpiler.program import Program, program_guard, program_of
from amp_transpiler.runtime.collective.current import several


@dataclass(frozen=True)
class Training:
    """What a training step is made of.

    Attributes:
        optimizers: over disjoint parameters.
        scaler: the rule for the loss scale.
        accumulation: the window, where a step is spread over several runs.
        checks: whether the loss is scaled, and gradients are unscaled and checked.
        allreduce_precision: the element type in which gradients travel between ranks.
        post_allreduce_callbacks: code of the user's on the gradients of all ranks, unscaled.
    """

    optimizers: Sequence[UpdateRule]
    scaler: LossScaler
    accumulation: Accumulation | None
    checks: bool
    allreduce_precision: str = "float32"
    post_allreduce_callbacks: Sequence[Callback] | None = None

    @property
    def parts(self) -> list[object]:
        """The objects that building a step changes: optimizers, and their schedules."""
        return [part for optimizer in self.optimizers for part in optimizer.parts]


#: What the step is made of: ``training`` of a decorated optimizer.
TRAINING: Value[Training] = Value(
    "training", Training, "`training` of a decorated optimizer", changed=lambda training: training.parts
)
#: Where new state is initialised; the program's own where it is left out.
STARTUP: Value[Program] = Value("startup_program", Program, changed=lambda startup: (startup,))
#: How far the step is built.
STEP: Value[Step] = Value("step", Step)
#: The sums of a window, and then all that each of its runs updates.
WINDOW: Value[dict[Variable, Variable]] = Value("window", dict)
#: The update operators.
UPDATES: Value[list[Operator]] = Value("updates", list)


class ScaleLoss(Pass):
    """The sum of the losses, in fp32, is multiplied by the loss scale, which is new state."""

    name = "scale-loss"
    needs = (LOSS, TRAINING, NARROWED)
    takes = (STARTUP, STEP)
    guarantees = (STEP, SCALED_LOSS)
    initialises = True

    def run(self, graph: Graph, context: Context) -> None:
        losses, training, step = losses_of(graph, context), context[TRAINING], context.get(STEP)
        program = program_of(losses[0])
        startup = startup_of(program, context.get(STARTUP))
        scale = ScaleState.create(program, startup, training.scaler) if step is None else step.scale
        with program_guard(program, startup), operator_role(SCALING):
            wide = tuple(wide_loss(loss) for loss in losses)
            scaled = _times_scale(f"{losses[0].name}@SCALED", wide, scale.scale, training)
        new = Step(program, startup, scale, context[NARROWED], wide, scaled) if step is None else step
        context[STEP] = new if step is None else step.scaled(wide, scaled)
        context[SCALED_LOSS] = scaled


class Accumulate(Pass):
    """Gradients are added up over the runs of an accumulation window."""

    name = "accumulate"
    needs = (TRAINING, STEP, GRADIENTS)
    guarantees = (WINDOW,)
    initialises = True

    def run(self, graph: Graph, context: Context) -> None:
        step, accumulation = context[STEP], _accumulation(context)
        with program_guard(step.program, step.startup):
            pairs = latest_first(context[GRADIENTS])
            context[GRADIENTS], context[WINDOW] = accumulation.add_up(step.program, step.startup, pairs)


class Unscale(Pass):
    """Gradients are divided by the loss scale in fp32, and one verdict says whether all are finite."""

    name = "unscale"
    needs = (STEP, GRADIENTS, TRAINING)

    def run(self, graph: Graph, context: Context) -> None:
        step, pairs = context[STEP], latest_first(context[GRADIENTS])
        with program_guard(step.program, step.startup):
            context[STEP], context[GRADIENTS] = _all_unscaled(step, pairs, context[TRAINING].allreduce_precision)


class AllReduce(Pass):
    """Gradients that nobody unscales become their means over the ranks, where there are several."""

    name = "all-reduce"
    needs = (STEP, GRADIENTS, TRAINING)

    def run(self, graph: Graph, context: Context) -> None:
        step, pairs = context[STEP], latest_first(context[GRADIENTS])
        if several() is not None:
            with program_guard(step.program, step.startup):
                grads = all_reduced([grad for _, grad in pairs], context[TRAINING].allreduce_precision)
            context[GRADIENTS] = [(parameter, grad) for (parameter, _), grad in zip(pairs, grads, strict=True)]


class PostAllReduce(Pass):
    """Callbacks of the user's work on the gradients of all ranks, which are unscaled, before they are clipped."""

    name = "post-all-reduce"
    needs = (STEP, GRADIENTS, TRAINING)

    def run(self, graph: Graph, context: Context) -> None:
        step, pairs = context[STEP], in_parameter_order(context[GRADIENTS])
        with program_guard(step.program, step.startup):
            callbacks = context[TRAINING].post_allreduce_callbacks
            context[GRADIENTS] = called(callbacks, pairs, "post_allreduce_callbacks")


class GateState(Pass):
    """State that the forward pass writes keeps its value where the verdict is bad."""

    name = "gate-state"
    needs = (TRAINING, STEP)
    takes = (WINDOW,)
    initialises = True

    def run(self, graph: Graph, context: Context) -> None:
        step, accumulation, sums = context[STEP], context[TRAINING].accumulation, context.get(WINDOW, {})
        forward = {state: new for state, new in graph.updates.items() if state not in sums}
        with program_guard(step.program, step.startup), operator_role(SCALING):
            for state, new in forward.items():
                if accumulation is not None:
                    accumulation.gate(step.program, step.startup, step.found_inf, state)
                elif step.found_inf is not None and state.name != RNG_STEP:
                    graph.set_update(state, gated_value(state, state, new, step.found_inf))
        context[WINDOW] = {**sums, **forward}


class UpdateScale(Pass):
    """The loss scale and its counts follow the verdict."""

    name = "update-scale"
    needs = (TRAINING, STEP)

    def run(self, graph: Graph, context: Context) -> None:
        step = context[STEP]
        if step.found_inf is not None:
            with program_guard(step.program, step.startup):
                step.scale.append(context[TRAINING].scaler, step.found_inf, step.losses)


class Update(Pass):
    """Gradients are clipped and parameters, masters and moments updated, unless the verdict is bad."""

    name = "update"
    needs = (TRAINING, STEP, GRADIENTS)
    guarantees = (Property.UPDATES, UPDATES)
    initialises = True

    def run(self, graph: Graph, context: Context) -> None:
        step, pairs = context[STEP], latest_first(context[GRADIENTS])
        with program_guard(step.program, step.startup):
            context[UPDATES] = [
                update
                for optimizer, share in shares(context[TRAINING].optimizers, step.program, pairs)
                for update in optimizer.append_updates(share, step.startup, step.found_inf)
            ]
        context[STEP] = step.applied()


class CloseWindow(Pass):
    """The program says that its step is spread over a window of runs, and what each of them updates."""

    name = "close-window"
    needs = (TRAINING, STEP, WINDOW)
    initialises = True

    def run(self, graph: Graph, context: Context) -> None:
        step = context[STEP]
        _accumulation(context).close(step.program, step.startup, context[WINDOW])


def precision_passes(precision: Precision, *, trained: bool = True) -> tuple[Pass, ...]:
    """What brings a program into a precision, one for evaluation where it is not ``trained``."""
    kept = (KeepLosses(),) if trained and precision.numeric_guards else ()
    return (Canonicalize(), *kept, precision)


def update_passes(*, window: bool, checks: bool, again: bool = False, callbacks: bool = False) -> tuple[Pass, ...]:
    """What makes a training step of gradients: with an accumulation window, a check of gradients, callbacks.

    ``again``: the step is there, and takes further parameters, under the verdict and the scale that it has.
    """
    asked: list[tuple[Pass, bool]] = [
        (Accumulate(), window),
        (Unscale(), checks),
        (AllReduce(), not checks),
        (PostAllReduce(), callbacks),
        (GateState(), not again),
        (UpdateScale(), checks and not again),
        (Update(), True),
        (CloseWindow(), window),
        (CheckStep(), checks),
    ]
    return tuple(each for each, wanted in asked if wanted)


def training(precision: Precision, *, window: bool = False, checks: bool = True) -> Pipeline:
    """All that ``minimize`` of a decorated optimizer runs."""
    gradients = (*precision_passes(precision), ScaleLoss(), Autodiff())
    return Pipeline((*gradients, *update_passes(window=window, checks=checks)))


def _accumulation(context: Context) -> Accumulation:
    found = context[TRAINING].accumulation
    if found is None:
        raise ArgumentError("this training takes no window of runs; decorate with accumulate_steps, or leave it out")
    return found


def _times_scale(name: str, losses: Sequence[Variable], scale: Variable, training: Training) -> Variable:
    """The sum of fp32 losses times the scale; its share of a window where gradients accumulate."""
    program, total = losses[0].program, losses[0]
    if len(losses) > 1:
        total = program.fresh_variable("total_loss", "float32", losses[0].shape)
        program.add_operator("Sum", losses, [total])
    if training.accumulation is not None:
        share = program.fresh_variable(f"{total.name}@SHARE", "float32", total.shape)
        count = program.add_constant("accumulate_steps", np.array(training.accumulation.steps, np.float32))
        program.add_operator("Div", [total, count], [share])
        total = share
    if not training.checks:
        return total
    scaled = program.fresh_variable(name, "float32", total.shape or (1,))
    program.add_operator("Mul", [total, scale], [scaled])
    return scaled


def _all_unscaled(step: Step, params_grads: ParamsGrads, precision: str) -> tuple[Step, ParamsGrads]:
    """The step with a finite check, and the pairs with unscaled gradients; those of code of the user's stay."""
    made = made_of(step.unscaled.values())
    others = step.stage is Stage.APPLIED and not any(grad in made for _, grad in params_grads)
    if step.stage is Stage.SCALED or others:
        step = unscaled(step, [grad for _, grad in params_grads], precision, checks=True)
        return step, [(parameter, step.unscaled[grad]) for parameter, grad in params_grads]
    for parameter, grad in params_grads:
        if grad not in made:
            raise ArgumentError(
                f"apply_gradients: gradient '{grad.name}' of '{parameter.name}' is still scaled, but others went "
                "through get_unscaled_gradients; pass it through that as well"
            )
    return step, params_grads


def unscaled(step: Step, grads: list[Variable], precision: str, *, checks: bool) -> Step:
    """The step once a finite check is appended, or the one that there is reads these gradients too.

    Of several ranks it reads the means over them, which travel in the element type ``precision``. Without ``checks``
    the loss was not multiplied by the scale, and the gradients are brought to fp32 alone.
    """
    grads = sorted(grads, key=made_at, reverse=True)
    read = all_reduced(grads, precision) if several() is not None else grads
    if not checks:
        return step.with_unscaled(grads, [wide_gradient(grad) for grad in read], None)
    if step.found_inf is None:
        found, found_inf = check_finite_and_unscale(read, step.scale.scale)
        return step.with_unscaled(grads, found, found_inf)
    assert step.found_inf.producer is not None
    return step.with_unscaled(grads, extend_check(step.found_inf.producer, read), step.found_inf)
