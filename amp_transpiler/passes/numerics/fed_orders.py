"""Which numbers come first, and on which side of a bound they lie, where they are at hand in fp32: times, distances,
prices, years that are fed, and distances that a network computes in fp32.

16 bit makes ties of 3000.4 and 3000.9, and 2016.5 is 2016 or 2017 in it: another order, another row of a table. It
takes no cast to read them as they are.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.traits import Traits
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed, held
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.flow import Flow


def keep_fed_orders(fed: Fed, constraints: Constraints) -> None:
    """Add to ``constraints`` what tells the order of what is fed (:attr:`.Fed.told`), what compares it with bounds or
    with itself, and what computes the operands of both."""

    def is_order(op: Operator, operand: Variable) -> bool:
        return operand in fed.told and _tells_order(op)

    def is_comparison(op: Operator, operand: Variable) -> bool:
        read = [v for v in fed.flow.inputs[op] if v is not None]
        return not fed.told.isdisjoint(read) and all(v in known or held(v) for v in read)

    orders, bounds = fed.flow.of(having=_ranks), fed.flow.of(having=lambda kind: kind.compares)
    known = fed.told | fed.given
    fed.keep(constraints, Kind.FED_ORDER, fed.told, orders, is_order)
    fed.keep(constraints, Kind.FED_BOUND, known, bounds, is_comparison)


def keep_orders(flow: Flow, constraints: Constraints) -> None:
    """Add to ``constraints`` what tells the order of what they keep fp32, and what computes each element of its operand
    of one of that: a root of squared distances, bounded below."""
    for op, _, read in flow.of(having=_ranks):
        if _tells_order(op):
            between, variable = [op], read[0]
            while variable is not None and (maker := variable.producer) not in constraints.operators:
                variable = None if maker is None else _element(maker, flow)
                between += [maker] if maker is not None else []
            for each in between if variable is not None else ():
                constraints.keep(each, Reason(Kind.ORDER))


def _element(op: Operator, flow: Flow) -> Variable | None:
    """The one tensor of which an operator moves or computes each element by itself; None where it does something
    else."""
    read = [v for v in flow.inputs.get(op, ()) if v is not None and not (held(v) or is_constant(v))]
    return read[0] if len(read) == 1 and (moves(op) or traits_of(op).elementwise) else None


def _ranks(kind: Traits) -> bool:
    return kind.ranks is not None


def _tells_order(op: Operator) -> bool:
    """Whether something reads which elements come first."""
    slot = traits_of(op).ranks
    made = None if slot is None else op.output(slot)
    return made is not None and bool(made.readers or made in made.program.outputs)
