"""Learning-rate schedules, as state in the program: ``Adam(learning_rate=lr.CosineAnnealingDecay(0.1, T_max=100))``.

The program holds the number of good steps, ``lr_step_<n>`` (int32), and computes the rate of a step from it. A bad
step leaves both as they are, bit for bit; who copies the scope copies the schedule. Every schedule is closed-form:
``value(step)`` gives the rate of any step, the first being 0, by the rule that the program follows. Names, arguments
and formulas are those of ``paddle.optimizer.lr``, evaluated once for every step of the optimizer.

``LambdaDecay``, ``MultiplicativeDecay`` and ``ReduceOnPlateau`` are Python's to compute: calls of ``step()`` alone
advance them, as all schedules of Paddle's, and the program holds their rate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.lists.paddle import add_paddle_names, paddle_arguments
from amp_transpiler.optimizer.lr_schedule import LRScheduler, count, listed, positive, rate
from amp_transpiler.optimizer.stepped_rates import LambdaDecay, MultiplicativeDecay, ReduceOnPlateau
from amp_transpiler.option_checks import choice, switch

add_paddle_names(globals())


@paddle_arguments("optimizer.lr")
class Constant(LRScheduler):
    """``learning_rate`` at every step."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__(learning_rate=rate(self, "learning_rate", learning_rate))


@paddle_arguments("optimizer.lr")
class PiecewiseDecay(LRScheduler):
    """``values[i]`` while ``step < boundaries[i]``, the last value from the last boundary on.

    ``boundaries`` are ascending steps; there is one value more than boundaries.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]) -> None:
        steps = [count(self, "boundaries", b, 1) for b in listed(self, "boundaries", boundaries)]
        rates = [rate(self, "values", v) for v in listed(self, "values", values)]
        if not steps or any(b <= a for a, b in pairwise(steps)):
            raise ArgumentError(f"PiecewiseDecay: boundaries are {steps}; expected ascending steps")
        if len(rates) != len(steps) + 1:
            raise ArgumentError(
                f"PiecewiseDecay: {len(steps)} boundaries need {len(steps) + 1} values, and there are {len(rates)}"
            )
        super().__init__(boundaries=steps, values=rates)


@paddle_arguments("optimizer.lr")
class LinearWarmup(LRScheduler):
    """``start_lr + (end_lr - start_lr) * step / warmup_steps`` for ``warmup_steps`` steps, then ``learning_rate``.

    ``learning_rate`` is a number or another schedule, which begins with its step 0 when the warm-up is over; where that
    one is ``by_user``, so is this.
    """

    def __init__(self, learning_rate: float | LRScheduler, warmup_steps: int, start_lr: float, end_lr: float) -> None:
        after = learning_rate if isinstance(learning_rate, LRScheduler) else Constant(learning_rate)
        if after.in_python:
            raise ArgumentTypeError(
                f"LinearWarmup: learning_rate is a {type(after).__name__}, which Python computes; write the warm-up "
                "into the function of a LambdaDecay"
            )
        super().__init__(
            learning_rate=json.loads(after.description),
            warmup_steps=count(self, "warmup_steps", warmup_steps, 1),
            start_lr=rate(self, "start_lr", start_lr),
            end_lr=rate(self, "end_lr", end_lr),
        )
        if after.stepped_by_user:
            self.by_user()


class _Decay(LRScheduler):
    """A rate that decays in every step, as ``gamma`` says."""

    def __init__(self, learning_rate: float, gamma: float) -> None:
        super().__init__(learning_rate=rate(self, "learning_rate", learning_rate), gamma=positive(self, "gamma", gamma))


@paddle_arguments("optimizer.lr")
class ExponentialDecay(_Decay):
    """``learning_rate * gamma ** step``."""


@paddle_arguments("optimizer.lr")
class NaturalExpDecay(_Decay):
    """``learning_rate * exp(-gamma * step)``."""


@paddle_arguments("optimizer.lr")
class InverseTimeDecay(_Decay):
    """``learning_rate / (1 + gamma * step)``."""


@paddle_arguments("optimizer.lr")
class StepDecay(LRScheduler):
    """``learning_rate * gamma ** floor(step / step_size)``."""

    def __init__(self, learning_rate: float, step_size: int, gamma: float = 0.1) -> None:
        super().__init__(
            learning_rate=rate(self, "learning_rate", learning_rate),
            step_size=count(self, "step_size", step_size, 1),
            gamma=positive(self, "gamma", gamma),
        )


@paddle_arguments("optimizer.lr")
class MultiStepDecay(LRScheduler):
    """``learning_rate * gamma ** n`` where ``n`` of the ascending ``milestones`` are reached."""

    def __init__(self, learning_rate: float, milestones: Sequence[int], gamma: float = 0.1) -> None:
        steps = [count(self, "milestones", m, 1) for m in listed(self, "milestones", milestones)]
        if not steps or any(b <= a for a, b in pairwise(steps)):
            raise ArgumentError(f"MultiStepDecay: milestones are {steps}; expected ascending steps")
        super().__init__(
            learning_rate=rate(self, "learning_rate", learning_rate),
            milestones=steps,
            gamma=positive(self, "gamma", gamma),
        )


@paddle_arguments("optimizer.lr")
class LinearLR(LRScheduler):
    """``learning_rate * (start_factor + (end_factor - start_factor) * min(step, total_steps) / total_steps)``."""

    def __init__(
        self, learning_rate: float, total_steps: int, start_factor: float = 1 / 3, end_factor: float = 1.0
    ) -> None:
        super().__init__(
            learning_rate=rate(self, "learning_rate", learning_rate),
            total_steps=count(self, "total_steps", total_steps, 1),
            start_factor=rate(self, "start_factor", start_factor),
            end_factor=rate(self, "end_factor", end_factor),
        )


@paddle_arguments("optimizer.lr")
class CosineAnnealingDecay(LRScheduler):
    """``eta_min + (learning_rate - eta_min) / 2 * (1 + cos(pi * step / T_max))`` (Loshchilov and Hutter, 2016).

    There are no restarts: after ``T_max`` steps the rate rises along the cosine again, as in Paddle and torch.
    """

    def __init__(self, learning_rate: float, T_max: int, eta_min: float = 0.0) -> None:
        super().__init__(
            learning_rate=rate(self, "learning_rate", learning_rate),
            T_max=count(self, "T_max", T_max, 1),
            eta_min=rate(self, "eta_min", eta_min),
        )


@paddle_arguments("optimizer.lr")
class CosineAnnealingWarmRestarts(LRScheduler):
    """``CosineAnnealingDecay`` over ``T_0`` steps, then anew over ``T_mult`` times as many, and so on (same work)."""

    def __init__(self, learning_rate: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> None:
        super().__init__(
            learning_rate=rate(self, "learning_rate", learning_rate),
            T_0=count(self, "T_0", T_0, 1),
            T_mult=count(self, "T_mult", T_mult, 1),
            eta_min=rate(self, "eta_min", eta_min),
        )


@paddle_arguments("optimizer.lr", "optimizer.lr.CyclicLR")
class CyclicLR(LRScheduler):
    """Up from ``base_learning_rate`` to ``max_learning_rate`` and down again, without end (Smith, 2015).

    It rises for ``step_size_up`` steps and falls for ``step_size_down``, as many where none are given. ``mode``:
    "triangular", "triangular2" for half the rise after each cycle, "exp_range" for one of ``exp_gamma ** step``.
    """

    def __init__(
        self,
        base_learning_rate: float,
        max_learning_rate: float,
        step_size_up: int,
        step_size_down: int | None = None,
        mode: str = "triangular",
        exp_gamma: float = 1.0,
    ) -> None:
        if mode not in ("triangular", "triangular2", "exp_range"):
            raise ArgumentError(
                f"CyclicLR: mode is {mode!r}; expected 'triangular', 'triangular2' or 'exp_range'; another scale is a "
                "LambdaDecay"
            )
        down = step_size_up if step_size_down is None else step_size_down
        super().__init__(
            base_learning_rate=rate(self, "base_learning_rate", base_learning_rate),
            max_learning_rate=rate(self, "max_learning_rate", max_learning_rate),
            step_size_up=count(self, "step_size_up", step_size_up, 1),
            step_size_down=count(self, "step_size_down", down, 1),
            mode=mode,
            exp_gamma=positive(self, "exp_gamma", exp_gamma),
        )


@paddle_arguments("optimizer.lr")
class PolynomialDecay(LRScheduler):
    """``end_lr + (learning_rate - end_lr) * (1 - min(step, decay_steps) / decay_steps) ** power``.

    With ``cycle``, ``decay_steps`` is instead multiplied by ``max(1, ceil(step / decay_steps))``.
    """

    def __init__(
        self, learning_rate: float, decay_steps: int, end_lr: float = 0.0001, power: float = 1.0, cycle: bool = False
    ) -> None:
        super().__init__(
            learning_rate=rate(self, "learning_rate", learning_rate),
            decay_steps=count(self, "decay_steps", decay_steps, 1),
            end_lr=rate(self, "end_lr", end_lr),
            power=positive(self, "power", power),
            cycle=switch(f"{type(self).__name__}: cycle", cycle),
        )


@paddle_arguments("optimizer.lr")
class NoamDecay(LRScheduler):
    """``learning_rate * d_model ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5)``, 0 at step 0.

    The rate of "Attention is all you need" (Vaswani et al., 2017).
    """

    def __init__(self, d_model: float, warmup_steps: int, learning_rate: float = 1.0) -> None:
        super().__init__(
            d_model=positive(self, "d_model", d_model),
            warmup_steps=count(self, "warmup_steps", warmup_steps, 1),
            learning_rate=rate(self, "learning_rate", learning_rate),
        )


@paddle_arguments("optimizer.lr")
class OneCycleLR(LRScheduler):
    """Up from ``max_learning_rate / divide_factor`` to the maximum, and down to ``end_learning_rate``.

    The policy of Smith and Topin (2017), over ``total_steps`` steps; it stays at the end rate after them. It rises
    until step ``phase_pct * total_steps - 1``. With ``three_phase`` it falls to the initial rate in as many steps,
    and then to the end rate. ``anneal_strategy`` is "cos" or "linear".
    """

    def __init__(
        self,
        max_learning_rate: float,
        total_steps: int,
        divide_factor: float = 25.0,
        end_learning_rate: float = 0.0001,
        phase_pct: float = 0.3,
        anneal_strategy: str = "cos",
        three_phase: bool = False,
    ) -> None:
        total = count(self, "total_steps", total_steps, 2)
        share = positive(self, "phase_pct", phase_pct)
        rises = share * total - 1
        choice("OneCycleLR: anneal_strategy", anneal_strategy, ("cos", "linear"))
        if not 0 < rises < ((total - 1) / 2 if switch("OneCycleLR: three_phase", three_phase) else total - 1):
            raise ArgumentError(
                f"OneCycleLR: phase_pct is {phase_pct!r} of {total} steps; every phase must be longer "
                f"than one step, and the phases no longer than the cycle"
            )
        super().__init__(
            max_learning_rate=rate(self, "max_learning_rate", max_learning_rate),
            total_steps=total,
            divide_factor=positive(self, "divide_factor", divide_factor),
            end_learning_rate=rate(self, "end_learning_rate", end_learning_rate),
            phase_pct=share,
            anneal_strategy=anneal_strategy,
            three_phase=three_phase,
        )


__all__ = [
    "Constant",
    "CosineAnnealingDecay",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LRScheduler",
    "LambdaDecay",
    "LinearLR",
    "LinearWarmup",
    "MultiStepDecay",
    "MultiplicativeDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "OneCycleLR",
    "PiecewiseDecay",
    "PolynomialDecay",
    "ReduceOnPlateau",
    "StepDecay",
]
