"""Which of the numbers that are fed come first, and on which side of a bound they lie: times, distances, prices, years.

16 bit makes ties of 3000.4 and 3000.9, and 2016.5 is 2016 or 2017 in it: another order, another row of a table. They
are at hand in fp32, so that it takes no cast to read them so.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed, held


def keep_fed_orders(fed: Fed, constraints: Constraints) -> None:
    """Add to ``constraints`` what tells the order of what is fed (:attr:`.Fed.told`), what compares it with bounds or
    with itself, and what computes the operands of both."""

    def is_order(op: Operator, operand: Variable) -> bool:
        slot = traits_of(op).ranks
        made = None if slot is None else op.output(slot)
        return made is not None and operand in fed.told and bool(made.readers or made in made.program.outputs)

    def is_comparison(op: Operator, operand: Variable) -> bool:
        read = [v for v in fed.flow.inputs[op] if v is not None]
        return traits_of(op).compares and not fed.told.isdisjoint(read) and all(v in known or held(v) for v in read)

    kinds = fed.flow.kinds.values()
    if any(kind.ranks is not None for kind in kinds):
        fed.keep(constraints, Kind.FED_ORDER, fed.told, is_order)
    if any(kind.compares for kind in kinds):
        known = fed.told | fed.given
        fed.keep(constraints, Kind.FED_BOUND, known, is_comparison)
