"""What every learning-rate schedule is: a description that the program follows, and the step that it stands at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.ops.training.schedule import has_rule, rate_at
from amp_transpiler.option_checks import LARGEST_COUNT, is_finite, number, whole
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.warn import warn_user

_paddles_way = False
Schedule = TypeVar("Schedule", bound="LRScheduler")


def enable_static() -> None:
    """Follow Paddle's static mode where its meaning differs: schedules made from now on are stepped by the user.

    It is what ``schedule.by_user()`` does for one of them. Paddle's scripts begin with this call. Programs are static
    without it.
    """
    global _paddles_way
    _paddles_way = True


class LRScheduler:
    """Base of the schedules, those of ``amp.optimizer.lr``; ArgumentTypeError for a class of your own.

    Two of them are equal where they describe the same rates.

    A schedule advances by itself, one step for every good step of the optimizer. A call of :meth:`step` after each run
    then changes nothing, and gives Paddle's rates, who wants his schedule to advance by his calls alone, once an epoch
    for example, writes ``lr.StepDecay(0.1, 30).by_user()``.
    """

    #: Whether Python computes the rate, and the program holds a number.
    in_python = False

    def __init__(self, *base: Any, **description: Any) -> None:
        owner = type(self).__name__
        if base or not (self.in_python or has_rule(owner)):
            raise ArgumentTypeError(
                f"{owner} is no schedule of amp.optimizer.lr, and a program cannot hold a Python function; write "
                "LambdaDecay(rate, function), which your calls of step() advance, or give the optimizer a number and "
                "call optimizer.set_lr(rate) before each run"
            )
        self._description = {"type": owner, **description}
        self._by_user = _paddles_way
        #: Variables that hold the step, in the programs that follow this schedule.
        self._states: list[str] = []
        self._seen: WeakKeyDictionary[Scope, int] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_seen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _seen=WeakKeyDictionary())  # scopes stay in their process

    # -- the rule ------------------------------------------------------------------------------------
    def value(self, step: int) -> float:
        """The rate of step ``step`` (the first is 0), in float64; infinite where it is beyond all numbers.

        The program computes it in fp32, of the step in fp32, which is exact up to 2**24 steps.
        """
        return float(rate_at(self._description, float(count(self, "step", step, 0))))

    @property
    def description(self) -> str:
        """The schedule as JSON, as the program's ``LearningRate`` operator holds it."""
        return json.dumps(self._description)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LRScheduler) and self._description == other._description

    def __hash__(self) -> int:
        return hash(self.description)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._description.items() if name != "type")
        return f"{type(self).__name__}({given})"

    # -- where it stands -----------------------------------------------------------------------------
    def by_user(self: Schedule) -> Schedule:
        """This schedule, advanced by calls of :meth:`step` alone. OrderError: it is built into a program already."""
        if self._states and not self._by_user:
            raise OrderError(f"{type(self).__name__}.by_user after minimize: the program advances it already")
        self._by_user = True
        return self

    @property
    def stepped_by_user(self) -> bool:
        """Whether calls of :meth:`step` alone advance it."""
        return self._by_user

    def follow(self, state: str) -> None:
        """Note a variable that holds the step, or the rate where Python computes it: an optimizer's call, when it
        builds the schedule into a program."""
        self._states.append(state)

    def step(self, epoch: int | None = None, scope: Scope | None = None) -> None:
        """Advance a schedule ``by_user`` by one step; put any schedule at step ``epoch`` where one is given.

        The step lies in ``scope`` (default: the current one), as all state of training does. A schedule that the
        program advances is left alone; OrderError where the program took more than one step since the last call, since
        the rates then are not those of a schedule that is stepped by hand. OrderError: before the startup program ran.
        """
        scope = check_scope(scope)
        states = self._states_in(scope)
        if epoch is not None:
            self._put(scope, states, count(self, "epoch", epoch, 0))
        elif self._by_user:
            self._put(scope, states, int(scope.find_var(states[-1])) + 1)
        else:
            self._check_pace(scope, int(scope.find_var(states[-1])))

    def _states_in(self, scope: Scope) -> list[str]:
        """The variables of the scope that follow this schedule; OrderError where there is none."""
        states = [name for name in self._states if scope.has_var(name)]
        if not states:
            raise OrderError(
                f"{type(self).__name__}.step: the scope holds no step of this schedule; minimize with it, "
                "and run the startup program, first; if that ran into a scope of its own, pass scope="
            )
        return states

    def _put(self, scope: Scope, states: Sequence[str], step: int) -> None:
        for name in states:
            scope.set_var(name, np.array(step, np.int32))
        self._seen[scope] = step

    def _check_pace(self, scope: Scope, now: int) -> None:
        before = self._seen.get(scope)
        self._seen[scope] = now
        taken = now - (before or 0)
        if taken <= 1:
            return
        owner = type(self).__name__
        advice = (
            f"a schedule advances by itself, one step for every good step of the optimizer. For one that your "
            f"calls of step() advance, once an epoch for example, write {owner}(...).by_user()"
        )
        if before is not None:
            raise OrderError(f"{owner}.step: the program took {taken} steps since the last call; {advice}")
        warn_user(
            f"{owner}.step: the program stands at step {now} at the first call. Where it went on from a "
            f"checkpoint that is right; otherwise, {advice}"
        )

    @property
    def last_epoch(self) -> int:
        """The step that the current scope holds; 0 before the startup program ran."""
        return self._now(None)

    def get_lr(self, scope: Scope | None = None) -> float:
        """The rate of the next step, by what the scope holds; the first one before the startup program ran."""
        return self.value(self._now(scope))

    def __call__(self) -> float:
        return self.get_lr()

    @property
    def last_lr(self) -> float:
        """``get_lr()``, by its name in Paddle."""
        return self.get_lr()

    def _now(self, scope: Scope | None) -> int:
        scope = check_scope(scope)
        found = [name for name in self._states if scope.has_var(name)]
        return int(scope.find_var(found[-1])) if found else 0

    def state_dict(self) -> dict[str, Any]:
        """The step and its rate. A checkpoint of the program holds the step as well."""
        return {"last_epoch": self.last_epoch, "last_lr": self.get_lr()}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Put the schedule where ``state_dict`` found it, in the current scope; ArgumentError for anything else."""
        if not isinstance(state, Mapping) or "last_epoch" not in state:
            raise ArgumentError(f"{type(self).__name__}.set_state_dict takes what state_dict gave, got {state!r:.80}")
        self.step(state["last_epoch"])


# -- arguments -----------------------------------------------------------------------------------------------
def real(owner: Any, name: str, value: Any) -> float:
    if not is_finite(value):
        raise ArgumentError(f"{type(owner).__name__}: {name} is {value!r}; expected a number")
    return float(value)


def rate(owner: Any, name: str, value: Any) -> float:
    if isinstance(value, LRScheduler):
        raise ArgumentTypeError(
            f"{type(owner).__name__}: {name} is a schedule; of the schedules, LinearWarmup alone wraps another one"
        )
    number(f"{type(owner).__name__}: {name}", value, taken=True)
    return float(value)


def positive(owner: Any, name: str, value: Any) -> float:
    number(f"{type(owner).__name__}: {name}", value)
    return float(value)


def count(owner: Any, name: str, value: Any, low: int) -> int:
    whole(f"{type(owner).__name__}: {name}", value, low, LARGEST_COUNT)
    return int(value)


def listed(owner: Any, name: str, value: Any) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentTypeError(f"{type(owner).__name__}: {name} is {value!r}; expected a list")
    return list(value)
