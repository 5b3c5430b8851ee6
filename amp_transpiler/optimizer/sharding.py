"""Which rank updates which parameter, where masters and accumulators are dealt out among the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.optimizer.state import static_shape
from amp_transpiler.program import Program
from amp_transpiler.runtime.collective.current import several


def deal_out(program: Program, parameters: Sequence[Variable]) -> None:
    """Give each of these parameters an owner, the largest ones first, to the rank that has least; one rank has none.

    Whole parameters are dealt out: so an update that takes norms of one computes what it would compute alone.
    """
    engine = several()
    if engine is None:
        return
    load = [0] * engine.size
    for each in program.variables:
        if each.is_parameter and each.owner is not None:
            load[each.owner] += _elements(each)
    for parameter in sorted(parameters, key=_elements, reverse=True):
        parameter.owner = load.index(min(load))
        load[parameter.owner] += _elements(parameter)


def _elements(parameter: Variable) -> int:
    return math.prod(static_shape(parameter))
