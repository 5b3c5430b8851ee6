"""``amp.gradient_underflow``: how much of the gradients is lost in 16 bit, and which loss scale would keep it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, OrderError, PrecisionError
from amp_transpiler.ir.types import HALF
from amp_transpiler.monitor.rerun import Rerun, is_nonfinite
from amp_transpiler.monitor.suggested_fixes import bisected, largest_scale, with_scale
from amp_transpiler.option_checks import is_finite
from amp_transpiler.passes.view.training_step import TrainingStep, training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime.executor import Executor
from amp_transpiler.runtime.scope import Scope, check_scope

#: The largest scale that is tried, as a power of two.
MOST = 40
#: With this scale fp16 holds gradients down to 2^-48: enough, unless a smallest scale is found that is larger.
ENOUGH = 2.0**24


@dataclass(frozen=True)
class ParameterUnderflow:
    """One parameter's gradient. ``lost``: share of its elements that are zero in 16 bit and not in fp32, ``zero``: that
    are zero in fp32 too, 0 to 1. ``absmax``: its largest magnitude in fp32, unscaled."""

    parameter: str
    elements: int
    lost: float
    zero: float
    absmax: float


@dataclass(frozen=True)
class GradientUnderflow:
    """What :func:`gradient_underflow` finds. Scales are powers of two.

    ``lost``: share of all gradient elements that are zero in 16 bit and not in fp32, at the scale of the step,
    ``loss_scaling`` (None without one). ``largest``: the largest scale with which every gradient is finite (None where
    it is not at any, or there is no scale); ``headroom``: how many times the step's scale that is. ``smallest``: the
    smallest, from 1 on, with which less than ``target`` is lost (None: not at any up to ``largest``). ``suggested``:
    ``largest`` divided by the margin, but not beyond 2^24 where that is enough.
    """

    parameters: tuple[ParameterUnderflow, ...]
    lost: float
    loss_scaling: float | None
    largest: float | None
    smallest: float | None
    suggested: float | None
    target: float

    @property
    def headroom(self) -> float | None:
        """How many times the scale of the step ``largest`` is; None where either is missing."""
        if self.largest is None or not self.loss_scaling:
            return None
        return self.largest / self.loss_scaling

    def __str__(self) -> str:
        head = f"{self.lost:.2%} of gradient elements are zero in 16 bit and not in fp32"
        if self.loss_scaling is not None:
            head += f", at loss scale {self.loss_scaling:.10g}"
        lines = [head]
        if self.suggested is not None:
            small = "no scale that is finite" if self.smallest is None else f"{self.smallest:.10g} on"
            lines.append(
                f"  finite up to scale {self.largest:.10g}; below {self.target:.0%} lost from {small}; "
                f"suggested {self.suggested:.10g}"
            )
        worst = sorted((p for p in self.parameters if p.lost), key=lambda p: -p.lost)
        lines += [f"  {p.lost:7.2%}  {p.parameter} ({p.elements} elements, absmax {p.absmax:.3g})" for p in worst[:10]]
        if len(worst) > 10:
            lines.append(f"  and {len(worst) - 10} more")
        return "\n".join(lines)


def gradient_underflow(
    program: Program,
    feed: Mapping[Any, Any] | None = None,
    scope: Scope | None = None,
    *,
    executor: Executor | None = None,
    before: Mapping[str, Any] | None = None,
    target: float = 0.01,
    margin: float = 2.0,
) -> GradientUnderflow:
    """Compare the gradients of one step in 16 bit with those of the same program in fp32, and look for a loss scale.

    The fp32 gradients come from the same program, feed, parameters and masks with the rounding to 16 bit left out
    everywhere (16-bit parameters keep their values). Scales are tried by running the step with them. Nothing in
    ``scope`` changes.

    Args:
        program: a training program with 16-bit parts. feed, scope, executor, before: as in :func:`find_culprit`.
        target: share of elements that may be lost at the scale ``smallest``, in (0, 1).
        margin: how far ``suggested`` stays below ``largest``, a factor of at least 1.

    Raises:
        OrderError: no gradients. PrecisionError: nothing in the program is 16 bit. ArgumentError: ``target`` or
        ``margin`` out of range. Others: as :func:`find_culprit`.
    """
    if not (is_finite(target) and 0 < target < 1 and is_finite(margin) and margin >= 1):
        raise ArgumentError(f"gradient_underflow: target is {target!r}, in (0, 1), and margin {margin!r}, at least 1")
    parts = training_step(program)
    if not parts.gradients:
        raise OrderError(f"gradient_underflow: program '{program.name}' has no gradients; minimize a loss first")
    if not any(v.dtype in HALF for v in program.variables):
        raise PrecisionError(
            f"gradient_underflow: nothing in program '{program.name}' is 16 bit, so nothing is lost; "
            "decorate the optimizer before it minimizes"
        )
    with check_scope(scope).reading():  # a step of another thread would change what the step is run on
        return _compared(parts, Rerun(feed, scope, executor, before), target, margin)


def _compared(parts: TrainingStep, rerun: Rerun, target: float, margin: float) -> GradientUnderflow:
    found = _Comparison(parts, rerun)
    rows = tuple(found.rows())
    lost = sum(row.lost * row.elements for row in rows) / max(sum(row.elements for row in rows), 1)
    scale = parts.scale
    if scale is None or not scale.persistable:
        return GradientUnderflow(rows, lost, None, None, None, None, target)
    now = float(rerun.run(parts.program, [scale.name])[0].reshape(()))
    largest = largest_scale(parts, rerun, MOST)
    if largest is None:
        return GradientUnderflow(rows, lost, now, None, None, None, target)
    smallest = found.smallest(scale.name, now, largest, target)
    suggested = 2.0 ** math.floor(largest - math.log2(margin))
    suggested = min(suggested, max(ENOUGH, smallest or 0.0))
    return GradientUnderflow(rows, lost, now, 2.0**largest, smallest, suggested, target)


class _Comparison:
    """Gradients in fp32, and how many of their elements 16 bit loses at a scale."""

    def __init__(self, parts: TrainingStep, rerun: Rerun) -> None:
        self.parts, self.rerun = parts, rerun
        self.names = [gradient.name for _, gradient in parts.gradients]
        keep_fp32 = frozenset(v.name for v in parts.program.variables)  # fp32 operators, too, read what is not rounded
        self.exact = [np.asarray(g, np.float64) for g in rerun.run(parts.program, self.names, keep_fp32)]
        for name, value in zip(self.names, self.exact, strict=True):
            if is_nonfinite(value):
                raise ArgumentError(
                    f"gradient_underflow: gradient '{name}' is not finite in fp32 either; "
                    "find_culprit names what makes it so"
                )
        self.alive = [value != 0 for value in self.exact]

    def _gone(self) -> list[int]:
        """Elements of each gradient that are zero now and not in fp32."""
        rounded = self.rerun.run(self.parts.program, self.names)
        return [int(((np.asarray(g) == 0) & alive).sum()) for g, alive in zip(rounded, self.alive, strict=True)]

    def lost(self) -> float:
        return sum(self._gone()) / max(sum(value.size for value in self.exact), 1)

    def rows(self) -> list[ParameterUnderflow]:
        return [
            ParameterUnderflow(
                parameter.name,
                exact.size,
                gone / max(exact.size, 1),
                float((~alive).mean()) if exact.size else 0.0,
                float(np.abs(exact).max(initial=0.0)),
            )
            for (parameter, _), exact, alive, gone in zip(
                self.parts.gradients, self.exact, self.alive, self._gone(), strict=True
            )
        ]

    def smallest(self, name: str, now: float, largest: int, target: float) -> float | None:
        """The smallest power of two from 1 to 2^``largest`` with which less than ``target`` is lost."""

        def too_small(exponent: int) -> bool:
            with_scale(self.rerun, name, 2.0**exponent)
            return self.lost() >= target

        try:
            last = bisected(too_small, 0, largest)
        finally:
            with_scale(self.rerun, name, now)
        exponent = 0 if last is None else last + 1
        return 2.0**exponent if exponent <= largest else None
