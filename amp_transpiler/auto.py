"""Auto mode: what calibration data shows to be unsafe in 16 bit stays fp32, and the outputs keep to a tolerance.

Each run executes the model in fp32 and, bit-faithfully, in 16 bit. The first one says which tensors leave the
format or sink below it. While the outputs then miss the tolerance, the operators behind which the error
grows most return to fp32: a 64th of all, then a 32nd, and so on until all have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .ir.program import Program
from .ir.types import LIMITS
from .passes.constants import is_constant, saturate
from .passes.evidence import Evidence
from .passes.optimal import Assignment
from .passes.precision import source
from .report.record import RangeRecord
from .runtime.measure import Measurement, measure, outputs_of

#: A tensor that comes this near to the largest number is taken to leave the format: other data may reach further.
MARGIN = 2.0
#: Relative error of storing a tensor, as a multiple of the type's epsilon (sixteen times that of one rounding), from
#: which on its numbers sink below the format.
SINKS = 8.0
#: The first share of the operators that returns to fp32 for the tolerance.
SHARE = 64


@dataclass(frozen=True)
class Steps:
    """What a conversion does without data: the evidence of a program, and the assignment under evidence."""

    evidence: Callable[[Program], Evidence | None]
    assign: Callable[[Program, Evidence | None], Assignment]
    progress: Callable[[str], None]


@dataclass
class Outcome:
    """A converted program, and what was measured on the way."""

    program: Program
    evidence: Evidence | None
    assignment: Assignment
    measurement: Measurement | None = None
    rounds: list[str] = field(default_factory=list)

    @property
    def outputs(self) -> dict[str, float]:
        """The error of each output."""
        return dict(self.measurement.outputs) if self.measurement else {}

    def ranges(self) -> tuple[RangeRecord, ...]:
        """What was measured of each tensor, in program order."""
        tensors = self.measurement.tensors if self.measurement else {}
        return tuple(
            RangeRecord(name, t.largest, t.smallest, t.rounding, t.error, t.finite) for name, t in tensors.items()
        )


def search(
    program: Program, batches: Sequence[dict[str, np.ndarray]], dtype: str, tolerance: float, steps: Steps
) -> Outcome:
    """The conversion of ``program``, which is left as it is, that keeps to ``tolerance`` on the batches.

    The last round of the outcome says so where no conversion does. An infinite tolerance is always kept to, so that
    two runs are enough.
    """
    expected, reference = outputs_of(program, batches), _saturated(program, steps)
    kept: dict[str, str] = {}
    ranking: list[str] = []
    share = SHARE
    rounds: list[str] = []
    while True:
        outcome = _converted(program, kept, steps)
        steps.progress(f"run {len(rounds) + 1} on {len(batches)} sample{'s' * (len(batches) != 1)}")
        found = outcome.measurement = measure(reference, outcome.program, batches, dtype, expected=expected)
        outcome.rounds = rounds
        worst, error = max(found.outputs.items(), key=lambda item: _key(item[1]), default=("", 0.0))
        line = f"{_operators(outcome.program, dtype)} operators in {dtype}; worst output '{worst}': error {error:.3g}"
        if not kept:
            kept = unsafe(found, dtype)
            if kept:
                rounds.append(f"{line}; {len(kept)} tensors do not fit {dtype}")
                continue
        if _key(error) <= tolerance:
            rounds.append(line if math.isinf(tolerance) else f"{line}, within {tolerance:g}")
            return outcome
        if share == 0:
            rounds.append(f"{line}: nothing is left to return to float32, so that {tolerance:g} cannot be met"
                          f"{_why(found, worst)}")  # fmt: skip
            return outcome
        ranking = ranking or found.culprits(program)
        for name in ranking[: math.ceil(len(ranking) / share)]:
            _keep_around(program, name, found, kept)
        rounds.append(f"{line}, above {tolerance:g}: the worst 1/{share} of {len(ranking)} operators return to float32")
        share //= 2


def _saturated(program: Program, steps: Steps) -> Program:
    """The program with the masks that a conversion saturates: their fp32 values would count as an overflow."""
    copy = program.clone()
    evidence = steps.evidence(copy)
    for variable, value in (evidence.replaced if evidence else {}).items():
        saturate(variable, value)
    return copy


def unsafe(found: Measurement, dtype: str) -> dict[str, str]:
    """Tensors that the data shows not to fit the format, with the reason."""
    reasons: dict[str, str] = {}
    limits = LIMITS[dtype]
    for name, t in found.tensors.items():
        # saturated, and exactly there, but for the scores that are added to it
        mask = abs(t.largest - limits.largest) < limits.overflow - limits.largest
        if t.largest * MARGIN > limits.largest and math.isfinite(t.largest) and not mask:
            reasons[name] = f"measured: '{name}' reaches {t.largest:.3g}, and {dtype} ends at {limits.largest:.5g}"
        elif t.rounding > SINKS * limits.epsilon:
            reasons[name] = (f"measured: '{name}' sinks below {dtype}, which loses {t.rounding:.0%} of it "
                             f"(largest {t.largest:.2g})")  # fmt: skip
    return reasons


def _converted(program: Program, kept: dict[str, str], steps: Steps) -> Outcome:
    copy = program.clone()
    evidence = steps.evidence(copy)
    if evidence is not None:
        for name, reason in kept.items():
            evidence.keep_tensor(copy.var(name), reason)
    return Outcome(copy, evidence, steps.assign(copy, evidence))


def _keep_around(program: Program, name: str, found: Measurement, kept: dict[str, str]) -> None:
    """Keep the tensor and those that its operator reads: error that grows here came in with them."""
    variable = source(program.var(name))
    grown = found.tensors[name].error if name in found.tensors else float("nan")
    reason = f"measured: the error grows to {grown:.2g} at '{name}'"
    kept.setdefault(name, reason)
    for read in variable.producer.inputs if variable.producer is not None else ():
        if read is not None and read.outer is None and not is_constant(read):
            kept.setdefault(read.name, reason)


def _operators(program: Program, dtype: str) -> int:
    return sum(op.precision == dtype and op.type != "Cast" for op in program.walk())


def _key(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _why(found: Measurement, output: str) -> str:
    if not math.isfinite(found.outputs.get(output, 0.0)):
        return f" (the model itself gives numbers that are not finite at '{output}')"
    return " (the rest is what inputs and outputs in 16 bit, or operators that have no fp32 form, lose)"
