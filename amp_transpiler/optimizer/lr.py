"""Learning-rate schedules, as state in the program: ``Adam(learning_rate=lr.CosineAnnealingDecay(0.1, T_max=100))``.

The program holds the number of good steps, ``lr_step_<n>`` (int32), and computes the rate of a step from it. A bad
step leaves both as they are, bit for bit; who copies the scope copies the schedule. Every schedule is closed-form:
``value(step)`` gives the rate of any step, the first being 0, by the rule that the program follows. Names, arguments
and formulas are those of ``paddle.optimizer.lr``, evaluated once for every step of the optimizer.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError
from ..ops.schedule import rate_at


class LRScheduler:
    """Base of the schedules. Two of them are equal where they describe the same rates."""

    def __init__(self, **description: Any) -> None:
        self._description = {"type": type(self).__name__, **description}

    def value(self, step: int) -> float:
        """The rate of step ``step`` (the first is 0), in float64; the program computes it in fp32."""
        return float(rate_at(self._description, float(_count(self, "step", step, 0))))

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


class Constant(LRScheduler):
    """``learning_rate`` at every step."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__(learning_rate=_rate(self, "learning_rate", learning_rate))


class PiecewiseDecay(LRScheduler):
    """``values[i]`` while ``step < boundaries[i]``, the last value from the last boundary on.

    ``boundaries`` are ascending steps; there is one value more than boundaries.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]) -> None:
        steps = [_count(self, "boundaries", b, 1) for b in _list(self, "boundaries", boundaries)]
        rates = [_rate(self, "values", v) for v in _list(self, "values", values)]
        if not steps or any(b <= a for a, b in pairwise(steps)):
            raise ArgumentError(f"PiecewiseDecay: boundaries are {steps}; expected ascending steps")
        if len(rates) != len(steps) + 1:
            raise ArgumentError(
                f"PiecewiseDecay: {len(steps)} boundaries need {len(steps) + 1} values, and there are {len(rates)}"
            )
        super().__init__(boundaries=steps, values=rates)


class LinearWarmup(LRScheduler):
    """``start_lr + (end_lr - start_lr) * step / warmup_steps`` for ``warmup_steps`` steps, then ``learning_rate``.

    ``learning_rate`` is a number or another schedule, which begins with its step 0 when the warm-up is over.
    """

    def __init__(self, learning_rate: float | LRScheduler, warmup_steps: int, start_lr: float, end_lr: float) -> None:
        after = learning_rate if isinstance(learning_rate, LRScheduler) else Constant(learning_rate)
        super().__init__(
            learning_rate=after._description,
            warmup_steps=_count(self, "warmup_steps", warmup_steps, 1),
            start_lr=_rate(self, "start_lr", start_lr),
            end_lr=_rate(self, "end_lr", end_lr),
        )


class CosineAnnealingDecay(LRScheduler):
    """``eta_min + (learning_rate - eta_min) / 2 * (1 + cos(pi * step / T_max))`` (Loshchilov and Hutter, 2016).

    There are no restarts: after ``T_max`` steps the rate rises along the cosine again, as in Paddle and torch.
    """

    def __init__(self, learning_rate: float, T_max: int, eta_min: float = 0.0) -> None:
        super().__init__(
            learning_rate=_rate(self, "learning_rate", learning_rate),
            T_max=_count(self, "T_max", T_max, 1),
            eta_min=_rate(self, "eta_min", eta_min),
        )


class PolynomialDecay(LRScheduler):
    """``end_lr + (learning_rate - end_lr) * (1 - min(step, decay_steps) / decay_steps) ** power``.

    With ``cycle``, ``decay_steps`` is instead multiplied by ``max(1, ceil(step / decay_steps))``.
    """

    def __init__(self, learning_rate: float, decay_steps: int, end_lr: float = 0.0001, power: float = 1.0,
                 cycle: bool = False) -> None:  # fmt: skip
        super().__init__(
            learning_rate=_rate(self, "learning_rate", learning_rate),
            decay_steps=_count(self, "decay_steps", decay_steps, 1),
            end_lr=_rate(self, "end_lr", end_lr),
            power=_positive(self, "power", power),
            cycle=_flag(self, "cycle", cycle),
        )


class NoamDecay(LRScheduler):
    """``learning_rate * d_model ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5)``, 0 at step 0.

    The rate of "Attention is all you need" (Vaswani et al., 2017).
    """

    def __init__(self, d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> None:
        super().__init__(
            d_model=_count(self, "d_model", d_model, 1),
            warmup_steps=_count(self, "warmup_steps", warmup_steps, 1),
            learning_rate=_rate(self, "learning_rate", learning_rate),
        )


class OneCycleLR(LRScheduler):
    """Up from ``max_learning_rate / divide_factor`` to the maximum, and down to ``end_learning_rate``.

    The policy of Smith and Topin (2017), over ``total_steps`` steps; it stays at the end rate after them. It rises
    until step ``phase_pct * total_steps - 1``. With ``three_phase`` it falls to the initial rate in as many steps,
    and then to the end rate. ``anneal_strategy`` is "cos" or "linear".
    """

    def __init__(self, max_learning_rate: float, total_steps: int, divide_factor: float = 25.0,
                 end_learning_rate: float = 0.0001, phase_pct: float = 0.3, anneal_strategy: str = "cos",
                 three_phase: bool = False) -> None:  # fmt: skip
        total = _count(self, "total_steps", total_steps, 2)
        share = _positive(self, "phase_pct", phase_pct)
        rises = share * total - 1
        if anneal_strategy not in ("cos", "linear"):
            raise ArgumentError(f"OneCycleLR: anneal_strategy is {anneal_strategy!r}; expected 'cos' or 'linear'")
        if not 0 < rises < ((total - 1) / 2 if _flag(self, "three_phase", three_phase) else total - 1):
            raise ArgumentError(f"OneCycleLR: phase_pct is {phase_pct!r} of {total} steps; every phase must be longer "
                                f"than one step, and the phases no longer than the cycle")  # fmt: skip
        super().__init__(
            max_learning_rate=_rate(self, "max_learning_rate", max_learning_rate),
            total_steps=total,
            divide_factor=_positive(self, "divide_factor", divide_factor),
            end_learning_rate=_rate(self, "end_learning_rate", end_learning_rate),
            phase_pct=share,
            anneal_strategy=anneal_strategy,
            three_phase=three_phase,
        )


# -- arguments -----------------------------------------------------------------------------------------------
def _real(owner: LRScheduler, name: str, value: Any, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ArgumentError(f"{type(owner).__name__}: {name} is {value!r}; expected {wanted}")
    return float(value)


def _rate(owner: LRScheduler, name: str, value: Any) -> float:
    if isinstance(value, LRScheduler):
        raise ArgumentTypeError(f"{type(owner).__name__}: {name} is a schedule; of the schedules, LinearWarmup alone "
                                "wraps another one")  # fmt: skip
    rate = _real(owner, name, value, "a number >= 0")
    if rate < 0:
        raise ArgumentError(f"{type(owner).__name__}: {name} is {value!r}; expected a number >= 0")
    return rate


def _positive(owner: LRScheduler, name: str, value: Any) -> float:
    number = _real(owner, name, value, "a number above 0")
    if number <= 0:
        raise ArgumentError(f"{type(owner).__name__}: {name} is {value!r}; expected a number above 0")
    return number


def _count(owner: LRScheduler, name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) < 2**31:
        raise ArgumentError(f"{type(owner).__name__}: {name} is {value!r}; expected a whole number of steps, "
                            f"at least {low}")  # fmt: skip
    return int(value)


def _flag(owner: LRScheduler, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{type(owner).__name__}: {name} is {value!r}; expected True or False")
    return value


def _list(owner: LRScheduler, name: str, value: Any) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentTypeError(f"{type(owner).__name__}: {name} is {value!r}; expected a list")
    return list(value)


__all__ = [
    "Constant", "CosineAnnealingDecay", "LRScheduler", "LinearWarmup", "NoamDecay", "OneCycleLR", "PiecewiseDecay",
    "PolynomialDecay",
]  # fmt: skip
