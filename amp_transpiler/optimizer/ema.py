"""Moving averages of the weights, kept by the training program beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amp_transpiler.errors import ArgumentTypeError, OrderError
from amp_transpiler.ir import context
from amp_transpiler.ir.nodes import UPDATE, Operator, Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.lists.paddle import paddle_arguments, paddle_attributes
from amp_transpiler.ops.training.average import AVERAGE
from amp_transpiler.ops.training.scaling import master_type
from amp_transpiler.optimizer.groups import number
from amp_transpiler.optimizer.state import (
    append_update,
    appending,
    create_copy,
    create_state,
    follow_dealt,
    owned_name,
    shared_name,
)
from amp_transpiler.option_checks import switch
from amp_transpiler.passes.step_check.check_step import check_step
from amp_transpiler.passes.view.training_step import TrainingStep, training_step
from amp_transpiler.program import Program, default_main_program, program_guard
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.runtime.shards import found_var


@paddle_arguments("ExponentialMovingAverage")
class ExponentialMovingAverage:
    """fp32 averages of the parameters, ``average += (1 - decay) * (parameter - average)`` after every good step.

    An average is the state ``<parameter>_ema_0``, of the fp32 master weight where the parameter has one. It starts
    as the parameter's initial value, so that its weights always sum to one and nothing has to be corrected for the
    start; ``decay^t`` of it is the initial value after ``t`` steps. With ``warmup`` the decay of step ``t`` (the first
    is 0) is ``min(decay, (1 + t) / (10 + t))``, the ``thres_steps`` rule of Paddle and TensorFlow, by which the initial
    value is forgotten within a few steps; the program counts the steps in ``ema_step_<n>``. A bad step leaves averages
    and counter as they are, bit for bit.

    Use::

        ema = amp.optimizer.ExponentialMovingAverage(0.999)
        optimizer.minimize(loss, startup)
        ema.update(main, startup)          # before the startup program runs
        ...
        with ema.applied(scope):
            exe.run(test_program, ...)     # with the averages

    Running statistics of normalisation are averages already, and parameters that are not trained have none.
    ArgumentError: ``decay`` is not in [0, 1).
    """

    def __init__(self, decay: float = 0.999, warmup: bool = False) -> None:
        self.warmup = switch("ExponentialMovingAverage: warmup", warmup)
        self.decay = number("ExponentialMovingAverage", "decay", decay, 0, 1)
        self._program: Program | None = None
        #: Average, parameter, and master weight (None: it has none), by name.
        self._rows: list[tuple[str, str, str | None]] = []

    if not TYPE_CHECKING:  # to a type checker an unknown name is an error
        __getattr__ = paddle_attributes("amp_transpiler.optimizer.ExponentialMovingAverage")

    def update(self, program: Program | None = None, startup_program: Program | None = None) -> Operator:
        """Append the averages of every parameter that ``program`` updates; returns the operator that moves them.

        Parameters that are updated by a later ``minimize`` or ``apply_gradients`` have none, and a warning names them.
        ``program`` is the current main program where it is left out.

        Their initial values are computed by ``startup_program`` (default: the program's own). OrderError: before
        ``minimize``, or a second time.
        """
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise ArgumentTypeError(f"ExponentialMovingAverage.update takes a program, got {program!r}")
        if self._program is not None:
            raise OrderError(
                f"this ExponentialMovingAverage follows program '{self._program.name}' already; make "
                "another one for another program"
            )
        step = training_step(program)
        if not step.updates:
            raise OrderError(
                f"ExponentialMovingAverage.update: program '{program.name}' updates no parameter yet; minimize it first"
            )
        with appending(program, startup_program, self) as startup:
            with program_guard(program, startup), context.operator_role(UPDATE):
                op = self._append(program, startup, step)
            if step.found_inf is not None:
                check_step(program)
            self._program = program
            return op

    def _append(self, program: Program, startup: Program, step: TrainingStep) -> Operator:
        count = None
        if self.warmup:
            count = create_state(program, startup, shared_name("ema_step", program, startup), "int32", [], 0)
        inputs: list[Variable | None] = [step.found_inf, count]
        for row in step.rows:
            assert row.parameter is not None
            name = owned_name(f"{row.parameter.name}_ema", program, startup)
            average = create_copy(program, startup, row.parameter, name, master_type(row.parameter.dtype))
            follow_dealt(startup, row.parameter, [average])
            inputs += [average, program.updates[row.parameter if row.master is None else row.master]]
            self._rows.append((name, row.parameter.name, None if row.master is None else row.master.name))
        return append_update(program, AVERAGE, inputs, {"decay": self.decay})

    @contextmanager
    def applied(self, scope: Scope | None = None) -> Iterator[Scope]:
        """Let the parameters in ``scope`` (default: the global one) be their averages inside, to evaluate, or to save
        for inference. A checkpoint has the averages beside the parameters: save it outside.

        A 16-bit parameter gets its average rounded to nearest. Afterwards, also after an error or Ctrl-C, the very
        values of before are back; train outside, where they are, also in other threads (what they train inside is
        lost, and ``save_checkpoint`` is an OrderError). Threads may be inside side by side: the values are back when
        the last one leaves. Where averages lie on several ranks (``amp.distributed.shard_optimizer``) all call it.
        OrderError: before ``update``. ScopeError: the startup program never ran.
        """
        scope, before = check_scope(scope), dict[str, Any]()
        try:
            with scope.writing():
                averages = self._values(scope)
                before |= {name: scope.ort_values[name] for name in averages}
                scope.replaced.append(before)
                scope.hold(averages)
            yield scope
        finally:
            try:
                _put_back(scope, before)
            finally:
                _put_back(scope, before)  # where Ctrl-C came in the first

    def copy_to(self, scope: Scope | None = None) -> None:
        """Give parameters, and master weights, the values of their averages for good; errors as of ``applied``."""
        scope = check_scope(scope)
        with scope.writing():
            averages = self._values(scope)
            averages |= {
                master: device_tensors.from_array(scope.find_var(name))
                for name, _, master in self._rows
                if master and master not in scope.elsewhere
            }
            scope.hold(averages)

    def _values(self, scope: Scope) -> dict[str, Any]:
        """The averages by parameter, each in the element type that the parameter has in the scope."""
        if self._program is None:
            raise OrderError("this ExponentialMovingAverage follows no program yet; call update(program) first")
        found = {}
        for name, parameter, _ in self._rows:
            dtype = device_tensors.dtype_of(scope.ort_value(parameter))
            dealt_out = self._program.var(name).owner is not None
            average = found_var(name, scope) if dealt_out else scope.find_var(name)
            found[parameter] = device_tensors.from_array(average.astype(numpy_dtype(dtype), copy=False))
        return found


def _put_back(scope: Scope, before: dict[str, Any]) -> None:
    """Let parameters have the values of ``before`` again; those that another thread has replaced, when that leaves."""
    with scope.writing():
        at = next((number for number, each in enumerate(scope.replaced) if each is before), None)
        if at is None:
            return
        inside = {name: later for later in reversed(scope.replaced[at + 1 :]) for name in later}
        for name in before.keys() & inside.keys():
            inside[name][name] = before[name]
        scope.hold({name: value for name, value in before.items() if name not in inside})
        del scope.replaced[at]
