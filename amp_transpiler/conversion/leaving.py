"""The operator at which a 16-bit program first leaves its fp32 values, and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from amp_transpiler.conversion.replay import OperatorError
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.lists import place_traits
from amp_transpiler.passes.view.names import label

#: The share of an error that an operator adds by itself where it is said to leave there.
_JUMP = 0.5
#: The share of a format beyond which roundings of what is read can make an overflow of it.
_NEAR = 0.5


class Cause(Enum):
    """Why an operator leaves."""

    OVERFLOW = "overflow"
    PARTIAL_SUM = "overflow of a partial sum"
    UNDERFLOW = "underflow"
    LOST_SUMS = "lost sums"
    ROUNDING = "rounding"
    UNDEFINED = "no numbers in fp32 either"


_CURES = {
    Cause.OVERFLOW: "keep it and what reads it in fp32 (convert the fp32 model with calibration data, which finds such "
    "tensors, or --black-varnames '{tensor}'), or scale what it reads down",
    Cause.PARTIAL_SUM: "convert the fp32 model with --place {place}: such sums are computed in fp32 then, with weights "
    "stored in {dtype}; or keep it in fp32 with --black-varnames '{tensor}'",
    Cause.UNDERFLOW: "keep it and what reads it in fp32 (--black-varnames '{tensor}'), or scale what it reads up",
    Cause.LOST_SUMS: "convert the fp32 model with --place {place}: such sums are computed in fp32 then, with weights "
    "stored in {dtype}",
    Cause.ROUNDING: "keep it and what it reads in fp32 (--black-varnames '{tensor}'), or let --mode auto choose",
    Cause.UNDEFINED: "give other data, or convert the fp32 model anew, with weights that {dtype} holds",
}


@dataclass(frozen=True)
class Leaving:
    """The operator at which a program first leaves.

    Attributes:
        operator: its label. type: its type. tensor: what it makes.
        cause: why it leaves.
        before, error: relative L2 error of what it reads and of what it makes.
        largest: the largest number of that in fp32; 0 of integers.
        summands: how many it adds up, None for none or an unknown number.
        sudden: whether it leaves there; otherwise the error grows from operator to operator, and it adds most.
        says: what happens, in a sentence. cure: what to do about it.
    """

    operator: str
    type: str
    tensor: str
    cause: Cause
    before: float
    error: float
    largest: float
    summands: int | None
    sudden: bool
    says: str
    cure: str

    def __str__(self) -> str:
        how = "leaves at" if self.sudden else "no single operator: most is added by"
        grown = f"error {self.before:.2g} -> {self.error:.2g}"
        return f"{how} '{self.operator}' ({self.type}): {self.cause.value}, {grown}\n  {self.says}\n  {self.cure}"


def leaving_of(
    steps: Sequence[OperatorError], outputs: Collection[str], kind: str, dtype: str, tolerance: float
) -> Leaving:
    """Where operators, in program order on the way to outputs that are beyond the tolerance, first leave."""
    sudden = next((step for step in _off(steps, outputs, tolerance) if _jumps(step, tolerance)), None)
    if sudden is not None:
        return _leaving(sudden, steps, kind, dtype, tolerance, sudden=True)
    most = max(error for step in steps for name, error in step.errors.items() if name in outputs)
    damped = [step for step in steps if step.error <= most]  # a larger error than theirs did not get there
    return _leaving(max(damped or steps, key=lambda each: each.growth), steps, kind, dtype, tolerance, sudden=False)


def _off(steps: Sequence[OperatorError], outputs: Collection[str], tolerance: float) -> list[OperatorError]:
    """Operators from which something that is off leads to the outputs, through nothing but what is off."""
    errors = {name: error for step in steps for name, error in step.errors.items()}
    wanted, found = set(outputs), list[OperatorError]()
    for step in reversed(steps):
        if not wanted.isdisjoint(step.errors):
            found.append(step)
            read = {v.name for v in (*step.op.inputs, *step.op.captures) if v is not None}
            wanted |= {name for name in read if not errors.get(name, 0.0) <= tolerance}
    return found[::-1]


def _leaving(
    step: OperatorError, steps: Sequence[OperatorError], kind: str, dtype: str, tolerance: float, sudden: bool
) -> Leaving:
    cause, found = _cause(step, tolerance), step.found
    if cause is Cause.ROUNDING and found is not None and found.nonfinite:
        origin = _zeros_before(step, steps)
        if origin is not step and origin.found is not None and origin.found.sunk:
            zeros = f"{origin.found.sunk} numbers sink to zero, and '{label(step.op)}' makes what is not finite of them"
            return _described(origin, Cause.UNDERFLOW, zeros, kind, dtype, sudden)
    return _described(step, cause, _says(step, cause, kind, dtype), kind, dtype, sudden)


def _described(step: OperatorError, cause: Cause, says: str, kind: str, dtype: str, sudden: bool) -> Leaving:
    return Leaving(
        label(step.op),
        step.op.full_type,
        step.tensor,
        cause,
        step.before,
        step.error,
        step.found.exact.largest if step.found is not None else 0.0,
        step.summands,
        sudden,
        says,
        _CURES[cause].format(tensor=step.tensor, place=kind, dtype=dtype),
    )


def _says(step: OperatorError, cause: Cause, kind: str, dtype: str) -> str:
    """What happens at an operator."""
    found, title = step.found, place_traits(kind).title
    if found is None:
        return f"it decides by what it reads, the roundings of which change {step.error:.2g} of what it makes"
    count, largest = step.summands, found.exact.largest
    how = (f"adds {count} summands up" if count is not None else "adds up") if step.sums else "computes it"
    if cause is Cause.OVERFLOW:
        nan = f", {found.nan} of them NaN" if found.nan else ""
        return (
            f"{found.nonfinite} numbers are not finite{nan}: in fp32 they reach {largest:.3g}, and {found.dtype} ends "
            f"at {LIMITS[found.dtype].largest:.5g}"
        )
    if cause is Cause.PARTIAL_SUM:
        return (
            f"{title} {how} in {dtype}: a partial result leaves it, though the result in fp32 is at most {largest:.3g}"
        )
    if cause is Cause.UNDERFLOW:
        return (
            f"{found.vanished:.0%} of it (relative L2) sinks to zero, and storing it in {found.dtype} loses "
            f"{found.exact.rounding:.2g}: the smallest number is {found.exact.smallest:.2g}, the largest {largest:.3g}"
        )
    if cause is Cause.LOST_SUMS:
        return f"{title} {how} in {dtype}, rounding each time; with fp32 inside its error were {found.stored.error:.2g}"
    if cause is Cause.UNDEFINED:
        return f"{found.undefined} numbers are NaN in fp32 arithmetic on the same weights and data as well"
    if found.nonfinite:
        return (
            f"{found.nonfinite} numbers are not finite, in fp32 at most {largest:.3g}: the roundings of what it reads "
            "make zeros to divide by, or numbers without a root or logarithm"
        )
    return (
        "it enlarges the roundings of what it reads, as differences of near numbers do; storing it loses "
        f"{found.exact.rounding:.2g}"
    )


def _zeros_before(step: OperatorError, steps: Sequence[OperatorError]) -> OperatorError:
    """The operator from which zeros come that are not zero in fp32; the same where it reads none."""
    by = {each.op: each for each in steps if each.found is not None and each.found.zeros}
    while True:
        before = next((by[v.producer] for v in step.op.inputs if v is not None and v.producer in by), None)
        if before is None:
            return step
        step = before


def _jumps(step: OperatorError, tolerance: float) -> bool:
    """Whether an operator brings what it makes beyond the tolerance by itself."""
    if not math.isfinite(step.error):
        return math.isfinite(step.before)
    return step.error > tolerance and step.growth >= _JUMP * step.error


def _cause(step: OperatorError, tolerance: float) -> Cause:
    found = step.found
    if found is None:
        return Cause.ROUNDING
    if found.undefined:
        return Cause.UNDEFINED
    if found.nonfinite:
        end = LIMITS[found.dtype].largest
        if found.exact.largest <= end and math.isfinite(found.stored.error):
            return Cause.PARTIAL_SUM
        return Cause.OVERFLOW if found.exact.largest > _NEAR * end else Cause.ROUNDING
    if max(found.vanished, found.exact.rounding) > _JUMP * tolerance:
        return Cause.UNDERFLOW
    return Cause.LOST_SUMS if found.stored.error < _JUMP * step.error else Cause.ROUNDING
