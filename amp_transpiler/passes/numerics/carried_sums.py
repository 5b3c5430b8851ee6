"""Sums that a Loop or Scan carries: the state's next value is the state and something more, perhaps scaled.

A count stops at 2048 in float16, and a moving average at what is 2000 times what a round adds: rounding errors add up
from round to round. What computes the next value from the state stays fp32, as the state itself does. A state that is
gated by data, as in an LSTM, forgets, and is no such sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.reached import reached

_SUMS = frozenset({"Add", "Sub", "Sum"})
_SCALES = frozenset({"Mul", "Div"})


@dataclass(frozen=True)
class CarriedSum:
    """``state``: as a round begins with it; ``next``: as it ends; ``operators``: those between.

    ``grows``: nothing scales it, and what is added is no function of it: after enough rounds it leaves any range.
    """

    state: Variable
    next: Variable
    operators: tuple[Operator, ...]
    grows: bool


def carried_sums(flow: Flow) -> Iterator[CarriedSum]:
    """The sums that loops of a program carry."""
    for end, starts in flow.loops.items():
        for start in starts:
            between = _between(flow, start, end)
            names = {op.full_type for op in between}
            if names & _SUMS:
                grows = not names & _SCALES and not _feeds_itself(flow, start, between)
                yield CarriedSum(start, end, tuple(between), grows)


def _between(flow: Flow, start: Variable, end: Variable) -> list[Operator]:
    """The operators between two tensors, where all that happens is sums, constant factors and moved elements."""

    def carriers(variable: Variable) -> list[Operator]:
        return [op for op, slot in flow.uses.get(variable, ()) if variable is not end and _carries(op, slot, flow)]

    def onward(variable: Variable) -> list[Variable | None]:
        return [*flow.beyond(variable), *(made for op in carriers(variable) for made in op.outputs)]

    before = defaultdict[Variable | None, list[Variable]](list)
    for variable in reached([start], onward):
        for made in onward(variable):
            before[made].append(variable)
    behind = dict.fromkeys(reached([end], before.__getitem__))
    return list(dict.fromkeys(op for v in behind for op in carriers(v) if any(made in behind for made in op.outputs)))


def _carries(op: Operator, slot: int, flow: Flow) -> bool:
    name = op.full_type
    if name in _SCALES:
        other = flow.inputs[op][1 - slot]
        return (name == "Mul" or slot == 0) and other is not None and is_constant(other)
    return name in _SUMS or moves(op, slot) or (traits_of(op).exact and traits_of(op).elementwise)


def _feeds_itself(flow: Flow, start: Variable, between: list[Operator]) -> bool:
    """Whether what is added to a state is computed from it, as in a residual network: it is no count of rounds."""
    path = {start, *(v for op in between for v in op.outputs)}

    def onward(variable: Variable) -> list[Variable | None]:
        return [*flow.beyond(variable), *(made for op in flow.readers([variable]) for made in op.outputs)]

    made = set(reached([start], onward))
    return any(v in made and v not in path for op in between for v in flow.inputs[op])
