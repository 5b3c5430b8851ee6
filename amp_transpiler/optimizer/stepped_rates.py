"""Schedules that Python computes when the user calls ``step()``: of a function, and of a metric.

The program holds their rate, as it holds a number that ``set_lr`` sets; where they stand is theirs to know, as in
``paddle.optimizer.lr``: ``state_dict()`` is saved beside a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.optimizer.lr_schedule import LRScheduler, count, rate, real
from amp_transpiler.option_checks import is_real, shown
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.warn import warn_user


class SteppedRate(LRScheduler):
    """Base of the schedules that calls of ``step()`` alone advance, outside of the program.

    Each call of ``step()`` puts the rate into the scope, for the runs that follow. ``last_epoch`` is where it starts,
    one before its first step, as in Paddle.
    """

    in_python = True

    def __init__(self, learning_rate: float, last_epoch: int = -1) -> None:
        super().__init__(learning_rate=rate(self, "learning_rate", learning_rate))
        self.base_lr = self._rate = float(learning_rate)
        self._by_user, self._epoch = True, 0
        first = count(self, "last_epoch", last_epoch, -1) + 1
        self._rate, self._epoch = self.value(first), first

    __eq__ = object.__eq__  # what it does next is in no description
    __hash__ = object.__hash__

    def step(self, epoch: int | None = None, scope: Scope | None = None) -> None:
        """Advance by one step, or to step ``epoch``, and put the rate into ``scope`` (default: the current one).

        OrderError: before the startup program ran.
        """
        scope = check_scope(scope)
        states = self._own_states_in(scope) if epoch is None else self._states_in(scope)
        now = self._epoch + 1 if epoch is None else count(self, "epoch", epoch, 0)
        self._rate, self._epoch = self.value(now), now
        self._write(scope, states)

    def _own_states_in(self, scope: Scope) -> list[str]:
        """The variables of the scope that follow this schedule; a warning where they do not stand where it stands, as
        after a checkpoint was loaded. OrderError where there is none."""
        states = self._states_in(scope)
        held = float(scope.find_var(states[0]))
        if held != np.float32(self._rate):
            warn_user(
                f"{type(self).__name__}.step: the scope holds the rate {held:g}, and this schedule stands at step "
                f"{self._epoch}, with {self._rate:g}, and goes on from there. A checkpoint has the rate alone: save "
                "state_dict() beside it, as with save_checkpoint(extra=schedule.state_dict()), and give it to "
                "set_state_dict after load_checkpoint"
            )
        return states

    def _write(self, scope: Scope, states: list[str]) -> None:
        for name in states:
            scope.set_var(name, np.array(self._rate, np.float32))

    @property
    def last_epoch(self) -> int:
        """The step that it stands at."""
        return self._epoch

    def get_lr(self, scope: Scope | None = None) -> float:
        """The rate of the next run."""
        return self._rate


class _ByFunction(SteppedRate):
    """A rate that follows from factors which a function gives."""

    def __init__(self, learning_rate: float, lr_lambda: Callable[[int], float], last_epoch: int = -1) -> None:
        self.lr_lambda = _function(self, lr_lambda)
        super().__init__(learning_rate, last_epoch)

    def _factor(self, step: int) -> float:
        return real(self, f"lr_lambda({step})", self.lr_lambda(step))


@paddle_arguments("optimizer.stepped")
class LambdaDecay(_ByFunction):
    """``learning_rate * lr_lambda(step)``; ``lr_lambda`` gets a whole number, the first being 0.

    A checkpoint has the rate alone: save ``state_dict()`` beside it, as its ``extra``.
    """

    def value(self, step: int) -> float:
        """The rate of step ``step``, the first being 0."""
        step = count(self, "step", step, 0)
        return rate(self, f"learning_rate * lr_lambda({step})", self.base_lr * self._factor(step))


@paddle_arguments("optimizer.stepped")
class MultiplicativeDecay(_ByFunction):
    """``learning_rate * lr_lambda(1) * … * lr_lambda(step)``; where it stands is saved as that of LambdaDecay."""

    def value(self, step: int) -> float:
        """The rate of step ``step``, the first being 0."""
        step = count(self, "step", step, 0)
        at, found = (self._epoch, self._rate) if step >= self._epoch else (0, self.base_lr)
        for each in range(at + 1, step + 1):  # on from where it stands: the factors before are not computed again
            found *= self._factor(each)
        return rate(self, f"the rate of step {step}", found)


@paddle_arguments("optimizer.stepped")
class ReduceOnPlateau(SteppedRate):
    """The rate times ``factor``, at least ``min_lr``, when a metric was not better for more than ``patience`` steps.

    ``step(metric)`` takes a number: a loss that falls (``mode="min"``), or a score that rises ("max"). Better means by
    ``threshold`` times the best one (``threshold_mode="rel"``), or by ``threshold`` ("abs"). For ``cooldown`` steps
    after a reduction nothing is counted. A difference of rates up to ``epsilon`` is none.

    A checkpoint has the rate alone: save ``state_dict()`` beside it, as its ``extra``.
    """

    def __init__(
        self,
        learning_rate: float,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0,
        epsilon: float = 1e-8,
    ) -> None:
        for name, given, taken in (("mode", mode, ("min", "max")), ("threshold_mode", threshold_mode, ("rel", "abs"))):
            if given not in taken:
                raise ArgumentError(f"ReduceOnPlateau: {name} is {given!r}; expected {taken[0]!r} or {taken[1]!r}")
        self.mode, self.threshold_mode = mode, threshold_mode
        self.factor = rate(self, "factor", factor)
        if self.factor >= 1:
            raise ArgumentError(f"ReduceOnPlateau: factor is {factor!r}; expected a number below 1")
        self.patience, self.cooldown = count(self, "patience", patience, 0), count(self, "cooldown", cooldown, 0)
        self.threshold = rate(self, "threshold", threshold)
        self.min_lr, self.epsilon = rate(self, "min_lr", min_lr), rate(self, "epsilon", epsilon)
        self.best: float | None = None
        self.num_bad_epochs = self.cooldown_counter = 0
        super().__init__(learning_rate)

    def value(self, step: int) -> float:
        """The present rate, whatever the step: metrics decide."""
        return self._rate

    def step(self, metrics: Any, epoch: int | None = None, scope: Scope | None = None) -> None:  # type: ignore[override]
        """Count a metric, a number or an array of one, and put the rate into ``scope`` (default: the current one)."""
        scope = check_scope(scope)
        states = self._own_states_in(scope)
        number = np.asarray(metrics)
        if number.size != 1 or number.dtype.kind not in "fiu":
            raise ArgumentTypeError(f"ReduceOnPlateau.step: metrics is {shown(metrics)}; expected one number")
        self._epoch = self._epoch + 1 if epoch is None else count(self, "epoch", epoch, 0)
        self._see(float(number.reshape(())))
        self._write(scope, states)

    def _see(self, metric: float) -> None:
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            return
        if self.best is None or self._is_better(metric, self.best):
            self.best, self.num_bad_epochs = metric, 0
        else:
            self.num_bad_epochs += 1
        if self.num_bad_epochs > self.patience:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
            reduced = max(self._rate * self.factor, self.min_lr)
            if self._rate - reduced > self.epsilon:
                self._rate = reduced

    def _is_better(self, metric: float, best: float) -> bool:
        margin = self.threshold * (best if self.threshold_mode == "rel" else 1)
        return metric < best - margin if self.mode == "min" else metric > best + margin

    def state_dict(self) -> dict[str, Any]:
        """The step, the rate, and what was counted."""
        counted = {name: getattr(self, name) for name in ("best", "num_bad_epochs", "cooldown_counter")}
        return {**super().state_dict(), **counted}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Put the schedule where ``state_dict`` found it, and its rate into the current scope."""
        missing = self.state_dict().keys() - (state if isinstance(state, Mapping) else {}).keys()
        if missing:
            raise ArgumentError(f"ReduceOnPlateau.set_state_dict: the state has no {', '.join(sorted(missing))}")
        epoch, *counted = (count(self, n, state[n], 0) for n in ("last_epoch", "num_bad_epochs", "cooldown_counter"))
        last, best = rate(self, "last_lr", state["last_lr"]), state["best"]
        if best is not None and not is_real(best):  # infinite, say
            raise ArgumentError(f"ReduceOnPlateau.set_state_dict: best is {shown(best)}; expected a number or None")
        scope = check_scope(None)
        states = self._states_in(scope)
        self._epoch, self._rate, self.best = epoch, last, best
        self.num_bad_epochs, self.cooldown_counter = counted
        self._write(scope, states)


def _function(owner: LRScheduler, given: Any) -> Callable[[int], float]:
    if not callable(given):
        raise ArgumentTypeError(f"{type(owner).__name__}: lr_lambda is {given!r}; expected a function of the step")
    return given  # type: ignore[no-any-return]
