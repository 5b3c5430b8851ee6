"""``decorate``: an optimizer whose ``minimize`` trains in mixed or pure 16 bit, with loss scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError, OrderError
from ..ir import context
from ..ir.decompose import has_decomposition
from ..ir.program import BACKWARD, OWN, SCALING, Operator, Program, Variable
from ..ir.rollback import unchanged_on_error
from ..ir.types import HALF, ONNX_TYPES
from ..lists import AutoMixedPrecisionLists
from ..ops.scaling import GATE
from ..passes.backward import append_backward, check_loss, standardize
from ..passes.check_step import UNGATED, check_step
from ..passes.pure import cast_model_to_fp16
from ..passes.rewrite import rewrite_program
from ..runtime.parameters import cast_parameters_to_fp16
from ..runtime.place import Place, check_place
from ..runtime.scope import Scope
from .base import GivenGrads, Names, Optimizer, ParamsGrads, checked_loss, checked_pairs, latest_first, without_none
from .groups import number
from .scale_state import ScaleState
from .scaler import LossScale, LossScaler
from .scaling import check_finite_and_unscale, scaling_attributes
from .state import appending

_DEFAULT_SCALE = 2.0**15
_DEFAULT_STEPS = {"incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 2, "incr_ratio": 2.0, "decr_ratio": 0.8}


def decorate(optimizer: Optimizer, amp_lists: AutoMixedPrecisionLists | None = None,
             init_loss_scaling: float = 2**15, incr_every_n_steps: int = 1000, decr_every_n_nan_or_inf: int = 2,
             incr_ratio: float = 2.0, decr_ratio: float = 0.8, use_dynamic_loss_scaling: bool = True,
             use_pure_fp16: bool = False, use_fp16_guard: bool | None = None, *,
             dtype: str = "float16", scaler: LossScaler | None = None) -> OptimizerWithMixedPrecision:  # fmt: skip
    """Wrap an optimizer for training in mixed precision (default) or pure 16 bit.

    Args:
        optimizer: an optimizer of this package, not yet used.
        amp_lists: operator lists; the defaults for ``dtype`` where None.
        init_loss_scaling: initial loss scale, > 0. With a scale of 1 and no dynamic scaling gradients are
            not checked in float16.
        incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio: see ``update_loss_scaling``.
        use_dynamic_loss_scaling: adapt the scale. A static scale checks gradients and skips bad steps as well.
        use_pure_fp16: run everything that can in 16 bit and store parameters so, instead of black/white lists.
        use_fp16_guard: in pure mode, only what ``fp16_guard`` or ``mark_fp16`` marks; default: ``use_pure_fp16``.
        dtype: "float16" or "bfloat16". bfloat16 has fp32's range: it trains with scale 1 and without dynamic
            scaling unless one of the five scaling numbers is given other than its default; its gradients are
            checked in any case.
        scaler: another rule for the loss scale, such as ``amp.LossScaler.torch()``; the five scaling numbers and
            ``use_dynamic_loss_scaling`` then keep their defaults.

    Raises:
        ArgumentTypeError: no optimizer, no lists, no scaler. ArgumentError: a number out of range, an optimizer
            decorated already, a ``dtype`` that is not that of ``amp_lists``, a scaler beside numbers for another.
    """
    if isinstance(optimizer, OptimizerWithMixedPrecision):
        raise ArgumentError("decorate: this optimizer is decorated already")
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"decorate: optimizer is {optimizer!r}; expected one of amp.optimizer, such as amp.optimizer.Adam()"
        )
    if not isinstance(dtype, str) or dtype.lower() not in HALF:
        raise ArgumentError(f"decorate: dtype is {dtype!r}; expected 'float16' or 'bfloat16'")
    dtype = dtype.lower()
    if not isinstance(amp_lists, (AutoMixedPrecisionLists, type(None))):
        raise ArgumentTypeError(f"decorate: amp_lists is {amp_lists!r}; expected amp.AutoMixedPrecisionLists(...)")
    if amp_lists is not None and amp_lists.dtype != dtype:
        raise ArgumentError(f"decorate: dtype is {dtype}, but amp_lists are for {amp_lists.dtype}; pass dtype="
                            f"'{amp_lists.dtype}', or lists made with dtype='{dtype}'")  # fmt: skip
    for name, flag in (("use_dynamic_loss_scaling", use_dynamic_loss_scaling), ("use_pure_fp16", use_pure_fp16),
                       ("use_fp16_guard", use_fp16_guard)):  # fmt: skip
        if not isinstance(flag, bool) and not (flag is None and name == "use_fp16_guard"):
            raise ArgumentTypeError(f"decorate: {name} is {flag!r}; expected True or False")
    scale = number("decorate", "init_loss_scaling", init_loss_scaling, 0, 2.0**128, open_low=True)
    steps = scaling_attributes("decorate", incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio)
    defaults = scale == _DEFAULT_SCALE and steps == _DEFAULT_STEPS
    if scaler is not None:
        _check_scaler(scaler, defaults and use_dynamic_loss_scaling)
    elif not use_dynamic_loss_scaling or (dtype == "bfloat16" and defaults):
        scaler = LossScaler.fixed(1.0 if dtype == "bfloat16" and defaults else scale)
    else:
        scaler = LossScaler(scale, growth_factor=incr_ratio, growth_every=incr_every_n_steps,
                            backoff_factor=decr_ratio, backoff_after=decr_every_n_nan_or_inf)  # fmt: skip
    decorated = OptimizerWithMixedPrecision(
        optimizer,
        amp_lists or AutoMixedPrecisionLists(dtype=dtype),
        scaler,
        use_pure_fp16,
        use_pure_fp16 if use_fp16_guard is None else use_fp16_guard,
    )
    if use_pure_fp16 and not optimizer.multi_precision:
        optimizer.warn_low_precision(f"use_pure_fp16 stores parameters in {dtype}")
    return decorated


class OptimizerWithMixedPrecision:
    """What :func:`decorate` returns. Attributes of the wrapped optimizer are read through it.

    A step is: forward, loss × scale, backward, cast to fp32 and unscale, finite check, update of the
    scale, clipping, decay, update, rounding of master weights. One verdict over every gradient gates
    every state: a bad step changes the scale, its counters and the randomness counter, nothing else.
    """

    def __init__(self, optimizer: Optimizer, amp_lists: AutoMixedPrecisionLists, scaler: LossScaler,
                 use_pure_fp16: bool, use_fp16_guard: bool) -> None:  # fmt: skip
        self._optimizer = optimizer
        self._amp_lists = amp_lists
        self._scaler = scaler
        self._use_pure_fp16 = use_pure_fp16
        self._use_fp16_guard = use_fp16_guard
        self._checks = scaler.dynamic or scaler.init_scale != 1 or scaler.alarm or amp_lists.dtype == "bfloat16"
        self._program: Program | None = None
        self._startup: Program | None = None
        self._to_fp16_var_names: set[str] = set()
        self._scale_state: ScaleState | None = None
        self._losses: list[Variable] = []
        self._scaled_loss: Variable | None = None
        self._found_inf: Variable | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # -- minimize and its two halves -----------------------------------------------------------------
    def minimize(self, loss: Variable, startup_program: Program | None = None,
                 parameter_list: Sequence[Variable | str] | None = None,
                 no_grad_set: Names | None = None) -> tuple[list[Operator], ParamsGrads]:  # fmt: skip
        """Rewrite the program of ``loss`` (a float scalar) and append the whole training step.

        Returns the update operators and [(parameter, gradient)]; the gradients are those of the scaled
        loss, in the element type of their parameter. Run the startup program next, then ``amp_init``.
        GradientError: see ``append_backward``. OrderError: minimize was called before. Where anything raises, the
        programs and this optimizer are as before.
        """
        with appending(checked_loss(loss).program, startup_program, self, self._optimizer):
            params_grads = self.backward(loss, startup_program, parameter_list, no_grad_set)
            return self.apply_gradients(params_grads), params_grads

    def backward(self, loss: Variable, startup_program: Program | None = None,
                 parameter_list: Sequence[Variable | str] | None = None,
                 no_grad_set: Names | None = None) -> ParamsGrads:  # fmt: skip
        """Rewrite the program, scale the loss and append its gradients; returns [(parameter, scaled gradient)]."""
        if self._program is not None:
            raise OrderError(
                f"this optimizer works on program '{self._program.name}' already; decorate another one for another "
                "program"
            )
        if parameter_list is None:
            parameter_list = self._optimizer.parameter_list
        program = check_loss(loss, parameter_list, no_grad_set)
        if any(op.role == BACKWARD for op in program.operators):
            raise OrderError(f"program '{program.name}' has gradients already, and takes no other precision; minimize "
                             "a program once, or build it anew")  # fmt: skip
        with appending(program, startup_program, self) as startup:
            _take_apart(program)
            if self._use_pure_fp16:
                self._to_fp16_var_names = cast_model_to_fp16(program, self._amp_lists, self._use_fp16_guard)
            else:
                rewrite_program(program, self._amp_lists)
            with context.program_guard(program, startup), context.operator_role(SCALING):
                self._scale_state = ScaleState.create(program, startup, self._scaler)
                self._scaled_loss = self._scale(loss)
            params_grads = append_backward(self._scaled_loss, parameter_list, no_grad_set)
            self._program, self._startup = program, startup
            return params_grads

    def apply_gradients(self, params_grads: GivenGrads) -> list[Operator]:
        """Append unscale, finite check, scale update and the update of [(parameter, scaled gradient)].

        A parameter whose gradient is None is left out, with a warning. Returns the update operators. OrderError:
        before ``backward``.
        """
        program, startup = self._ready("apply_gradients")
        params_grads = without_none(params_grads)
        if checked_pairs(params_grads) is not program:
            raise ArgumentError(f"apply_gradients: these gradients are not of program '{program.name}'")
        if self._found_inf is not None:
            raise OrderError(f"apply_gradients: program '{program.name}' has its update already; give it all gradients")
        with appending(program, startup, self, self._optimizer):
            if not self._checks:
                return self._optimizer._apply(params_grads, startup, None)
            return self._checked_update(program, startup, params_grads)

    def _checked_update(self, program: Program, startup: Program, params_grads: ParamsGrads) -> list[Operator]:
        """Unscale, finite check and scale update, and an update that a bad step skips."""
        assert self._scale_state is not None
        params_grads = latest_first(params_grads)
        with context.program_guard(program, startup):
            grads, found_inf = check_finite_and_unscale([grad for _, grad in params_grads], self._scale_state.scale)
            _gate_forward_state(program, found_inf)
            self._scale_state.append(self._scaler, found_inf, self._losses)
            pairs = [(parameter, grad) for (parameter, _), grad in zip(params_grads, grads, strict=True)]
            updates = self._optimizer._apply(pairs, startup, found_inf)
        self._found_inf = found_inf
        check_step(program)
        return updates

    def apply_optimize(self, loss: Variable, startup_program: Program | None,
                       params_grads: ParamsGrads) -> list[Operator]:  # fmt: skip
        """``apply_gradients``; the arguments are those of the plain optimizers."""
        return self.apply_gradients(params_grads)

    # -- after minimize ------------------------------------------------------------------------------
    def amp_init(self, place: Place, scope: Scope | None = None, test_program: Program | None = None,
                 use_fp16_test: bool = False) -> None:  # fmt: skip
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
            raise ArgumentError(f"amp_init: test_program is the training program '{program.name}' itself; give it a "
                                "program for evaluation, such as program.clone(for_test=True)")  # fmt: skip
        with unchanged_on_error(test_program):
            if test_program is not None and (self._use_pure_fp16 or use_fp16_test):
                _take_apart(test_program)
            if test_program is not None and self._use_pure_fp16:
                cast_model_to_fp16(test_program, self._amp_lists, self._use_fp16_guard, names_must_exist=False)
            elif test_program is not None and use_fp16_test:
                rewrite_program(test_program, self._amp_lists, names_must_exist=False)
            if self._use_pure_fp16:
                cast_parameters_to_fp16(place, program, scope, self._to_fp16_var_names)

    def get_loss_scaling(self) -> Variable:
        """The loss scale, fp32 of shape [1]. OrderError before ``minimize``."""
        return self._ready_scale("get_loss_scaling").scale

    def get_scaled_loss(self) -> Variable:
        """The loss times the scale, fp32. OrderError before ``minimize``."""
        self._ready("get_scaled_loss")
        assert self._scaled_loss is not None
        return self._scaled_loss

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
            raise OrderError("check_alarm: this loss scaler has no alarm; decorate with a scaler that has one, such as "
                             "scaler=amp.LossScaler.paddle(max_bad_in_a_row=50, error_at_floor=True)")  # fmt: skip
        self._scaler.check(state.read(scope))

    def get_found_inf(self) -> Variable | None:
        """The verdict of a step, bool of shape [1], to be fetched; None where gradients are not checked."""
        self._ready("get_found_inf")
        return self._found_inf

    # -- pieces --------------------------------------------------------------------------------------
    def _ready(self, call: str) -> tuple[Program, Program]:
        if self._program is None or self._startup is None:
            raise OrderError(f"{call} before minimize: call minimize(loss) (or backward) first")
        return self._program, self._startup

    def _ready_scale(self, call: str) -> ScaleState:
        self._ready(call)
        assert self._scale_state is not None
        return self._scale_state

    def _scale(self, loss: Variable) -> Variable:
        assert self._scale_state is not None
        program = loss.program
        if loss.dtype != "float32":
            wide = program.add_variable(program.unique(f"{loss.name}.cast_fp32"), "float32", loss.shape)
            program.add_operator("Cast", [loss], [wide], attrs={"to": ONNX_TYPES["float32"]})
            loss = wide
        self._losses.append(loss)
        if not self._checks:
            return loss
        scaled = program.add_variable(program.unique(f"{loss.name}@SCALED"), "float32", loss.shape or (1,))
        program.add_operator("Mul", [loss, self._scale_state.scale], [scaled])
        return scaled


def _check_scaler(scaler: LossScaler, alone: bool) -> None:
    """Raise for a scaler that is none, or that stands beside numbers for another."""
    if not isinstance(scaler, LossScaler):
        raise ArgumentTypeError(f"decorate: scaler is {scaler!r}; expected amp.LossScaler.torch() or another scaler")
    if not alone:
        raise ArgumentError("decorate: scaler says all about the loss scale; leave out init_loss_scaling, "
                            "incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio and "
                            "use_dynamic_loss_scaling, and give the scaler its numbers, as in "
                            "amp.LossScaler.torch(init_scale=1024)")  # fmt: skip


def _take_apart(program: Program) -> None:
    """Operators that the lists do not know become those that they do, before the lists decide."""
    if any(has_decomposition(op) for op in program.walk()):
        standardize(program)


def _gate_forward_state(program: Program, found_inf: Variable) -> None:
    """Let state that the forward pass writes (running statistics) keep its value on a bad step."""
    with context.operator_role(SCALING):
        for state, new in list(program.updates.items()):
            if state.name in UNGATED:
                continue
            kept = program.add_variable(program.unique(f"{state.name}@GATED"), state.dtype, state.shape)
            kept.stop_gradient = True
            program.add_operator(GATE, [found_inf, state, new], [kept], domain=OWN)
            program.set_update(state, kept)
