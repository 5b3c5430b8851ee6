"""An optimizer whose ``minimize`` trains in mixed or pure 16 bit, with loss scaling: what ``decorate`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, MissingNameError, OrderError
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.optimizer.accumulation import Accumulation
from amp_transpiler.optimizer.groups import thawed
from amp_transpiler.optimizer.pairs import (
    Callback,
    GivenGrads,
    Names,
    ParamsGrads,
    called,
    checked_pairs,
    without_none,
)
from amp_transpiler.optimizer.rank_agreement import appended
from amp_transpiler.optimizer.scaler import LossScale, LossScaler
from amp_transpiler.optimizer.state import appending
from amp_transpiler.optimizer.step_passes import (
    STARTUP,
    STEP,
    TRAINING,
    UPDATES,
    ScaleLoss,
    Training,
    precision_passes,
    unscaled,
    update_passes,
)
from amp_transpiler.optimizer.step_pieces import Losses, check_none_idle, checked_losses, listed
from amp_transpiler.optimizer.step_state import Ready, Stage, Step
from amp_transpiler.optimizer.update_rule import UpdateRule
from amp_transpiler.passes.autodiff.backward import Wanted, check_loss, wanted_gradients
from amp_transpiler.passes.autodiff.differentiate import GRADIENTS, SCALED_LOSS, WANTED, Autodiff
from amp_transpiler.passes.canonicalize.standard_form import Canonicalize
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.passes.pipeline import Context, Pass, Value, apply
from amp_transpiler.passes.precision.modes import LIKE, NARROWED, Precision
from amp_transpiler.passes.view.given import LISTS, LOSS
from amp_transpiler.program import Program, program_guard, program_of
from amp_transpiler.runtime.cast_parameters import cast_parameters_to_fp16
from amp_transpiler.runtime.collective.current import own_place
from amp_transpiler.runtime.scope import Scope


class OptimizerWithMixedPrecision:
    """What ``amp.decorate`` returns. Attributes of the (first) wrapped optimizer are read through it, and written.

    A step is: forward, loss × scale, backward, cast to fp32 and unscale, finite check, update of the
    scale, clipping, decay, update, rounding of master weights. One found_inf over every gradient gates
    every state: a bad step changes the scale, its counters and the randomness counter, nothing else.

    Three ways to build it: ``minimize``; ``backward``, code of your own on the pairs, ``apply_gradients``; or
    ``get_scaled_loss(loss)``, ``append_backward`` on that, ``get_unscaled_gradients``, code of your own on fp32
    gradients, ``apply_gradients``.
    """

    def __init__(
        self,
        optimizers: Sequence[UpdateRule],
        amp_lists: AutoMixedPrecisionLists,
        scaler: LossScaler,
        use_pure_fp16: bool,
        use_fp16_guard: bool,
        accumulation: Accumulation | None,
        numeric_guards: bool | None = None,
        allreduce_precision: str = "float32",
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._accumulation = accumulation
        self._amp_lists = amp_lists
        self._scaler = scaler
        self._use_pure_fp16 = use_pure_fp16
        self._use_fp16_guard = use_fp16_guard
        self._numeric_guards, self._allreduce_precision = numeric_guards, allreduce_precision
        self._checks = scaler.dynamic or scaler.init_scale != 1 or scaler.alarm or amp_lists.dtype == "bfloat16"
        self._step: Ready | Step = Ready()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.optimizers[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "optimizers" or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif not hasattr(self._only(name), name):
            raise MissingNameError(f"a decorated {type(self.optimizers[0]).__name__} has no attribute '{name}'")
        else:
            setattr(self.optimizers[0], name, value)

    def _only(self, name: str) -> UpdateRule:
        """The optimizer that it holds, of which ``name`` is to be set; ArgumentError where it holds several."""
        if len(self.optimizers) > 1:
            raise ArgumentError(
                f"{name} of a decorated optimizer: it holds {len(self.optimizers)}; set it on one of "
                f"them, as in decorated.optimizers[0].{name}"
            )
        return self.optimizers[0]

    def set_lr(self, value: float, scope: Scope | None = None) -> None:
        """``set_lr`` of the optimizer that it holds, errors as there; ArgumentError where it holds several."""
        self._only("set_lr").set_lr(value, scope)

    @property
    def training(self) -> Training:
        """What the training step is made of, as its passes take it."""
        precision = self._allreduce_precision
        return Training(self.optimizers, self._scaler, self._accumulation, self._checks, precision)

    # -- minimize and its parts ----------------------------------------------------------------------
    @paddle_arguments("optimizer.minimize")
    def minimize(
        self,
        loss: Losses,
        startup_program: Program | None = None,
        parameter_list: Sequence[Variable | str] | None = None,
        no_grad_set: Names | None = None,
        *,
        pre_allreduce_callbacks: Sequence[Callback] | None = None,
        post_allreduce_callbacks: Sequence[Callback] | None = None,
    ) -> tuple[list[Operator], ParamsGrads]:
        """Rewrite the program of ``loss`` (a float scalar) and append the whole training step.

        ``loss`` may be a list of losses, whose gradients add up. Callbacks get [(parameter, gradient)] and return such
        a list, one after the other: ``pre_allreduce_callbacks`` of the scaled gradients, which are this rank's own,
        ``post_allreduce_callbacks`` of the unscaled ones, means over the ranks, before they are clipped. Returns the
        update operators and [(parameter, gradient)]; the gradients are those of the scaled loss, in the element type of
        their parameter. Run the startup program next, then ``amp_init``. GradientError: see ``append_backward``.
        OrderError: minimize was called before. Where anything raises, the programs and this optimizer are as before.
        """
        losses = checked_losses(loss)
        with self._appending(program_of(losses[0]), startup_program) as startup:
            params_grads = self._gradients(losses, startup, parameter_list, no_grad_set)
            with program_guard(program_of(losses[0]), startup):
                params_grads = called(pre_allreduce_callbacks, params_grads, "pre_allreduce_callbacks")
            check_none_idle(self.optimizers, program_of(losses[0]), params_grads)
            return self._apply(params_grads, post_allreduce_callbacks), params_grads

    @paddle_arguments("optimizer.minimize", "optimizer.backward")
    def backward(
        self,
        loss: Losses,
        startup_program: Program | None = None,
        parameter_list: Sequence[Variable | str] | None = None,
        no_grad_set: Names | None = None,
    ) -> ParamsGrads:
        """Rewrite the program, scale the loss and append its gradients; returns [(parameter, scaled gradient)].

        Of a list of losses, all of one program, the gradients add up. Further calls, each for another loss of the
        program and with a ``parameter_list`` of its own, may follow before ``apply_gradients``. A warning names the
        trainable parameters that the losses do not depend on.
        """
        losses = checked_losses(loss)
        with self._appending(program_of(losses[0]), startup_program) as startup:
            return self._gradients(losses, startup, parameter_list, no_grad_set)

    def get_scaled_loss(self, loss: Losses | None = None, startup_program: Program | None = None) -> Variable:
        """The loss times the scale, fp32: what ``append_backward`` is given in a loop of your own.

        With ``loss`` the program is rewritten in this optimizer's precision and the product appended; without it,
        after ``minimize``, the variable that there is. OrderError: without ``loss`` before ``minimize``.
        """
        if loss is None:
            return self._step.built("get_scaled_loss").scaled_loss
        losses = checked_losses(loss)
        with self._appending(program_of(losses[0]), startup_program) as startup:
            return self._scaled(losses, startup)[SCALED_LOSS]

    def get_unscaled_gradients(self, grads: Sequence[Variable | None]) -> list[Variable | None]:
        """Gradients of the scaled loss divided by the scale, in fp32 (fp64 for fp64), None where None is given.

        All that go through here, in one call or in several, share one found_inf. Code of your own may then work on them
        (clip, mask, add noise) and hand the results to ``apply_gradients``. Where gradients are not checked, see
        :meth:`get_found_inf`, neither is there a division. OrderError: before the loss was scaled,
        after ``apply_gradients``, or for a gradient that was unscaled before.
        """
        step = self._step.built("get_unscaled_gradients")
        given = [grad for grad in grads if grad is not None]
        for grad in given:
            if not isinstance(grad, Variable):
                raise ArgumentTypeError(f"get_unscaled_gradients takes gradient variables or None, not {grad!r}")
        step.check_unscaling(given)
        if self._accumulation is not None:
            raise OrderError(
                "get_unscaled_gradients: with accumulate_steps the sums over a window are unscaled, by "
                "apply_gradients; hand it the scaled gradients, and clip with grad_clip"
            )
        if not given:
            raise ArgumentError(
                "get_unscaled_gradients: every gradient is None; the loss depends on none of these parameters"
            )
        with self._appending(step.program, step.startup):
            self._step = step = unscaled(step, given, self._allreduce_precision, checks=self._checks)
        return [None if grad is None else step.unscaled[grad] for grad in grads]

    def apply_gradients(self, params_grads: GivenGrads) -> list[Operator]:
        """Append unscale, finite check, scale update and the update of [(parameter, scaled gradient)].

        Gradients that ``get_unscaled_gradients`` gave, or that were made of them, are not unscaled again. A parameter
        whose gradient is None is left out, with a warning. Returns the update operators.

        Further calls may follow, for other parameters (tables in one, the rest in the other): one verdict is on the
        gradients of all, a bad step changes none of their parameters, and the scale is updated once.

        OrderError: before ``backward`` or ``get_scaled_loss``, a second time for a parameter or with
        ``accumulate_steps``. ArgumentError: some gradients unscaled and some not.
        """
        step = self._step.built("apply_gradients")
        with self._appending(step.program, step.startup):
            return self._apply(without_none(params_grads))

    def apply_optimize(
        self, loss: Variable, startup_program: Program | None, params_grads: ParamsGrads
    ) -> list[Operator]:
        """``apply_gradients``; the arguments are those of the plain optimizers."""
        return self.apply_gradients(params_grads)

    # -- after minimize ------------------------------------------------------------------------------
    @paddle_arguments("amp_init")
    def amp_init(
        self,
        place: Place | str,
        scope: Scope | None = None,
        test_program: Program | None = None,
        use_fp16_test: bool = False,
    ) -> None:
        """Prepare stored parameters, and a test program, for 16 bit. Call it after the startup program ran.

        In pure mode the parameters that 16-bit operators read are rounded in ``scope`` (default: the
        global one), and ``test_program`` is rewritten like the training program, whose parameters it reads as they are
        stored, in whatever way it reads them: a decoding step of its own may be one. Otherwise parameters
        stay fp32, and ``test_program`` is rewritten only with ``use_fp16_test``.

        OrderError: before ``minimize``. ScopeError: the startup program never ran. PrecisionError: a parameter does
        not fit the type. Where anything raises, the scope and ``test_program`` are as before.
        """
        step = self._step.built("amp_init")
        place = own_place(place, "amp_init: place")
        if not isinstance(test_program, (Program, type(None))):
            raise ArgumentTypeError(f"amp_init: test_program is {test_program!r}; expected a Program")
        if test_program is step.program:
            raise ArgumentError(
                f"amp_init: test_program is the training program '{test_program.name}' itself; give it a "
                "program for evaluation, such as program.clone(for_test=True)"
            )
        with unchanged_on_error(test_program):
            if test_program is not None and (self._use_pure_fp16 or use_fp16_test):
                context = Context({LISTS: self._amp_lists, LIKE: step.program})
                apply(precision_passes(self._precision(step.program), trained=False), test_program, context)
            if self._use_pure_fp16:
                cast_parameters_to_fp16(place, step.program, scope, step.narrowed)

    def get_loss_scaling(self) -> Variable:
        """The loss scale, fp32 of shape [1]. OrderError before ``minimize``."""
        return self._step.built("get_loss_scaling").scale.scale

    @property
    def loss_scaler(self) -> LossScaler:
        """The rule by which the loss scale changes."""
        return self._scaler

    def get_loss_scale_state(self, scope: Scope | None = None) -> LossScale:
        """The loss scale and its counts in a scope. OrderError before ``minimize``, ScopeError before the startup."""
        return self._step.built("get_loss_scale_state").scale.read(scope)

    def set_loss_scale_state(self, state: LossScale, scope: Scope | None = None) -> None:
        """Let the next step start from this loss scale and these counts.

        ArgumentError: the state of another scaler. OrderError: another scale inside of a window of accumulation.
        """
        self._step.built("set_loss_scale_state").scale.write(state, scope)

    def check_alarm(self, scope: Scope | None = None) -> None:
        """Raise LossScaleError where the steps up to now were bad, as the alarm of the scaler says.

        It reads a few numbers from the scope, and may be called after any step, or after every hundredth. OrderError
        before ``minimize``, or where the scaler has no alarm.
        """
        state = self._step.built("check_alarm").scale
        if not self._scaler.alarm:
            raise OrderError(
                "check_alarm: this loss scaler has no alarm; decorate with a scaler that has one, such as "
                "scaler=amp.LossScaler.paddle(max_bad_in_a_row=50, error_at_floor=True)"
            )
        self._scaler.check(state.read(scope))

    def get_found_inf(self) -> Variable | None:
        """Whether a gradient of a step is not finite, bool of shape [1], to be fetched.

        None where gradients are not checked: in float16 with a static scale of 1.
        """
        return self._step.built("get_found_inf").found_inf

    # -- the parts of a step, inside one transaction -------------------------------------------------
    def _appending(self, program: Program, startup_program: Program | None) -> AbstractContextManager[Program]:
        """The one transaction of a call; see ``state.appending``."""
        return appending(program, startup_program, self, *self.training.parts)

    def _gradients(
        self,
        losses: Sequence[Variable],
        startup: Program,
        parameter_list: Sequence[Variable | str] | None,
        no_grad_set: Names | None,
    ) -> ParamsGrads:
        """The gradients of the scaled sum of the losses, which depend on parameters."""
        program = program_of(losses[0])
        items = listed(self.optimizers, program) if parameter_list is None else parameter_list
        for each in losses:
            check_loss(each)
        wanted = wanted_gradients(program, thawed(items, program) if isinstance(items, list) else items, no_grad_set)

        def append(some: Wanted) -> ParamsGrads:
            return self._scaled(losses, startup, [Autodiff()], some)[GRADIENTS]

        return appended(losses, wanted, append, lambda: self._scaled(losses, startup), no_grad_set)

    def _scaled(
        self, losses: Sequence[Variable], startup: Program, then: Sequence[Pass] = (), wanted: Wanted | None = None
    ) -> Context:
        """What comes of the passes that scale the sum of the losses, in a program that is brought into this optimizer's
        precision once, and of those that follow."""
        program = program_of(losses[0])
        step = self._step.of(program)
        values: dict[Value[Any], Any] = {LOSS: losses, TRAINING: self.training, STARTUP: startup, WANTED: wanted}
        first: tuple[Pass, ...] = (Canonicalize(),)
        if step is None:
            first, values = precision_passes(self._precision(program)), {**values, LISTS: self._amp_lists}
        else:
            values = {**values, STEP: step, NARROWED: step.narrowed}
        context = Context(values)
        apply((*first, ScaleLoss(), *then), program, context)
        self._step = context[STEP]
        return context

    def _precision(self, trained: Program) -> Precision:
        """The precision of a training program."""
        pure, guards = self._use_pure_fp16, self._numeric_guards
        return Precision(
            "pure" if pure else "mixed",
            self._amp_lists.dtype,
            guard=pure and self._use_fp16_guard,
            numeric_guards=trained.numeric_guards if guards is None else guards,
        )

    def _apply(self, params_grads: ParamsGrads, callbacks: Sequence[Callback] | None = None) -> list[Operator]:
        """Finite check and scale update, and an update that a bad step skips; without a check, the update alone."""
        step = self._step.built("apply_gradients")
        program = step.program
        if checked_pairs(params_grads) is not program:
            raise ArgumentError(f"apply_gradients: these gradients are not of program '{program.name}'")
        step.check_applying(parameter for parameter, _ in params_grads)
        training = replace(self.training, post_allreduce_callbacks=callbacks)
        context = Context({TRAINING: training, STEP: step, GRADIENTS: params_grads})
        window, again = self._accumulation is not None, step.stage is Stage.APPLIED
        passes = update_passes(window=window, checks=self._checks, again=again, callbacks=bool(callbacks))
        apply(passes, program, context)
        self._step = context[STEP]
        return context[UPDATES]
