"""An optimizer whose ``minimize`` trains in mixed or pure 16 bit, with loss scaling: what ``decorate`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, MissingNameError, OrderError
from amp_transpiler.ir import context
from amp_transpiler.ir.nodes import BACKWARD, SCALING, Operator, Variable
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.optimizer.accumulation import Accumulation
from amp_transpiler.optimizer.base import Optimizer
from amp_transpiler.optimizer.groups import thawed
from amp_transpiler.optimizer.loss_scaling import check_finite_and_unscale, extend_check
from amp_transpiler.optimizer.pairs import (
    GivenGrads,
    Names,
    ParamsGrads,
    checked_pairs,
    latest_first,
    warn_untrained,
    without_none,
)
from amp_transpiler.optimizer.scale_state import ScaleState
from amp_transpiler.optimizer.scaler import LossScale, LossScaler
from amp_transpiler.optimizer.state import appending, gated_value
from amp_transpiler.optimizer.step_pieces import checked_losses, listed, made_of, shares, take_apart, wide_loss
from amp_transpiler.passes.autodiff.backward import append_backward, check_loss, listed_parameters
from amp_transpiler.passes.lowering.place import Place, check_place
from amp_transpiler.passes.numerics.known import keep_losses
from amp_transpiler.passes.precision.pure import cast_model_to_fp16
from amp_transpiler.passes.precision.rewrite import rewrite_program
from amp_transpiler.passes.step_check.check_step import UNGATED, check_step
from amp_transpiler.program import Program, program_guard, program_of
from amp_transpiler.runtime.cast_parameters import cast_parameters_to_fp16
from amp_transpiler.runtime.scope import Scope

Losses = Variable | Sequence[Variable]


class OptimizerWithMixedPrecision:
    """What ``amp.decorate`` returns. Attributes of the (first) wrapped optimizer are read through it, and written.

    A step is: forward, loss × scale, backward, cast to fp32 and unscale, finite check, update of the
    scale, clipping, decay, update, rounding of master weights. One verdict over every gradient gates
    every state: a bad step changes the scale, its counters and the randomness counter, nothing else.

    Three ways to build it: ``minimize``; ``backward``, code of your own on the pairs, ``apply_gradients``; or
    ``get_scaled_loss(loss)``, ``append_backward`` on that, ``get_unscaled_gradients``, code of your own on fp32
    gradients, ``apply_gradients``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        amp_lists: AutoMixedPrecisionLists,
        scaler: LossScaler,
        use_pure_fp16: bool,
        use_fp16_guard: bool,
        accumulation: Accumulation | None,
        numeric_guards: bool | None = None,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._accumulation = accumulation
        self._amp_lists = amp_lists
        self._scaler = scaler
        self._use_pure_fp16 = use_pure_fp16
        self._use_fp16_guard = use_fp16_guard
        self._numeric_guards = numeric_guards
        self._checks = scaler.dynamic or scaler.init_scale != 1 or scaler.alarm or amp_lists.dtype == "bfloat16"
        self._program: Program | None = None
        self._startup: Program | None = None
        self._to_fp16_var_names: set[str] = set()
        self._scale_state: ScaleState | None = None
        self._losses: list[Variable] = []
        self._scaled_loss: Variable | None = None
        #: The one finite check, and what it was given by which call: scaled gradient -> unscaled one.
        self._check: Operator | None = None
        self._unscaled: dict[Variable, Variable] = {}
        self._found_inf: Variable | None = None
        self._applied = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.optimizers[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "optimizers" or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif len(self.optimizers) > 1:
            raise ArgumentError(
                f"{name} of a decorated optimizer: it holds {len(self.optimizers)}; set it on one of "
                f"them, as in decorated.optimizers[0].{name}"
            )
        elif not hasattr(self.optimizers[0], name):
            raise MissingNameError(f"a decorated {type(self.optimizers[0]).__name__} has no attribute '{name}'")
        else:
            setattr(self.optimizers[0], name, value)

    # -- minimize and its parts ----------------------------------------------------------------------
    @paddle_arguments("optimizer.minimize")
    def minimize(
        self,
        loss: Losses,
        startup_program: Program | None = None,
        parameter_list: Sequence[Variable | str] | None = None,
        no_grad_set: Names | None = None,
    ) -> tuple[list[Operator], ParamsGrads]:
        """Rewrite the program of ``loss`` (a float scalar) and append the whole training step.

        ``loss`` may be a list of losses, whose gradients add up. Returns the update operators and [(parameter,
        gradient)]; the gradients are those of the scaled loss, in the element type of their parameter. Run the
        startup program next, then ``amp_init``. GradientError: see ``append_backward``. OrderError: minimize was
        called before. Where anything raises, the programs and this optimizer are as before.
        """
        program = program_of(checked_losses(loss)[0])
        with appending(program, startup_program, self, *self.optimizers):
            params_grads = self.backward(loss, startup_program, parameter_list, no_grad_set)
            return self.apply_gradients(params_grads), params_grads

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
        program = program_of(losses[0])
        parameter_list = listed(self.optimizers, program) if parameter_list is None else parameter_list
        parameter_list = thawed(parameter_list) if isinstance(parameter_list, list) else parameter_list
        for each in losses:
            check_loss(each, parameter_list, no_grad_set)
        with appending(program, startup_program, self):
            pairs = append_backward(self.get_scaled_loss(losses, startup_program), parameter_list, no_grad_set)
        names = program.parameters if parameter_list is None else parameter_list
        warn_untrained(thawed(listed_parameters(program, names, "backward")), pairs, no_grad_set)
        return pairs

    def get_scaled_loss(self, loss: Losses | None = None, startup_program: Program | None = None) -> Variable:
        """The loss times the scale, fp32: what ``append_backward`` is given in a loop of your own.

        With ``loss`` the program is rewritten in this optimizer's precision and the product appended; without it,
        after ``minimize``, the variable that there is. OrderError: without ``loss`` before ``minimize``.
        """
        if loss is None:
            self._ready("get_scaled_loss")
            assert self._scaled_loss is not None
            return self._scaled_loss
        losses = checked_losses(loss)
        program = program_of(losses[0])
        with appending(program, startup_program, self) as startup:
            self._rewrite(losses, startup)
            with program_guard(program, startup), context.operator_role(SCALING):
                self._scaled_loss = self._scale(losses)
            return self._scaled_loss

    def get_unscaled_gradients(self, grads: Sequence[Variable | None]) -> list[Variable | None]:
        """Gradients of the scaled loss divided by the scale, in fp32 (fp64 for fp64), None where None is given.

        All that go through here, in one call or in several, share one verdict. Code of your own may then work on them
        (clip, mask, add noise) and hand the results to ``apply_gradients``. OrderError: before the loss was scaled,
        after ``apply_gradients``, or for a gradient that was unscaled before.
        """
        program, startup = self._ready("get_unscaled_gradients")
        if self._applied:
            raise OrderError("get_unscaled_gradients after apply_gradients: the step is complete; unscale first")
        if self._accumulation is not None:
            raise OrderError(
                "get_unscaled_gradients: with accumulate_steps the sums over a window are unscaled, by "
                "apply_gradients; hand it the scaled gradients, and clip with grad_clip"
            )
        given = [grad for grad in grads if grad is not None]
        for grad in given:
            if not isinstance(grad, Variable):
                raise ArgumentTypeError(f"get_unscaled_gradients takes gradient variables or None, not {grad!r}")
            if grad in self._unscaled or grad in self._unscaled.values():
                raise OrderError(
                    f"get_unscaled_gradients: '{grad.name}' was unscaled by an earlier call of "
                    "get_unscaled_gradients; use what that returned"
                )
        if not given:
            raise ArgumentError(
                "get_unscaled_gradients: every gradient is None; the loss depends on none of these parameters"
            )
        with appending(program, startup, self), program_guard(program, startup):
            self._unscale(given)
        return [None if grad is None else self._unscaled[grad] for grad in grads]

    def apply_gradients(self, params_grads: GivenGrads) -> list[Operator]:
        """Append unscale, finite check, scale update and the update of [(parameter, scaled gradient)].

        Gradients that ``get_unscaled_gradients`` gave, or that were made of them, are not unscaled again. A parameter
        whose gradient is None is left out, with a warning. Returns the update operators. OrderError: before
        ``backward`` or ``get_scaled_loss``, or a second time. ArgumentError: some gradients unscaled and some not.
        """
        program, startup = self._ready("apply_gradients")
        params_grads = without_none(params_grads)
        if checked_pairs(params_grads) is not program:
            raise ArgumentError(f"apply_gradients: these gradients are not of program '{program.name}'")
        if self._applied:
            raise OrderError(
                f"apply_gradients: program '{program.name}' has its update already, from an earlier call "
                "of apply_gradients or minimize; give it all gradients at once"
            )
        with appending(program, startup, self, *self.optimizers):
            self._applied = True
            with program_guard(program, startup):
                updates = self._complete(program, startup, latest_first(params_grads))
            if self._accumulation is not None:
                self._accumulation.close(program, startup)
            if self._checks:
                check_step(program)
            return updates

    def _complete(self, program: Program, startup: Program, params_grads: ParamsGrads) -> list[Operator]:
        """Finite check and scale update, and an update that a bad step skips; without a check, the update alone."""
        state, accumulation = self._scale_state, self._accumulation
        assert state is not None
        forward_states = list(program.updates)
        if accumulation is not None:
            params_grads = accumulation.add_up(program, startup, params_grads)
        if self._checks:
            params_grads = self._all_unscaled(params_grads)
        found_inf = self._found_inf
        with context.operator_role(SCALING):
            for each in forward_states:
                if accumulation is not None:
                    accumulation.gate(program, startup, found_inf, each)
                elif found_inf is not None and each.name not in UNGATED:
                    program.set_update(each, gated_value(each, each, program.updates[each], found_inf))
        if found_inf is not None:
            state.append(self._scaler, found_inf, self._losses)
        return [
            update
            for optimizer, pairs in shares(self.optimizers, program, params_grads)
            for update in optimizer._apply(pairs, startup, found_inf)
        ]

    def _all_unscaled(self, params_grads: ParamsGrads) -> ParamsGrads:
        """The pairs with unscaled gradients; those of code of the user's stay as they are."""
        if not self._unscaled:
            self._unscale([grad for _, grad in params_grads])
            return [(parameter, self._unscaled[grad]) for parameter, grad in params_grads]
        made = made_of(self._unscaled.values())
        for parameter, grad in params_grads:
            if grad not in made:
                raise ArgumentError(
                    f"apply_gradients: gradient '{grad.name}' of '{parameter.name}' is still scaled, but others went "
                    "through get_unscaled_gradients; pass it through that as well"
                )
        return params_grads

    def _unscale(self, grads: list[Variable]) -> None:
        """Append the finite check, or let the one that there is read these gradients too."""
        assert self._scale_state is not None
        if self._check is None:
            unscaled, self._found_inf = check_finite_and_unscale(grads, self._scale_state.scale)
            self._check = self._found_inf.producer
        else:
            unscaled = extend_check(self._check, grads)
        self._unscaled = {**self._unscaled, **dict(zip(grads, unscaled, strict=True))}

    def apply_optimize(
        self, loss: Variable, startup_program: Program | None, params_grads: ParamsGrads
    ) -> list[Operator]:
        """``apply_gradients``; the arguments are those of the plain optimizers."""
        return self.apply_gradients(params_grads)

    # -- after minimize ------------------------------------------------------------------------------
    @paddle_arguments("amp_init")
    def amp_init(
        self, place: Place, scope: Scope | None = None, test_program: Program | None = None, use_fp16_test: bool = False
    ) -> None:
        """Prepare stored parameters, and a test program, for 16 bit. Call it after the startup program ran.

        In pure mode the parameters that 16-bit operators read are rounded in ``scope`` (default: the
        global one), and ``test_program`` is rewritten like the training program. Otherwise parameters
        stay fp32, and ``test_program`` is rewritten only with ``use_fp16_test``.

        OrderError: before ``minimize``. ScopeError: the startup program never ran. PrecisionError: a parameter does
        not fit the type. Where anything raises, the scope and ``test_program`` are as before.
        """
        program, _ = self._ready("amp_init")
        check_place(place, "amp_init")
        if not isinstance(test_program, (Program, type(None))):
            raise ArgumentTypeError(f"amp_init: test_program is {test_program!r}; expected a Program")
        if test_program is program:
            raise ArgumentError(
                f"amp_init: test_program is the training program '{program.name}' itself; give it a "
                "program for evaluation, such as program.clone(for_test=True)"
            )
        with unchanged_on_error(test_program):
            if test_program is not None and (self._use_pure_fp16 or use_fp16_test):
                take_apart(test_program)
            if test_program is not None and self._use_pure_fp16:
                cast_model_to_fp16(
                    test_program,
                    self._amp_lists,
                    self._use_fp16_guard,
                    names_must_exist=False,
                    numeric_guards=self._guarded(program),
                    like=program,
                )
            elif test_program is not None and use_fp16_test:
                rewrite_program(
                    test_program,
                    self._amp_lists,
                    names_must_exist=False,
                    numeric_guards=self._guarded(program),
                    like=program,
                )
            if self._use_pure_fp16:
                cast_parameters_to_fp16(place, program, scope, self._to_fp16_var_names)

    def get_loss_scaling(self) -> Variable:
        """The loss scale, fp32 of shape [1]. OrderError before ``minimize``."""
        return self._ready_scale("get_loss_scaling").scale

    @property
    def loss_scaler(self) -> LossScaler:
        """The rule by which the loss scale changes."""
        return self._scaler

    def get_loss_scale_state(self, scope: Scope | None = None) -> LossScale:
        """The loss scale and its counts in a scope. OrderError before ``minimize``, ScopeError before the startup."""
        return self._ready_scale("get_loss_scale_state").read(scope)

    def set_loss_scale_state(self, state: LossScale, scope: Scope | None = None) -> None:
        """Let the next step start from this loss scale and these counts. ArgumentError: the state of another scaler."""
        self._ready_scale("set_loss_scale_state").write(state, scope)

    def check_alarm(self, scope: Scope | None = None) -> None:
        """Raise LossScaleError where the steps up to now were bad, as the alarm of the scaler says.

        It reads a few numbers from the scope, and may be called after any step, or after every hundredth. OrderError
        before ``minimize``, or where the scaler has no alarm.
        """
        state = self._ready_scale("check_alarm")
        if not self._scaler.alarm:
            raise OrderError(
                "check_alarm: this loss scaler has no alarm; decorate with a scaler that has one, such as "
                "scaler=amp.LossScaler.paddle(max_bad_in_a_row=50, error_at_floor=True)"
            )
        self._scaler.check(state.read(scope))

    def get_found_inf(self) -> Variable | None:
        """The verdict of a step, bool of shape [1], to be fetched.

        None where gradients are not checked: in float16 with a static scale of 1.
        """
        self._ready("get_found_inf")
        return self._found_inf

    # -- pieces --------------------------------------------------------------------------------------
    def _ready(self, call: str) -> tuple[Program, Program]:
        if self._program is None or self._startup is None:
            raise OrderError(
                f"{call} before minimize: call minimize(loss), backward(loss) or get_scaled_loss(loss) first"
            )
        return self._program, self._startup

    def _ready_scale(self, call: str) -> ScaleState:
        self._ready(call)
        assert self._scale_state is not None
        return self._scale_state

    def _rewrite(self, losses: Sequence[Variable], startup: Program) -> None:
        """Bring the losses' program into this optimizer's precision, and create the scale; once."""
        program = program_of(losses[0])
        if self._program is program and not self._applied:
            return
        if self._program is program:
            raise OrderError(
                f"program '{program.name}' has its training step already, and a program takes one: "
                "give minimize all losses in one list, or build the program anew"
            )
        if self._program is not None:
            raise OrderError(
                f"this optimizer works on program '{self._program.name}' already; decorate another one for another "
                "program"
            )
        if any(op.role == BACKWARD for op in program.operators):
            raise OrderError(
                f"program '{program.name}' has gradients already, and takes no other precision; minimize "
                "a program once, or build it anew"
            )
        take_apart(program)
        if self._guarded(program):
            keep_losses(losses, self._amp_lists)
        if self._use_pure_fp16:
            self._to_fp16_var_names = cast_model_to_fp16(
                program, self._amp_lists, self._use_fp16_guard, numeric_guards=self._guarded(program)
            )
        else:
            rewrite_program(program, self._amp_lists, numeric_guards=self._guarded(program))
        self._scale_state = ScaleState.create(program, startup, self._scaler)
        self._program, self._startup = program, startup

    def _guarded(self, program: Program) -> bool:
        """Whether what is known to leave the type stays fp32 whatever the lists say."""
        return program.numeric_guards if self._numeric_guards is None else self._numeric_guards

    def _scale(self, losses: Sequence[Variable]) -> Variable:
        """The sum of the losses times the scale; its share of a window where gradients accumulate."""
        assert self._scale_state is not None
        program = program_of(losses[0])
        wide = [wide_loss(loss) for loss in losses]
        self._losses = [*self._losses, *wide]
        total = wide[0]
        if len(wide) > 1:
            total = program.add_variable(program.unique("total_loss"), "float32", wide[0].shape)
            program.add_operator("Sum", wide, [total])
        if self._accumulation is not None:
            share = program.add_variable(program.unique(f"{total.name}@SHARE"), "float32", total.shape)
            count = program.add_constant("accumulate_steps", np.array(self._accumulation.steps, np.float32))
            program.add_operator("Div", [total, count], [share])
            total = share
        if not self._checks:
            return total
        scaled = program.add_variable(program.unique(f"{losses[0].name}@SCALED"), "float32", total.shape or (1,))
        program.add_operator("Mul", [total, self._scale_state.scale], [scaled])
        return scaled
