"""The loss scale of a program: its state variables, what moves them, and their values in a scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.ir import context
from amp_transpiler.ir.nodes import SCALING, Variable
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.ops.training.scaling import COUNT_BAD
from amp_transpiler.optimizer.loss_scaling import append_scale_update
from amp_transpiler.optimizer.scaler import LossScale, LossScaler
from amp_transpiler.optimizer.state import append_update, create_state, shared_name
from amp_transpiler.option_checks import is_real, is_whole
from amp_transpiler.program import Program
from amp_transpiler.runtime.scope import Scope, check_scope


@dataclass(frozen=True)
class ScaleState:
    """State variables of shape [1]: the scale fp32, the counts int32. A count that the scaler does not use is None."""

    scale: Variable
    good: Variable | None = None
    bad: Variable | None = None
    bad_in_a_row: Variable | None = None
    loss_bad_in_a_row: Variable | None = None
    bad_at_floor: Variable | None = None

    @classmethod
    def create(cls, program: Program, startup: Program, scaler: LossScaler) -> ScaleState:
        """Add the variables of ``scaler`` to the program, initialised by the startup program."""

        def state(name: str, dtype: str, value: float, wanted: bool = True) -> Variable | None:
            if not wanted:
                return None
            return create_state(program, startup, shared_name(name, program, startup), dtype, [1], value)

        scale = state("loss_scaling", "float32", scaler.init_scale)
        assert scale is not None
        return cls(
            scale,
            state("num_good_steps", "int32", -scaler.growth_delay, scaler.dynamic),
            state("num_bad_steps", "int32", 0, scaler.dynamic),
            state("bad_in_a_row", "int32", 0, scaler.alarm),
            state("loss_bad_in_a_row", "int32", 0, scaler.alarm),
            state("bad_at_floor", "int32", 0, scaler.error_at_floor),
        )

    def _fields(self) -> dict[str, Variable | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    # -- in the program ------------------------------------------------------------------------------
    def append(self, scaler: LossScaler, found_inf: Variable, losses: Sequence[Variable]) -> None:
        """Append what moves the scale and the counts, once a step. ``losses``: float variables, not scaled."""
        if self.good is not None and self.bad is not None:
            attrs = {**scaler.attributes(), "stop_update": False}
            append_scale_update([], found_inf, [self.scale, self.good, self.bad], attrs)
        if self.bad_in_a_row is None or self.loss_bad_in_a_row is None:
            return
        counts = [self.bad_in_a_row, self.loss_bad_in_a_row, self.bad_at_floor]
        rule = scaler.attributes() if self.bad_at_floor is not None else {}
        attrs = {name: rule[name] for name in ("floor", "decr_every_n_nan_or_inf", "at_least") if name in rule}
        scale, bad = (self.scale, self.bad) if rule else (None, None)
        with context.operator_role(SCALING):
            append_update(found_inf.program, COUNT_BAD, [found_inf, scale, bad, *counts, *losses], attrs)

    # -- in a scope ----------------------------------------------------------------------------------
    def read(self, scope: Scope | None = None) -> LossScale:
        """The record in a scope. ScopeError where the startup program never ran."""
        scope = check_scope(scope)
        with scope.reading():
            record: dict[str, float | int | None] = {
                name: None if variable is None else scope.find_var(variable.name).reshape(()).item()
                for name, variable in self._fields().items()
            }
        return LossScale(**record)  # type: ignore[arg-type]

    def write(self, record: LossScale, scope: Scope | None = None) -> None:
        """Put a record into a scope.

        ArgumentTypeError: no LossScale. ArgumentError: it lacks a count of this scaler, or has one of another, or a
        number is out of range. OrderError: another scale inside of a window of accumulation.
        """
        scope = check_scope(scope)
        if not isinstance(record, LossScale):
            raise ArgumentTypeError(f"the state of a loss scale is a LossScale, not {record!r}")
        if not is_real(record.scale) or not LIMITS["float32"].holds(record.scale):
            raise ArgumentError(f"the loss scale is {record.scale!r}; expected a positive number that fp32 holds")
        own = self._fields()
        wrong = [name for name, variable in own.items() if (variable is None) != (getattr(record, name) is None)]
        if wrong:
            raise ArgumentError(
                f"{record} is the state of another loss scaler: this one "
                f"{'has' if own[wrong[0]] is not None else 'has no'} {wrong[0]}"
            )
        for name, variable in own.items():
            count = getattr(record, name)
            if variable is not None and name != "scale" and not (is_whole(count) and -(2**31) <= count < 2**31):
                raise ArgumentError(f"the count '{name}' of a loss scale is {count!r:.80}; expected a number of int32")
        self._check_window(record.scale, scope)
        with scope.writing():
            for name, variable in own.items():
                if variable is not None:
                    dtype = np.float32 if name == "scale" else np.int32
                    scope.set_var(variable.name, np.array([getattr(record, name)], dtype))

    def _check_window(self, scale: float, scope: Scope) -> None:
        """OrderError where gradients that were multiplied by another scale are added up."""
        window = self.scale.program.accumulation
        if window is None or not all(scope.has_var(v.name) for v in (window.counter, self.scale)):
            return
        done, now = (scope.find_var(v.name).item() for v in (window.counter, self.scale))
        if done and now != np.float32(scale):
            raise OrderError(
                f"the loss scale is {now:g} in a window of gradient accumulation, of which {done} of {window.steps} "
                f"runs are done; set it to {scale:g} when the window is over"
            )
