"""What lies far from 0 beside its spread: years, prices, pressures, temperatures.

16 bit holds 1990 to 0.5, or to 4, and what is left of it less a mean is a few of these. So these are computed in fp32:
standard scores, and differences between what is fed, as of prices of two days or of a series and its mean; norms, which
begin with such a difference; and at the other end what brings a forecast back to the size and the level of its series.

What is scaled down, as seconds of a day to days, was large: float16 ends at 65504. Nor does it hold what is added to
that, as a forecast to the state of the air. What is divided by its own mean, as sales are, may be as large.
The returns of prices are differences too: quotients less 1, or logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.stencils import is_stencil
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.ops.norm_parts import epsilon_of
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed, held
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.reached import reached

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

    steps = fed.flow.of("BatchNormalization", "ai.onnx.ml::Scaler", "Add", "Sub", "Mul", "Div")
    fed.keep(constraints, Kind.FED_SCORE, fed.given, steps, is_off)
    _keep_sums(fed, fed.keep(constraints, Kind.FED_SCALE, fed.given, steps, leaves), constraints)


def _keep_sums(fed: Fed, large: set[Variable], constraints: Constraints) -> None:
    """Keep the sums that one of these variables is a term of, and what moves it."""
    for op, _, read in fed.flow.steps if large else ():
        moved = moves(op) and sum(v is not None for v in read) == 1 and not op.attrs.programs
        if (moved or op.full_type in ("Add", "Sub")) and any(v in large for v in read):
            constraints.keep(op, Reason(Kind.FED_SCALE))
            large.update(v for v in op.outputs if v is not None)


def keep_fed_differences(fed: Fed, ranges: Ranges, dtype: str, constraints: Constraints) -> None:
    """Add to ``constraints`` the differences between what is computed of inputs alone, their quotients and products
    with such, the returns of prices (quotients less 1, or their logarithms), shares of totals that 16 bit may not hold,
    norms, products with stencils, what computes the operands of all these, and what brings outputs back to that size.

    A norm of inputs and weights, as of embeddings and positions, is one in the middle.
    """

    limits = LIMITS[dtype]

    def is_score(op: Operator, operand: Variable) -> bool:
        kind, read = op.full_type, [v for v in fed.flow.inputs[op] if v is not None]
        if kind in ("Div", "Mul") and _is_of_two(op, fed):
            return any(_is_of_two(v.producer, fed, "Sub") for v in read)
        less_one = kind == "Sub" and fed.flow.number(read[-1]) == 1
        return _is_of_two(op, fed, "Sub") or ((less_one or kind == "Log") and _is_of_two(operand.producer, fed, "Div"))

    def is_share(op: Operator, operand: Variable) -> bool:
        own = _is_of_two(op, fed, "Div") and fed.flow.inputs[op][1] in fed.totals
        return own and not ranges.within(operand, limits.largest)

    flow, keep = fed.flow, partial(fed.keep, constraints)
    own = keep(Kind.FED_DIFFERENCE, fed.measured, flow.of("Sub", "Mul", "Div", "Log"), is_score)
    own |= keep(Kind.FED_SHARE, fed.measured, flow.of("Div"), is_share)
    _keep_forecasts(fed, own, constraints)
    norms = flow.of(having=lambda kind: kind.centres)
    keep(Kind.FED_DIFFERENCE, fed.measured, norms, lambda op, operand: operand in fed.measured)
    products = flow.of(having=lambda kind: kind.weight_axes is not None)
    keep(Kind.FED_DIFFERENCE, fed.measured, products, lambda op, operand: _takes_off(op, fed))


def _takes_off(op: Operator, fed: Fed) -> bool:
    """Whether it is a product of inputs alone with a stencil."""
    read = fed.flow.inputs[op][:2]
    fields = [v for v in read if v in fed.measured]
    return len(fields) == 1 and any(v and v not in fields and is_stencil(op, slot, v) for slot, v in enumerate(read))


def _is_of_two(op: Operator | None, fed: Fed, kind: str = "") -> bool:
    """Whether it is an operator, of this kind, whose operands are two, each computed of inputs alone."""
    if op is None or (kind and op.full_type != kind):
        return False
    read = {v for v in fed.flow.inputs.get(op, ()) if v is not None and not held(v)}
    return len(read) == 2 and read <= fed.measured


def _keep_forecasts(fed: Fed, own: set[Variable], constraints: Constraints) -> None:
    """Keep what brings outputs of the program back to the size of what is fed, by ``own`` numbers of that."""

    def brings_back(op: Operator) -> bool:
        return op.full_type in ("Add", "Sub", "Mul", "Div") and not own.isdisjoint(fed.flow.inputs[op])

    def before(made: Variable) -> Iterable[Variable | None]:
        op = made.producer
        return fed.flow.inputs.get(op, ()) if op is not None and (traits_of(op).exact or brings_back(op)) else ()

    for made in reached(map(source, fed.program.outputs) if own else (), before):
        if made.producer in fed.flow.inputs and brings_back(made.producer):
            constraints.keep(made.producer, Reason(Kind.FED_LEVEL))


def _mean_and_spread(op: Operator, flow: Flow) -> tuple[Any, Any] | None:
    """The mean and the deviation of which the operator makes standard scores, up to their signs; None where it makes
    something else. A scale and a shift are such where they scale down: shares that become levels are none."""
    read = flow.inputs[op]
    if op.full_type == "BatchNormalization":
        mean, variance = (_numbers(v) for v in read[3:5])
        return None if mean is None or variance is None else (mean, np.sqrt(variance + epsilon_of(op)))
    if op.full_type == "ai.onnx.ml::Scaler":
        with np.errstate(divide="ignore"):
            return np.asarray(op.attrs.get("offset", 0.0)), 1 / np.asarray(op.attrs.get("scale", 1.0))
    spread, maker = _divisor(op, flow), None if read[0] is None else read[0].producer
    if spread is not None:
        mean = _numbers(flow.inputs[maker][1]) if maker is not None and maker.full_type in ("Sub", "Add") else None
        return (0.0 if mean is None else mean), spread
    if maker is None or op.full_type not in ("Sub", "Add"):
        return None
    spread = _divisor(maker, flow)
    shift = None if spread is None else _numbers(read[1])
    return None if shift is None else (shift * spread * (np.abs(spread) > 1), spread)


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
