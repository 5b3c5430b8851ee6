"""Whether a conversion keeps to a tolerance: one object, made by one judge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_transpiler.conversion.calibration.as_given import measurable, refused
from amp_transpiler.conversion.calibration.measure import Batch, measure
from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.synthetic import SYNTHETIC, synthetic_sample
from amp_transpiler.errors import AmpError, ModelFileError
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import OverBudget, calibration_budget, check_budget, within

#: What outputs are measured on, where it is not a synthetic sample.
CALIBRATION = "the calibration data"
#: What helps where an output is no number, or infinite, on a sample that is made up.
_LEFT = ": numbers left the range of the type; on calibration data (--calibration) what does stays fp32"


@dataclass(frozen=True)
class Verdict:
    """What was measured of the outputs, and whether that is within the tolerance.

    Attributes:
        errors: relative L2 error of each output, of probabilities of their own (a Sigmoid's) of a norm of at least 0.5;
            for integers, booleans and strings the share of elements that differ.
        sample: what they were measured on.
        tolerance: the largest error that is allowed, None where every one is.
        why: why the tolerance cannot be kept to, or nothing be measured; "" where there is no more to say.
    """

    errors: Mapping[str, float]
    sample: str = CALIBRATION
    tolerance: float | None = None
    why: str = ""

    @property
    def worst(self) -> tuple[str, float]:
        """The output that is furthest off, and its error; what is no number is furthest."""
        return max(self.errors.items(), key=lambda item: beyond(item[1]), default=("", 0.0))

    @property
    def missed(self) -> tuple[str, ...]:
        """The outputs beyond the tolerance."""
        limit = math.inf if self.tolerance is None else self.tolerance
        return tuple(name for name, error in self.errors.items() if not beyond(error) <= limit)

    @property
    def met(self) -> bool:
        """Whether the outputs were measured, and none is beyond the tolerance."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """A sentence for each output that is beyond the tolerance, and for what kept them from being measured."""
        missed = [
            f"output '{name}' is off by {self.errors[name]:.3g}, above {self.tolerance:g}"
            + (_LEFT if self.sample != CALIBRATION and not math.isfinite(self.errors[name]) else "")
            for name in self.missed
        ]
        return (*missed, *([self.why] if self.why and not self.errors else []))


def judge(
    reference: Program,
    converted: Program,
    options: ConversionOptions,
    batches: Sequence[Batch] = (),
    expected: Sequence[Sequence[Any]] | None = None,
) -> Verdict:
    """The verdict on a conversion of ``reference``, on the batches, without any on one synthetic sample.

    Operators that draw random numbers draw the same in both programs.

    ``expected``: the outputs of ``reference`` on the batches, where they are known. A model that does not run on a
    synthetic sample, or not within the budget, is a verdict that is not met; on calibration data it is an error
    (FeedError, ExecutionError).
    """
    if batches:
        with within(calibration_budget(reference, batches, options.time_budget, options.memory_budget)):
            found = measure(reference, converted, batches, options.dtype, expected=expected, tensors=False)
        return Verdict(found.outputs, CALIBRATION, options.allowed)
    try:
        with within(check_budget(reference, options.time_budget, options.memory_budget)):
            sample, wanted = synthetic_sample(reference)
            measurable(reference, [wanted], SYNTHETIC)
            found = measure(reference, converted, [sample], options.dtype, expected=[wanted], tensors=False)
    except ModelFileError:
        raise
    except AmpError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        why = f"the model does not run on {SYNTHETIC}; give {options.called('calibration')} ({reason})"
        if not isinstance(error, OverBudget) and refused(reference):
            why = f"nothing is measured: onnxruntime does not load the model itself, whatever the data ({reason})"
        return Verdict({}, SYNTHETIC, options.allowed, why)
    return Verdict(found.outputs, SYNTHETIC, options.allowed)


def beyond(error: float) -> float:
    """An error by which to order: what is no number is beyond all others."""
    return math.inf if math.isnan(error) else error
