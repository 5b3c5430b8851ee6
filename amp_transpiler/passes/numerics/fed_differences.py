"""What lies far from 0 beside its spread: years, prices, pressures, temperatures.

16 bit holds 1990 to 0.5, or to 4, and what is left of it less a mean is a few of these. So these are computed in fp32:
standard scores, and differences between what is fed, as of prices of two days or of a series and its mean; norms, which
begin with such a difference; and at the other end sums with a level that was fed, as where a forecast takes up the mean
or the last value of its series again.

What is scaled down, as seconds of a day to days, was large: float16 ends at 65504. Nor does it hold what is added to
that, as a forecast to the state of the air. The returns of prices are differences too: quotients less 1, or logarithms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed, held
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import source

#: Deviations by which a standard score may be off, and those that what is scored may lie from its mean.
_OFF, _REACH = 0.01, 8


def keep_fed_scores(fed: Fed, ranges: Ranges, dtype: str, constraints: Constraints) -> None:
    """Add to ``constraints`` the standard scores of what is fed that 16 bit would put off by more than :data:`_OFF`
    deviations where it holds the mean, or that is beyond it at :data:`_REACH` of them, what computes what is scored,
    and what is added to that."""
    limits = LIMITS[dtype]

    def is_off(op: Operator, variable: Variable) -> bool:
        return _any_above(_OFF, _mean_and_spread(op, fed.flow), lambda mean, spread: mean / spread * limits.epsilon / 2)

    def leaves(op: Operator, variable: Variable) -> bool:
        if ranges.within(variable, limits.largest):
            return False
        found = _mean_and_spread(op, fed.flow)
        return _any_above(limits.largest, found, lambda mean, spread: mean + _REACH * spread)

    if any(kind in fed.flow.kinds for kind in ("BatchNormalization", "Div", "Mul", "ai.onnx.ml::Scaler")):
        fed.keep(constraints, Kind.FED_SCORE, fed.given, is_off)
        _keep_sums(fed, fed.keep(constraints, Kind.FED_SCALE, fed.given, leaves), constraints)


def _keep_sums(fed: Fed, large: set[Variable], constraints: Constraints) -> None:
    """Keep the sums that one of these variables is a term of, and what moves it."""
    for op, _, read in fed.flow.steps if large else ():
        moved = moves(op) and sum(v is not None for v in read) == 1 and not op.attrs.programs
        if (moved or op.full_type in ("Add", "Sub")) and any(v in large for v in read):
            constraints.keep(op, Reason(Kind.FED_SCALE))
            large.update(v for v in op.outputs if v is not None)


def keep_fed_differences(fed: Fed, constraints: Constraints) -> None:
    """Add to ``constraints`` the differences between what is computed of inputs alone, its norms, and what computes
    the operands. A norm of inputs and weights, as of embeddings and positions, is one in the middle."""

    def of_two(op: Operator | None, kind: str) -> bool:
        if op is None or op.full_type != kind:
            return False
        first, second = fed.flow.inputs[op]
        return first in fed.measured and second in fed.measured - {first}

    def is_difference(op: Operator, variable: Variable) -> bool:
        if held(variable):
            return False
        less_one = op.full_type == "Sub" and fed.flow.number(fed.flow.inputs[op][1]) == 1
        of_quotient = (less_one or op.full_type == "Log") and of_two(variable.producer, "Div")
        own_score = of_two(op, "Div") and of_two(variable.producer, "Sub")
        return of_quotient or own_score or of_two(op, "Sub") or traits_of(op).centres

    if any(name in ("Sub", "Log") or kind.centres for name, kind in fed.flow.kinds.items()):
        fed.keep(constraints, Kind.FED_DIFFERENCE, fed.measured, is_difference)


def keep_fed_sums(fed: Fed, constraints: Constraints) -> None:
    """Add to ``constraints`` the sums and differences that become outputs of the program and of which one side is a
    level: computed of inputs alone, and one number for many of the other side's; and products with such a number that
    are a side, of a forecast and the spread of its series."""
    pending, seen = [source(v) for v in fed.program.outputs], set[Operator]()
    while pending:
        op = pending.pop().producer
        if op is None or op in seen or op not in fed.flow.inputs:
            continue
        seen.add(op)
        read = [v for v in fed.flow.inputs[op] if v is not None]
        if traits_of(op).exact:
            pending += read
        elif op.full_type in ("Add", "Sub") and _has_level(op, fed):
            spreads = [v.producer for v in read if v.producer is not None and v.producer.full_type == "Mul"]
            for each in (op, *(maker for maker in spreads if maker in fed.flow.inputs and _has_level(maker, fed))):
                constraints.keep(each, Reason(Kind.FED_SUM))


def _has_level(op: Operator, fed: Fed) -> bool:
    read = [v for v in fed.flow.inputs[op] if v is not None]
    return any(_is_level(v, other, fed) for v in read for other in read)


def _is_level(variable: Variable, other: Variable, fed: Fed) -> bool:
    """Whether it is computed of inputs alone, and one number for many of the other's."""
    if variable not in fed.measured or variable.shape is None or other.shape is None:
        return False
    sizes = (1,) * (len(other.shape) - len(variable.shape)) + tuple(variable.shape)
    return any(size == 1 != more for size, more in zip(sizes, other.shape, strict=False))


def _mean_and_spread(op: Operator, flow: Flow) -> tuple[Any, Any] | None:
    """The mean and the deviation of which the operator makes standard scores, up to their signs; None where it makes
    something else. A scale and a shift are such where they scale down: shares that become levels are none."""
    read = flow.inputs[op]
    if op.full_type == "BatchNormalization":
        mean, variance = (_numbers(v) for v in read[3:5])
        return None if mean is None or variance is None else (mean, np.sqrt(variance + op.attrs.get("epsilon", 1e-5)))
    if op.full_type == "ai.onnx.ml::Scaler":
        with np.errstate(divide="ignore"):
            return np.asarray(op.attrs.get("offset", 0.0)), 1 / np.asarray(op.attrs.get("scale", 1.0))
    spread, maker = _divisor(op, flow), None if read[0] is None else read[0].producer
    if spread is not None:
        mean = _numbers(flow.inputs[maker][1]) if maker is not None and maker.full_type in ("Sub", "Add") else None
        return (0.0 if mean is None else mean), spread
    if maker is None or op.full_type not in ("Sub", "Add"):
        return None
    shift, spread = _numbers(read[1]), _divisor(maker, flow)
    return None if shift is None or spread is None else (shift * spread * (np.abs(spread) > 1), spread)


def _divisor(op: Operator, flow: Flow) -> Any:
    """What the operator divides its first operand by, where that is known."""
    number = _numbers(flow.inputs[op][1]) if op.full_type in ("Div", "Mul") else None
    if number is None or op.full_type == "Div":
        return number
    with np.errstate(divide="ignore"):
        return 1 / number


def _any_above(limit: float, found: tuple[Any, Any] | None, measure: Callable[[Any, Any], Any]) -> bool:
    """Whether what is measured of a mean and a deviation, where it is finite, is anywhere above the limit."""
    if found is None:
        return False
    with np.errstate(all="ignore"):
        measured = measure(*map(np.abs, found))
    return bool((np.isfinite(measured) & (measured > limit)).any())


def _numbers(variable: Variable | None) -> Any:
    data = None if variable is None else content(variable)
    return None if data is None else as_array(data).astype(np.float64)
