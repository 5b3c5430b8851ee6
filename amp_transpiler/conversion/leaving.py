"""The operator at which a 16-bit program first leaves its fp32 values, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from amp_transpiler.conversion.replay import OperatorError
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.lists import place_traits
from amp_transpiler.passes.lowering.arithmetic import Arithmetic
from amp_transpiler.passes.view.names import label

#: The share of an error that an operator adds by itself where it is said to leave there.
_JUMP = 0.5


class Cause(Enum):
    """Why an operator leaves."""

    OVERFLOW = "overflow"
    PARTIAL_SUM = "overflow of a partial sum"
    UNDERFLOW = "underflow"
    LOST_SUMS = "lost sums"
    ROUNDING = "rounding"


_CURES = {
    Cause.OVERFLOW: "keep it and what reads it in fp32 (convert the fp32 model with calibration data, which finds such "
    "tensors, or --black-varnames '{tensor}'), or scale what it reads down",
    Cause.PARTIAL_SUM: "convert the fp32 model with --place {place}: such sums are computed in fp32 then, with weights "
    "stored in {dtype}; or keep it in fp32 with --black-varnames '{tensor}'",
    Cause.UNDERFLOW: "keep it and what reads it in fp32 (--black-varnames '{tensor}'), or scale what it reads up",
    Cause.LOST_SUMS: "convert the fp32 model with --place {place}: such sums are computed in fp32 then, with weights "
    "stored in {dtype}",
    Cause.ROUNDING: "keep it and what it reads in fp32 (--black-varnames '{tensor}'), or let --mode auto choose",
}


@dataclass(frozen=True)
class Leaving:
    """The operator at which a program first leaves.

    Attributes:
        operator: its label. type: its type. tensor: what it makes.
        cause: why it leaves.
        before, error: relative L2 error of what it reads and of what it makes.
        largest: the largest number of that in fp32.
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
    steps: Sequence[OperatorError], kind: str, dtype: str, tolerance: float, arithmetic: Arithmetic | None
) -> Leaving | None:
    """Where operators, in program order on the way to an output that is beyond the tolerance, first leave."""
    known = [step for step in steps if step.found is not None]
    sudden = next((step for step in known if _jumps(step, tolerance)), None)
    step = sudden or max(known, key=lambda each: each.growth, default=None)
    if step is None or step.found is None:
        return None
    found, limits = step.found, LIMITS[dtype]
    cause = _cause(step, dtype, tolerance)
    largest, count = found.exact.largest, step.summands
    numbers = f"{count} summands" if count is not None else "its sums"
    title = place_traits(kind).title
    if cause is Cause.OVERFLOW:
        nan = f", {found.nan} of them NaN" if found.nan else ""
        says = (
            f"{found.nonfinite} numbers are not finite{nan}: in fp32 they reach {largest:.3g}, and {dtype} ends at "
            f"{limits.largest:.5g}"
        )
    elif cause is Cause.PARTIAL_SUM:
        says = (
            f"{title} adds {numbers} up in {dtype}: a partial result leaves it, though the result in fp32 is at most "
            f"{largest:.3g}"
        )
    elif cause is Cause.UNDERFLOW:
        says = (
            f"{found.vanished:.0%} of it (relative L2) sinks to zero, and storing it in {dtype} loses "
            f"{found.exact.rounding:.2g}: the smallest number is {found.exact.smallest:.2g}, the largest {largest:.3g}"
        )
    elif cause is Cause.LOST_SUMS:
        how = f"adds {numbers} up" if step.sums else "computes it"
        says = f"{title} {how} in {dtype}, rounding each time; with fp32 inside its error were {found.stored.error:.2g}"
    else:
        says = (
            "it enlarges the roundings of what it reads, as differences of near numbers do; storing it loses "
            f"{found.exact.rounding:.2g}"
        )
    return Leaving(
        label(step.op),
        step.op.full_type,
        step.tensor,
        cause,
        step.before,
        step.error,
        largest,
        count,
        sudden is not None,
        says,
        _CURES[cause].format(tensor=step.tensor, place=kind, dtype=dtype),
    )


def _jumps(step: OperatorError, tolerance: float) -> bool:
    """Whether an operator brings what it makes beyond the tolerance by itself."""
    if not step.error <= tolerance and not math.isfinite(step.error):
        return math.isfinite(step.before)
    return step.error > tolerance and step.growth >= _JUMP * step.error


def _cause(step: OperatorError, dtype: str, tolerance: float) -> Cause:
    found = step.found
    assert found is not None
    if found.nonfinite:
        inside = found.exact.largest <= LIMITS[dtype].largest and math.isfinite(found.stored.error)
        return Cause.PARTIAL_SUM if inside else Cause.OVERFLOW
    if max(found.vanished, found.exact.rounding) > _JUMP * tolerance:
        return Cause.UNDERFLOW
    return Cause.LOST_SUMS if found.stored.error < _JUMP * step.error else Cause.ROUNDING
