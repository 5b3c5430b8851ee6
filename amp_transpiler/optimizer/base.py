"""What every optimizer does: gradients, clipping, one update operator over all parameters, state."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, GraphError, OrderError
from ..ir import context
from ..ir.program import OWN, UPDATE, Operator, Program, Variable
from ..ir.types import HALF
from ..ops.scaling import master_type
from ..ops.update import LAYOUTS, Layout
from ..passes.backward import append_backward
from ..runtime.scope import Scope, check_scope
from .clip import GradientClip
from .state import appending, create_master, create_state, initial_value, owned_name, shared_name, static_shape

ParamsGrads = list[tuple[Variable, Variable]]
Names = Collection[Variable | str]


def number(owner: str, name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """``value`` as a float in ``[low, high)``; ArgumentError that names the owner and the argument otherwise."""
    bad = isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value)
    if bad or not low <= value < high or (open_low and value == low):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g})"
        raise ArgumentError(f"{owner}: {name} is {value!r}; expected a number in {bounds}")
    return float(value)


class Optimizer:
    """Base of SGD, Momentum, Adam, AdamW and Lamb.

    Args:
        learning_rate: a number >= 0, kept in the fp32 scalar variable ``learning_rate_<n>``.
        parameter_list: parameters (variables or names) to update; every trainable parameter by default.
        weight_decay: coefficient of an L2 penalty, added to the gradient after clipping.
        grad_clip: a ``ClipGradBy…`` object.
        multi_precision: keep an fp32 master weight for every 16-bit parameter and update that.
        name: prefix of this optimizer's own state (beta powers); the class name in lower case by default.

    Raises:
        ArgumentError, ArgumentTypeError: a value out of range or of the wrong kind.
    """

    type: str = ""

    def __init__(self, learning_rate: float = 0.001, parameter_list: Sequence[Variable | str] | None = None,
                 weight_decay: float | None = None, grad_clip: GradientClip | None = None,
                 multi_precision: bool = False, name: str | None = None) -> None:  # fmt: skip
        owner = type(self).__name__
        self.learning_rate = number(owner, "learning_rate", learning_rate, 0)
        self.weight_decay = number(owner, "weight_decay", 0.0 if weight_decay is None else weight_decay, 0)
        if isinstance(parameter_list, str) or not isinstance(parameter_list, (Iterable, type(None))):
            raise ArgumentTypeError(f"{owner}: parameter_list is {parameter_list!r}; expected a list of parameters")
        if not isinstance(grad_clip, (GradientClip, type(None))):
            raise ArgumentTypeError(f"{owner}: grad_clip is {grad_clip!r}; expected a ClipGradBy… object")
        self.parameter_list = None if parameter_list is None else list(parameter_list)
        self.grad_clip = grad_clip
        self.multi_precision = bool(multi_precision)
        self.name = name or self.type.lower()
        self._rate: Variable | None = None
        self._warned = False

    # -- for subclasses ------------------------------------------------------------------------------
    def _attributes(self, parameters: Sequence[Variable]) -> dict[str, Any]:
        """Attributes of the update operator."""
        raise NotImplementedError

    def _initial(self, scalar: str) -> float:
        """The initial value of a shared scalar."""
        raise NotImplementedError

    # -- the steps of minimize -----------------------------------------------------------------------
    def minimize(self, loss: Variable, startup_program: Program | None = None,
                 parameter_list: Sequence[Variable | str] | None = None,
                 no_grad_set: Names | None = None) -> tuple[list[Operator], ParamsGrads]:  # fmt: skip
        """Append the backward pass of ``loss`` (a float scalar) and the update of every parameter it depends on.

        New state is initialised in ``startup_program`` (default: that of the loss's program). Returns the
        update operators and [(parameter, gradient)]. GradientError: see ``append_backward``. Where anything raises,
        the programs are as before.
        """
        with appending(checked_loss(loss).program, startup_program, self):
            params_grads = self.backward(loss, startup_program, parameter_list, no_grad_set)
            return self.apply_optimize(loss, startup_program, params_grads), params_grads

    def backward(self, loss: Variable, startup_program: Program | None = None,
                 parameter_list: Sequence[Variable | str] | None = None,
                 no_grad_set: Names | None = None) -> ParamsGrads:  # fmt: skip
        """Append the gradients of ``loss``; returns [(parameter, gradient)]."""
        with appending(checked_loss(loss).program, startup_program, self):
            return append_backward(loss, self.parameter_list if parameter_list is None else parameter_list, no_grad_set)

    def apply_optimize(self, loss: Variable, startup_program: Program | None,
                       params_grads: ParamsGrads) -> list[Operator]:  # fmt: skip
        """``apply_gradients``, with new state initialised in ``startup_program``."""
        with appending(checked_loss(loss).program, startup_program, self) as startup:
            return self._apply(params_grads, startup, None)

    def apply_gradients(self, params_grads: ParamsGrads) -> list[Operator]:
        """Append clipping and the update operator for [(parameter, gradient)]; returns the update operators."""
        with appending(checked_pairs(params_grads), None, self) as startup:
            return self._apply(params_grads, startup, None)

    def _apply(self, params_grads: ParamsGrads, startup: Program, found_inf: Variable | None) -> list[Operator]:
        """Clip and update. With ``found_inf`` (bool [1]) nothing changes where it is true."""
        program = checked_pairs(params_grads)
        params_grads = latest_first(params_grads)
        parameters = [parameter for parameter, _ in params_grads]
        for parameter in parameters:
            static_shape(parameter)
            initial_value(startup, parameter)
            if parameter in program.updates:
                raise GraphError(
                    f"parameter '{parameter.name}' of program '{program.name}' is updated already; minimize a program "
                    "once, or give each optimizer its own parameter_list"
                )
        grads = [grad for _, grad in params_grads]
        with context.program_guard(program, startup), context.operator_role(UPDATE):
            if self.grad_clip is not None:
                grads = self.grad_clip.append(grads)
            return [self._append_update(program, startup, parameters, grads, found_inf)]

    def _append_update(self, program: Program, startup: Program, parameters: list[Variable], grads: list[Variable],
                       found_inf: Variable | None) -> Operator:  # fmt: skip
        layout = LAYOUTS[self.type]
        inputs: list[Variable | None] = [found_inf, self._learning_rate(program, startup)]
        for scalar in layout.scalars:
            name = shared_name(program, f"{self.name}_{scalar}")
            inputs.append(create_state(program, startup, name, "float32", [1], self._initial(scalar)))
        for parameter, grad in zip(parameters, grads, strict=True):
            inputs += self._row(program, startup, layout, parameter, grad)
        outputs = [None if state is None else _next_value(state) for state in layout.states(inputs)]
        attrs = {"n": len(parameters), **self._attributes(parameters)}
        op = program.add_operator(self.type, inputs, outputs, attrs=attrs, domain=OWN)
        for state, new in zip(layout.states(inputs), outputs, strict=True):
            if state is not None and new is not None:
                program.set_update(state, new)
        return op

    def _row(self, program: Program, startup: Program, layout: Layout, parameter: Variable,
             grad: Variable) -> list[Variable | None]:  # fmt: skip
        shape = static_shape(parameter)
        master = None
        if parameter.dtype in HALF:
            if self.multi_precision:
                master = create_master(program, startup, parameter)
            else:
                self.warn_low_precision(f"parameter '{parameter.name}' is {parameter.dtype}")
        prefix = (master or parameter).name
        accumulators = [
            create_state(
                program, startup, owned_name(program, f"{prefix}_{kind}"), master_type(parameter.dtype), shape, 0
            )
            for kind in layout.accumulators
        ]
        return [parameter, grad, *accumulators, master]

    def warn_low_precision(self, what: str) -> None:
        """Warn, once, that small updates of 16-bit parameters are lost."""
        if not self._warned:
            warnings.warn(f"{type(self).__name__} without multi_precision: {what}, so updates smaller than half of its "
                          "last digit are lost and training may stall. Pass multi_precision=True to the optimizer",
                          UserWarning, stacklevel=3)  # fmt: skip
        self._warned = True

    # -- learning rate -------------------------------------------------------------------------------
    def _learning_rate(self, program: Program, startup: Program) -> Variable:
        if self._rate is None or self._rate.program is not program:
            name = shared_name(program, "learning_rate")
            self._rate = create_state(program, startup, name, "float32", [], self.learning_rate)
        return self._rate

    def set_lr(self, value: float, scope: Scope | None = None) -> None:
        """Let later steps use this learning rate. OrderError before ``minimize``, ScopeError before the startup ran."""
        owner = type(self).__name__
        rate = number(owner, "learning_rate", value, 0)
        if self._rate is None:
            raise OrderError(
                f"{owner}.set_lr before minimize: there is no learning rate to set yet; call minimize first"
            )
        scope = check_scope(scope)
        scope.find_var(self._rate.name)  # ScopeError: the startup program would overwrite what is set now
        scope.set_var(self._rate.name, np.array(rate, np.float32))

    def get_lr(self, scope: Scope | None = None) -> float:
        """The learning rate in the scope; the initial one before ``minimize`` or before the startup program ran."""
        scope = check_scope(scope)
        if self._rate is None or not scope.has_var(self._rate.name):
            return self.learning_rate
        return float(scope.find_var(self._rate.name))


def latest_first(params_grads: ParamsGrads) -> ParamsGrads:
    """The pairs in the order for operators that read many gradients: the gradient that is computed last comes first.

    onnxruntime computes what a node reads from its last input on. So each gradient is computed when the backward pass
    reaches it, and frees the activations it reads; in another order, such as that of an exporter's initializers, they
    are kept until the whole pass has gone by.
    """
    return sorted(params_grads, key=lambda pair: -1 if pair[1].producer is None else pair[1].producer.key, reverse=True)


def checked_loss(loss: Variable) -> Variable:
    """``loss`` itself; ArgumentTypeError where it is no variable."""
    if not isinstance(loss, Variable):
        raise ArgumentTypeError(f"loss must be a Variable, not {type(loss).__name__}")
    return loss


def checked_pairs(params_grads: ParamsGrads) -> Program:
    """The program of [(parameter, gradient)]; errors for anything else, an empty list, a parameter given twice."""
    pairs = list(params_grads)
    if not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(v, Variable) for v in pair) for pair in pairs
    ):
        raise ArgumentTypeError(f"params_grads must be a list of (parameter, gradient) variables, not {params_grads!r}")
    if not pairs:
        raise ArgumentError("params_grads is empty: there is no parameter to update")
    keys = [parameter.key for parameter, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(p.name for p, _ in pairs if keys.count(p.key) > 1)
        raise ArgumentError(f"params_grads names parameter '{twice}' twice")
    for parameter, grad in pairs:
        if parameter.program is not pairs[0][0].program or grad.program is not parameter.program:
            raise GraphError(f"parameter '{parameter.name}' and gradient '{grad.name}' belong to different programs")
    return pairs[0][0].program


def _next_value(state: Variable) -> Variable:
    """The variable ``<state>@NEW``, of the state's type and shape."""
    program = state.program
    new = program.add_variable(program.unique(f"{state.name}@NEW"), state.dtype, state.shape)
    new.stop_gradient = True
    return new
