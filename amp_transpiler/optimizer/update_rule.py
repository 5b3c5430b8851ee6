"""How an optimizer updates parameters: groups, learning rate, clipping, state, one operator for parameters alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError, OrderError
from amp_transpiler.ir import context
from amp_transpiler.ir.nodes import OWN, UPDATE, Operator, Variable
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.ops.training.scaling import master_type
from amp_transpiler.ops.training.schedule import LEARNING_RATE
from amp_transpiler.ops.training.update import sparse_update
from amp_transpiler.optimizer.gradient_clip import GradientClip
from amp_transpiler.optimizer.groups import (
    Group,
    assigned,
    checked_clip,
    number,
    parsed,
    with_own_settings,
    without_decay,
)
from amp_transpiler.optimizer.lr import LRScheduler
from amp_transpiler.optimizer.pairs import ParamsGrads, checked_pairs, latest_first, split, warn_unaveraged
from amp_transpiler.optimizer.sharding import deal_out
from amp_transpiler.optimizer.state import (
    append_update,
    create_master,
    create_state,
    follow_dealt,
    gated_value,
    initial_value,
    next_value,
    owned_name,
    shared_name,
    static_shape,
)
from amp_transpiler.option_checks import shown, strings, switch
from amp_transpiler.passes.autodiff.sparse_gradient import append_dense
from amp_transpiler.program import Program, program_guard
from amp_transpiler.regularizer import Decay, L1Decay, L2Decay, checked_decay
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.warn import warn_user

Parameters = Sequence[Variable | str] | Sequence[dict[str, Any]] | None


@paddle_arguments("optimizer.parameters", "optimizer.penalty")
class UpdateRule:
    """What an :class:`~.base.Optimizer` is without the backward pass; arguments and errors are described there."""

    type: str = ""
    #: The attribute of the update operator that holds the decay.
    decay_attribute: str = "l2_decay"
    #: Whether ``weight_decay`` is a penalty, added to the gradient.
    penalises: bool = True
    #: Whether, without decay, rows of a parameter with no gradient keep their value and state.
    keeps_rows: bool = False
    #: Whether rows of a sparse gradient alone take a step, where others would change too.
    lazy_mode: bool = False
    #: Whether masters and accumulators are dealt out among the ranks; see ``amp.distributed.shard_optimizer``.
    shard_state: bool = False
    _rate: Variable | None = None

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        parameter_list: Parameters = None,
        weight_decay: float | L2Decay | L1Decay | None = None,
        grad_clip: GradientClip | None = None,
        multi_precision: bool = False,
        name: str | None = None,
        *,
        weight_decay_exclude: Sequence[str] = (),
    ) -> None:
        owner = type(self).__name__
        self.learning_rate = learning_rate
        self.weight_decay: Decay = checked_decay(owner, weight_decay, self.penalises)
        self.grad_clip = checked_clip(owner, grad_clip)
        self.parameter_list = parameter_list
        self.weight_decay_exclude = strings(f"{owner}: weight_decay_exclude", weight_decay_exclude)
        self.multi_precision = switch(f"{owner}: multi_precision", multi_precision)
        if name is not None and not isinstance(name, str):
            raise ArgumentTypeError(f"{owner}: name is {shown(name)}; expected a string")
        self.name = name or self.type.lower()
        self._lr_step: Variable | None = None
        self._warned = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self._rate is not None and not name.startswith("_") and name != "learning_rate":
            owner = type(self).__name__
            raise OrderError(
                f"{owner}.{name} is built into program '{self._rate.program.name}' already; set it before minimize, or "
                f"make another {owner}; later only learning_rate can be set"
            )
        super().__setattr__(name, value)

    @property
    def parameter_list(self) -> list[Variable | str] | None:
        """The parameters to update, those of all groups; None for all that are trainable."""
        items = [group.items for group in self._groups()]
        return None if items == [None] else [item for some in items for item in some or ()]

    @parameter_list.setter
    def parameter_list(self, given: Parameters) -> None:
        self._given = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, dict)) else given
        self._groups()  # raises for what is no list of parameters

    def _groups(self) -> list[Group]:
        owner = type(self).__name__
        decay = checked_decay(owner, self.weight_decay, self.penalises)
        return parsed(owner, self._given, decay, checked_clip(owner, self.grad_clip), self.penalises)

    # -- for subclasses ------------------------------------------------------------------------------
    def _attributes(self) -> dict[str, Any]:
        """Attributes of the update operator beside those of its group."""
        return {}

    def _decays(self, name: str) -> bool:
        """Whether the parameter of this name decays, beside ``weight_decay_exclude``."""
        return True

    def _accumulator(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        """The shape and the initial value of an accumulator of a parameter of this shape."""
        return shape, 0

    @property
    def _operator(self) -> str:
        """The type of the update operator."""
        return self.type

    def _initial(self, scalar: str) -> float:
        """The initial value of a shared scalar."""
        raise NotImplementedError

    def _rate_factor(self, parameter: Variable) -> float:
        """What the learning rate of a parameter is multiplied by, beside the factor of its group."""
        return 1.0

    # -- in a program --------------------------------------------------------------------------------
    @property
    def parts(self) -> tuple[object, ...]:
        """The objects that building a step changes: this one, and its schedule where it has one."""
        return (self, self.learning_rate) if isinstance(self.learning_rate, LRScheduler) else (self,)

    def append_updates(
        self, params_grads: ParamsGrads, startup: Program, found_inf: Variable | None = None
    ) -> list[Operator]:
        """Append clipping and the update of [(parameter, unscaled gradient)]; one operator for parameters alike.

        New state is initialised in ``startup``. With ``found_inf`` (bool, shape [1]) nothing changes where it is true.
        Where this raises, the programs are left half built; ``apply_gradients`` puts them back. ArgumentError: no group
        has one of these parameters. GraphError: a parameter is updated already, or not initialised.
        """
        program = checked_pairs(params_grads)
        given = [parameter for parameter, _ in params_grads]
        groups = assigned(type(self).__name__, self._groups(), program, given)
        groups = with_own_settings(type(self).__name__, groups, given, self.penalises)
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
        with program_guard(program, startup), context.operator_role(UPDATE):
            params_grads = self._whole_where_needed(program, clipped(params_grads, groups), groups)
            some = {parameter.key for parameter, grad in params_grads if grad.rows is not None}
            if self.shard_state:
                self._deal_out(program, params_grads)
            alike = split(params_grads, lambda p: (self._factor(p, groups), groups[p.key].weight_decay, p.key in some))
            warn_unaveraged(program, [parameter for parameter, _ in params_grads])
            rate = self._learning_rate(program, startup, found_inf)
            return [self._append_update(program, startup, groups, pairs, rate, found_inf) for pairs in alike]

    def _deal_out(self, program: Program, params_grads: ParamsGrads) -> None:
        """Give each parameter of which an update keeps something an owner."""
        slots = slots_of(self._operator)
        assert slots is not None
        apart = [p for p, grad in params_grads if grad.rows is None and p.dealt is None]
        deal_out(program, [p for p in apart if slots.accumulators or self._has_master(p)])

    def _has_master(self, parameter: Variable) -> bool:
        return self.multi_precision and parameter.dtype in HALF

    def _factor(self, parameter: Variable, groups: dict[int, Group]) -> float:
        return groups[parameter.key].lr_factor * self._rate_factor(parameter)

    def _whole_where_needed(self, program: Program, params_grads: ParamsGrads, groups: dict[int, Group]) -> ParamsGrads:
        """The pairs, sparse gradients made whole where rows without a gradient change too."""
        eager = [f"'{p.name}'" for p, grad in params_grads if self.lazy_mode and p.sparse and grad.rows is None]
        if eager:
            warn_user(
                f"{type(self).__name__}: lazy_mode makes no difference to {', '.join(eager)}: the gradient is of the "
                "whole table, since accumulate_steps adds it up there or another operator reads the table"
            )
        spared = without_decay(type(self).__name__, self.weight_decay_exclude, program)
        found: ParamsGrads = []
        for parameter, grad in params_grads:
            if grad.rows is not None and not self.lazy_mode:
                decays = groups[parameter.key].weight_decay and parameter.key not in spared
                if not self.keeps_rows or (decays and self._decays(parameter.name)):
                    grad = append_dense(grad, f"{parameter.name}@GRAD@DENSE")
            found.append((parameter, grad))
        return found

    def _append_update(
        self,
        program: Program,
        startup: Program,
        groups: dict[int, Group],
        pairs: ParamsGrads,
        rate: Variable,
        found_inf: Variable | None,
    ) -> Operator:
        type_ = self._operator
        if pairs[0][1].rows is not None:
            type_ = sparse_update(type_) or type_
        dealt = next((parameter for parameter, _ in pairs if parameter.dealt is not None), None)
        if dealt is not None and sparse_update(self._operator) is None:
            raise ArgumentError(
                f"{type(self).__name__} takes norms of whole parameters, and the rows of '{dealt.name}' are "
                "dealt out among the ranks; train it with another optimizer, or leave it out of shard_tables"
            )
        slots = slots_of(type_)
        if slots is None:
            raise ArgumentError(
                f"{type(self).__name__}: nothing is known of the update operator {type_!r}, which its attribute 'type' "
                "names; declare its formula with @update_rule (docs/optimizers.md)"
            )
        inputs: list[Variable | None] = [found_inf, rate]
        for scalar in slots.outputs:
            name = shared_name(f"{self.name}_{scalar}", program, startup)
            inputs.append(create_state(program, startup, name, "float32", [1], self._initial(scalar)))
        for parameter, grad in pairs:
            inputs += self._row(program, startup, slots, parameter, grad)
        attrs = {"n": len(pairs), **self._attributes(), **self._group_attributes(program, groups, pairs)}
        return append_update(program, type_, inputs, attrs)

    def _group_attributes(self, program: Program, groups: dict[int, Group], pairs: ParamsGrads) -> dict[str, Any]:
        spared = without_decay(type(self).__name__, self.weight_decay_exclude, program)
        decays = [int(p.key not in spared and self._decays(p.name)) for p, _ in pairs]
        first = pairs[0][0]
        decay, factor = groups[first.key].weight_decay, self._factor(first, groups)
        penalty = {"l1_decay": decay.coeff} if isinstance(decay, L1Decay) else {self.decay_attribute: decay}
        return {**penalty, "with_decay": decays, **({} if factor == 1 else {"lr_factor": factor})}

    def _row(
        self, program: Program, startup: Program, slots: Slots, parameter: Variable, grad: Variable
    ) -> list[Variable | None]:
        master = None
        if self._has_master(parameter):
            master = create_master(program, startup, parameter)
        elif parameter.dtype in HALF:
            self.warn_low_precision(f"parameter '{parameter.name}' is {parameter.dtype}")
        prefix = (parameter if master is None else master).name
        accumulators = [
            create_state(
                program,
                startup,
                owned_name(f"{prefix}_{kind}", program, startup),
                master_type(parameter.dtype),
                *self._accumulator(static_shape(parameter)),
                parameter.owner,
            )
            for kind in slots.accumulators
        ]
        follow_dealt(startup, parameter, [*accumulators, master])
        rows = [] if grad.rows is None else [grad.rows]
        return [parameter, grad, *rows, *accumulators, master]

    def warn_low_precision(self, what: str) -> None:
        """Warn, once, that small updates of 16-bit parameters are lost."""
        if not self._warned:
            warn_user(
                f"{type(self).__name__} without multi_precision: {what}, so updates smaller than half of its last "
                "digit are lost and training may stall. Pass multi_precision=True to the optimizer"
            )
        self._warned = True

    # -- learning rate -------------------------------------------------------------------------------
    @property
    def learning_rate(self) -> float | LRScheduler:
        """The rate or schedule given last. Setting a number after ``minimize`` is ``set_lr(number)``."""
        return self._given_rate

    @learning_rate.setter
    def learning_rate(self, value: float | LRScheduler) -> None:
        owner = type(self).__name__
        if isinstance(value, str):
            raise ArgumentError(
                f"{owner}: learning_rate is {value!r}; expected a number, or a schedule, such as "
                "amp.optimizer.lr.CosineAnnealingDecay(0.1, T_max=100)"
            )
        if self._rate is None:
            scheduled = isinstance(value, LRScheduler)
            self._given_rate: float | LRScheduler = value if scheduled else number(owner, "learning_rate", value, 0)
        elif isinstance(value, LRScheduler):
            raise OrderError(
                f"{owner}.learning_rate is built into program '{self._rate.program.name}' already, which "
                "takes no schedule any more; set it before minimize"
            )
        else:
            self.set_lr(value)

    def _learning_rate(self, program: Program, startup: Program, found_inf: Variable | None) -> Variable:
        if self._rate is None or self._rate.program is not program:
            name, given = shared_name("learning_rate", program, startup), self.learning_rate
            if isinstance(given, LRScheduler) and not given.in_python:
                self._rate = self._scheduled(program, startup, name, given, found_inf)
            else:
                self._rate = create_state(program, startup, name, "float32", [], _first(given))
                if isinstance(given, LRScheduler):
                    given.follow(name)
        return self._rate

    def _scheduled(
        self, program: Program, startup: Program, name: str, schedule: LRScheduler, found_inf: Variable | None
    ) -> Variable:
        """The rate that the program computes from its count of good steps, which is state."""
        step = create_state(program, startup, shared_name("lr_step", program, startup), "int32", [], 0)
        rate, new = program.add_variable(name, "float32", ()), next_value(step)
        schedule.follow(step.name)
        program.add_operator(LEARNING_RATE, [step], [rate, new], attrs={"schedule": schedule.description}, domain=OWN)
        rate.stop_gradient = True
        if not schedule.stepped_by_user:
            gated = new if found_inf is None else gated_value(step, step, new, found_inf)
            program.set_update(step, gated)
        self._lr_step = step
        return rate

    def set_lr(self, value: float, scope: Scope | None = None) -> None:
        """Let later steps use this learning rate: before ``minimize`` of every scope, afterwards of ``scope``.

        ``scope``: the current one by default. OrderError: with a schedule. ScopeError: after ``minimize``, before the
        startup program ran.
        """
        owner = type(self).__name__
        rate = number(owner, "learning_rate", value, 0)
        if isinstance(self.learning_rate, LRScheduler):
            raise OrderError(
                f"{owner}.set_lr: the rate follows {self.learning_rate!r}, which gives it anew at every step; give the "
                "optimizer a number to set it by hand"
            )
        if self._rate is not None:
            scope = check_scope(scope)
            scope.find_var(self._rate.name)  # ScopeError: the startup program would overwrite what is set now
            scope.set_var(self._rate.name, np.array(rate, np.float32))
        self._given_rate = rate

    def get_lr(self, scope: Scope | None = None) -> float:
        """The learning rate of the next step, by what the scope holds.

        The first one before ``minimize``, or before the startup program ran.
        """
        scope = check_scope(scope)
        state = self._rate if self._lr_step is None else self._lr_step
        known = state is not None and scope.has_var(state.name)
        found = scope.find_var(state.name) if known and state is not None else None
        if isinstance(self.learning_rate, LRScheduler) and not self.learning_rate.in_python:
            return self.learning_rate.value(0 if found is None else int(found))
        return _first(self.learning_rate) if found is None else float(found)


def _first(given: float | LRScheduler) -> float:
    """The rate that a program begins with where it holds a number."""
    return given.get_lr() if isinstance(given, LRScheduler) else given


def clipped(params_grads: ParamsGrads, groups: dict[int, Group]) -> ParamsGrads:
    """The pairs with clipped gradients, in order; groups that share a clipping are clipped together."""
    found = {parameter.key: grad for parameter, grad in params_grads}
    for pairs in split(params_grads, lambda p: groups[p.key].clip_set):
        clip = groups[pairs[0][0].key].clip
        if clip is not None:
            new = clip.append([grad for _, grad in pairs])
            found |= {parameter.key: grad for (parameter, _), grad in zip(pairs, new, strict=True)}
    return [(parameter, found[parameter.key]) for parameter, _ in params_grads]
