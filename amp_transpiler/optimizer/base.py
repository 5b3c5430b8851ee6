"""What every optimizer does: gradients, clipping, one update operator over all parameters, state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, GraphError, OrderError
from ..ir import context
from ..ir.program import OWN, UPDATE, Operator, Program, Variable
from ..ir.types import HALF
from ..lists.paddle import paddle_arguments
from ..ops.scaling import master_type
from ..ops.schedule import LEARNING_RATE
from ..ops.update import LAYOUTS, Layout
from ..passes.backward import append_backward
from ..runtime.scope import Scope, check_scope
from . import policy
from .clip import GradientClip
from .groups import Group, assigned, checked_clip, checked_patterns, number, parsed, without_decay
from .lr import LRScheduler
from .state import (
    appending,
    create_master,
    create_state,
    gated_value,
    initial_value,
    next_value,
    owned_name,
    shared_name,
    static_shape,
)

ParamsGrads = list[tuple[Variable, Variable]]
GivenGrads = Sequence[tuple[Variable, Variable | None]]
Names = Collection[Variable | str]
Parameters = Sequence[Variable | str] | Sequence[dict[str, Any]] | None


@paddle_arguments("optimizer")
class Optimizer:
    """Base of SGD, Momentum, Adam, AdamW and Lamb.

    Args:
        learning_rate: a number >= 0, kept in the fp32 scalar variable ``learning_rate_<n>``, or a schedule of
            ``amp.optimizer.lr``, by which the program computes this variable.
        parameter_list: parameters to update (variables, names or patterns); every trainable parameter by default.
            Or groups, ``[{"params": [...], "learning_rate": factor, "weight_decay": ..., "grad_clip": ...}, ...]``:
            the first is a factor on this optimizer's rate, the others default to this optimizer's, and a group
            with a ``grad_clip`` of its own is clipped by itself. Parameters of no group are not trained.
        weight_decay: coefficient of an L2 penalty, added to the gradient after clipping.
        grad_clip: a ``ClipGradBy…`` object; a global norm is that of all groups together.
        multi_precision: keep an fp32 master weight for every 16-bit parameter and update that.
        name: prefix of this optimizer's own state (beta powers); the class name in lower case by default.
        weight_decay_exclude: names and patterns, as in ``["*.b_0", "*norm*"]``, of parameters without decay. A
            pattern is tried on the name of a parameter, and on names and scopes of the operators that read it.

    Raises:
        ArgumentError, ArgumentTypeError: a value out of range or of the wrong kind.
    """

    type: str = ""
    #: The attribute of the update operator that holds the decay.
    decay_attribute: str = "l2_decay"

    def __init__(self, learning_rate: float | LRScheduler = 0.001, parameter_list: Parameters = None,
                 weight_decay: float | None = None, grad_clip: GradientClip | None = None,
                 multi_precision: bool = False, name: str | None = None, *,
                 weight_decay_exclude: Sequence[str] = ()) -> None:  # fmt: skip
        owner = type(self).__name__
        scheduled = isinstance(learning_rate, LRScheduler)
        if isinstance(learning_rate, str):
            raise ArgumentError(f"{owner}: learning_rate is {learning_rate!r}; expected a number, or a schedule, "
                                "such as amp.optimizer.lr.CosineAnnealingDecay(0.1, T_max=100)")  # fmt: skip
        self.learning_rate = learning_rate if scheduled else number(owner, "learning_rate", learning_rate, 0)
        self.weight_decay = number(owner, "weight_decay", 0.0 if weight_decay is None else weight_decay, 0)
        self.grad_clip = checked_clip(owner, grad_clip)
        self._groups = parsed(owner, parameter_list, self.weight_decay, self.grad_clip)
        items = [group.items for group in self._groups]
        self.parameter_list = None if items == [None] else [item for some in items for item in some or ()]
        self.weight_decay_exclude = checked_patterns(owner, weight_decay_exclude)
        self.multi_precision = bool(multi_precision)
        self.name = name or self.type.lower()
        self._rate: Variable | None = None
        self._lr_step: Variable | None = None
        self._warned = False
        #: What ``minimize`` decorated this optimizer to under a global policy; None in fp32.
        self.mixed_precision: Any = None

    # -- for subclasses ------------------------------------------------------------------------------
    def _attributes(self) -> dict[str, Any]:
        """Attributes of the update operator beside those of its group."""
        return {}

    def _decays(self, name: str) -> bool:
        """Whether the parameter of this name decays, beside ``weight_decay_exclude``."""
        return True

    def _initial(self, scalar: str) -> float:
        """The initial value of a shared scalar."""
        raise NotImplementedError

    # -- the steps of minimize -----------------------------------------------------------------------
    def minimize(self, loss: Variable, startup_program: Program | None = None,
                 parameter_list: Sequence[Variable | str] | None = None,
                 no_grad_set: Names | None = None) -> tuple[list[Operator], ParamsGrads]:  # fmt: skip
        """Append the backward pass of ``loss`` (a float scalar) and the update of every parameter it depends on.

        New state is initialised in ``startup_program`` (default: that of the loss's program). Returns the
        update operators and [(parameter, gradient)]. Under a global policy other than "float32" the program trains in
        mixed precision, and ``self.mixed_precision`` is the decorated optimizer that did it. GradientError: see
        ``append_backward``. Where anything raises, the programs are as before.
        """
        self.mixed_precision = policy.decorated(self)
        if self.mixed_precision is not None:
            return self.mixed_precision.minimize(loss, startup_program, parameter_list, no_grad_set)
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
                       params_grads: GivenGrads) -> list[Operator]:  # fmt: skip
        """``apply_gradients``, with new state initialised in ``startup_program``."""
        params_grads = without_none(params_grads)
        with appending(checked_loss(loss).program, startup_program, self) as startup:
            return self._apply(params_grads, startup, None)

    def apply_gradients(self, params_grads: GivenGrads) -> list[Operator]:
        """Append clipping and the update of [(parameter, gradient)]; returns the update operators, one for each group.

        A parameter whose gradient is None is left out, with a warning. ArgumentError: all are None, the list is empty,
        a parameter comes twice.
        """
        params_grads = without_none(params_grads)
        with appending(checked_pairs(params_grads), None, self) as startup:
            return self._apply(params_grads, startup, None)

    def _apply(self, params_grads: ParamsGrads, startup: Program, found_inf: Variable | None) -> list[Operator]:
        """Clip and update. With ``found_inf`` (bool [1]) nothing changes where it is true."""
        program = checked_pairs(params_grads)
        given = [parameter for parameter, _ in params_grads]
        groups = assigned(type(self).__name__, self._groups, program, given)
        params_grads = latest_first([pair for pair in params_grads if pair[0].key in groups])
        if not params_grads:
            raise ArgumentError(f"{type(self).__name__}: none of its groups has a parameter with a gradient")
        for parameter, _ in params_grads:
            static_shape(parameter)
            initial_value(startup, parameter)
            if parameter in program.updates:
                raise GraphError(
                    f"parameter '{parameter.name}' of program '{program.name}' is updated already; minimize a program "
                    "once, or give each optimizer its own parameter_list"
                )
        with context.program_guard(program, startup), context.operator_role(UPDATE):
            params_grads = clipped(params_grads, groups)
            alike = split(params_grads, lambda p: (groups[p.key].lr_factor, groups[p.key].weight_decay))
            rate = self._learning_rate(program, startup, found_inf)
            return [
                self._append_update(program, startup, groups[pairs[0][0].key], pairs, rate, found_inf)
                for pairs in alike
            ]

    def _append_update(self, program: Program, startup: Program, group: Group, pairs: ParamsGrads, rate: Variable,
                       found_inf: Variable | None) -> Operator:  # fmt: skip
        layout = LAYOUTS[self.type]
        inputs: list[Variable | None] = [found_inf, rate]
        for scalar in layout.scalars:
            name = shared_name(program, f"{self.name}_{scalar}")
            inputs.append(create_state(program, startup, name, "float32", [1], self._initial(scalar)))
        for parameter, grad in pairs:
            inputs += self._row(program, startup, layout, parameter, grad)
        outputs = [None if state is None else next_value(state) for state in layout.states(inputs)]
        attrs = {"n": len(pairs), **self._attributes(), **self._group_attributes(program, group, pairs)}
        op = program.add_operator(self.type, inputs, outputs, attrs=attrs, domain=OWN)
        for state, new in zip(layout.states(inputs), outputs, strict=True):
            if state is not None and new is not None:
                program.set_update(state, new)
        return op

    def _group_attributes(self, program: Program, group: Group, pairs: ParamsGrads) -> dict[str, Any]:
        spared = without_decay(type(self).__name__, self.weight_decay_exclude, program)
        decays = [int(p.key not in spared and self._decays(p.name)) for p, _ in pairs]
        factor = {} if group.lr_factor == 1 else {"lr_factor": group.lr_factor}
        return {self.decay_attribute: group.weight_decay, "with_decay": decays, **factor}

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
    def _learning_rate(self, program: Program, startup: Program, found_inf: Variable | None) -> Variable:
        if self._rate is None or self._rate.program is not program:
            name = shared_name(program, "learning_rate")
            if isinstance(self.learning_rate, LRScheduler):
                self._rate = self._scheduled(program, startup, name, self.learning_rate, found_inf)
            else:
                self._rate = create_state(program, startup, name, "float32", [], self.learning_rate)
        return self._rate

    def _scheduled(self, program: Program, startup: Program, name: str, schedule: LRScheduler,
                   found_inf: Variable | None) -> Variable:  # fmt: skip
        """The rate that the program computes from its count of good steps, which is state."""
        step = create_state(program, startup, shared_name(program, "lr_step"), "int32", [], 0)
        rate, new = program.add_variable(name, "float32", ()), next_value(step)
        program.add_operator(LEARNING_RATE, [step], [rate, new], attrs={"schedule": schedule.description}, domain=OWN)
        rate.stop_gradient = True
        if found_inf is not None:
            new = gated_value(step, step, new, found_inf)
        program.set_update(step, new)
        self._lr_step = step
        return rate

    def set_lr(self, value: float, scope: Scope | None = None) -> None:
        """Let later steps use this learning rate.

        OrderError: before ``minimize``, or with a schedule. ScopeError: before the startup program ran.
        """
        owner = type(self).__name__
        rate = number(owner, "learning_rate", value, 0)
        if isinstance(self.learning_rate, LRScheduler):
            raise OrderError(
                f"{owner}.set_lr: the rate follows {self.learning_rate!r}, which the program computes anew at every "
                "step; give the optimizer a number to set it by hand"
            )
        if self._rate is None:
            raise OrderError(
                f"{owner}.set_lr before minimize: there is no learning rate to set yet; call minimize first"
            )
        scope = check_scope(scope)
        scope.find_var(self._rate.name)  # ScopeError: the startup program would overwrite what is set now
        scope.set_var(self._rate.name, np.array(rate, np.float32))

    def get_lr(self, scope: Scope | None = None) -> float:
        """The learning rate of the next step, by what the scope holds.

        The first one before ``minimize``, or before the startup program ran.
        """
        scope = check_scope(scope)
        state = self._rate if self._lr_step is None else self._lr_step
        known = state is not None and scope.has_var(state.name)
        found = scope.find_var(state.name) if known and state is not None else None
        if isinstance(self.learning_rate, LRScheduler):
            return self.learning_rate.value(0 if found is None else int(found))
        return self.learning_rate if found is None else float(found)


def latest_first(params_grads: ParamsGrads) -> ParamsGrads:
    """The pairs in the order for operators that read many gradients: the gradient that is computed last comes first.

    onnxruntime computes what a node reads from its last input on. So each gradient is computed when the backward pass
    reaches it, and frees the activations it reads; in another order, such as that of an exporter's initializers, they
    are kept until the whole pass has gone by.
    """
    return sorted(params_grads, key=lambda pair: -1 if pair[1].producer is None else pair[1].producer.key, reverse=True)


def split(params_grads: ParamsGrads, key: Callable[[Variable], Hashable]) -> list[ParamsGrads]:
    """The pairs in parts of equal ``key(parameter)``, in order."""
    parts: dict[Hashable, ParamsGrads] = {}
    for parameter, grad in params_grads:
        parts.setdefault(key(parameter), []).append((parameter, grad))
    return list(parts.values())


def clipped(params_grads: ParamsGrads, groups: dict[int, Group]) -> ParamsGrads:
    """The pairs with clipped gradients, in order; groups that share a clipping are clipped together."""
    found = {parameter.key: grad for parameter, grad in params_grads}
    for pairs in split(params_grads, lambda p: groups[p.key].clip_set):
        clip = groups[pairs[0][0].key].clip
        if clip is not None:
            new = clip.append([grad for _, grad in pairs])
            found |= {parameter.key: grad for (parameter, _), grad in zip(pairs, new, strict=True)}
    return [(parameter, found[parameter.key]) for parameter, _ in params_grads]


def checked_loss(loss: Variable) -> Variable:
    """``loss`` itself; ArgumentTypeError where it is no variable."""
    if not isinstance(loss, Variable):
        raise ArgumentTypeError(f"loss must be a Variable, not {type(loss).__name__}")
    return loss


def without_none(params_grads: Any) -> ParamsGrads:
    """The pairs with a gradient, with one warning that names the others; ArgumentError where all are None."""
    pairs = list(params_grads)
    none = [isinstance(pair, tuple) and len(pair) == 2 and pair[1] is None for pair in pairs]
    if any(none):
        names = ", ".join(
            f"'{getattr(pair[0], 'name', pair[0])}'" for pair, bad in zip(pairs, none, strict=True) if bad
        )
        if all(none):
            raise ArgumentError(f"params_grads: every gradient is None ({names}); there is nothing to update")
        warnings.warn(f"parameters without a gradient (None) are not updated: {names}", UserWarning, stacklevel=3)
    return [pair for pair, bad in zip(pairs, none, strict=True) if not bad]


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
