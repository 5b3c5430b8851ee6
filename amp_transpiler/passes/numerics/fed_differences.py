"""What lies far from 0 beside its spread: years, prices, pressures, temperatures.

16 bit holds 1990 to 0.5, or to 4, and what is left of it less a mean is a few of these. So these are computed in fp32:
standard scores, and differences between what is fed, as of prices of two days or of a series and its mean; norms, which
begin with such a difference; and at the other end what brings a forecast back to the size and the level of its series.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed, held
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import source

#: Deviations by which a standard score may be off.
_OFF = 0.01


def keep_fed_scores(fed: Fed, dtype: str, constraints: Constraints) -> None:
    """Add to ``constraints`` the standard scores of what is fed that 16 bit would put off by more than :data:`_OFF`
    deviations where it holds the mean, and what computes what is scored."""
    rounding = LIMITS[dtype].epsilon / 2

    def is_off(op: Operator, variable: Variable) -> bool:
        found = _mean_and_spread(op, fed.flow)
        if found is None:
            return False
        with np.errstate(all="ignore"):
            off = np.abs(np.divide(*found)) * rounding
        return bool((off[np.isfinite(off)] > _OFF).any())

    if any(kind in fed.flow.kinds for kind in ("BatchNormalization", "Sub", "Add")):
        fed.keep(constraints, Kind.FED_SCORE, fed.given, is_off)


def keep_fed_differences(fed: Fed, constraints: Constraints) -> None:
    """Add to ``constraints`` the differences between what is computed of inputs alone, their quotients and products
    with such, norms, what computes the operands of all these, and what brings outputs back to that size.

    A norm of inputs and weights, as of embeddings and positions, is one in the middle.
    """

    def is_score(op: Operator, _operand: Variable) -> bool:
        if not _is_of_two(op, fed) or op.full_type not in ("Sub", "Div", "Mul"):
            return False
        makers = [op] if op.full_type == "Sub" else [v.producer for v in fed.flow.inputs[op] if v is not None]
        return any(maker is not None and maker.full_type == "Sub" and _is_of_two(maker, fed) for maker in makers)

    def is_norm(op: Operator, operand: Variable) -> bool:
        return traits_of(op).centres and operand in fed.measured

    if "Sub" in fed.flow.kinds:
        own = fed.keep(constraints, Kind.FED_DIFFERENCE, fed.measured, is_score)
        _keep_forecasts(fed, own, constraints)
    if any(kind.centres for kind in fed.flow.kinds.values()):
        fed.keep(constraints, Kind.FED_DIFFERENCE, fed.measured, is_norm)


def _is_of_two(op: Operator, fed: Fed) -> bool:
    """Whether its operands are two, each computed of inputs alone."""
    read = {v for v in fed.flow.inputs.get(op, ()) if v is not None and not held(v)}
    return len(read) == 2 and read <= fed.measured


def _keep_forecasts(fed: Fed, own: set[Variable], constraints: Constraints) -> None:
    """Keep what brings outputs of the program back to the size of what is fed, by ``own`` numbers of that."""
    pending, seen = [source(v) for v in fed.program.outputs] if own else [], set[Operator]()
    while pending:
        op = pending.pop().producer
        if op is None or op in seen or op not in fed.flow.inputs:
            continue
        seen.add(op)
        read = [v for v in fed.flow.inputs[op] if v is not None]
        if op.full_type in ("Add", "Sub", "Mul", "Div") and not own.isdisjoint(read):
            constraints.keep(op, Reason(Kind.FED_LEVEL))
        elif not traits_of(op).exact:
            continue
        pending += read


def _mean_and_spread(op: Operator, flow: Flow) -> tuple[Any, Any] | None:
    """The mean and the deviation of which the operator makes standard scores, up to their signs; None where it makes
    something else."""
    read = flow.inputs[op]
    if op.full_type == "BatchNormalization":
        mean, variance = (_numbers(v) for v in read[3:5])
        return None if mean is None or variance is None else (mean, np.sqrt(variance + op.attrs.get("epsilon", 1e-5)))
    maker = read[0].producer if op.full_type in ("Div", "Mul") and read[0] is not None else None
    if maker is None or maker.full_type not in ("Sub", "Add"):
        return None
    mean, spread = _numbers(flow.inputs[maker][1]), _numbers(read[1])
    if mean is None or spread is None:
        return None
    return mean, spread if op.full_type == "Div" else 1 / spread


def _numbers(variable: Variable | None) -> Any:
    data = None if variable is None else content(variable)
    return None if data is None else as_array(data).astype(np.float64)
