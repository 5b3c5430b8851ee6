"""What is fed and brought to size by numbers of its own: prices less their mean, or their least, over their spread.

That is done to what may be of any size and lie far from 0, as forecasters are fed (RevIN): float16 ends at 65504, and
16 bit holds 40000 to 16, or to 128, which is much beside what the prices of a day differ by. It is computed in fp32
from the input on, up to the score. So is what brings a forecast back to that size: products with those numbers, and
sums. Norms that are operators are left as they are: layers are fed what lies around 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.flow import Flow

#: How a score is made of elements and a number of theirs.
_SCORES = frozenset({"Sub", "Div", "Mul"})
#: What brings numbers back to their size.
_JOINS = frozenset({"Add", "Sub", "Mul"})
_WHY = Reason(Kind.FED_OWN)


def keep_own_scores(program: Graph, flow: Flow, constraints: Constraints) -> None:
    """Add to ``constraints`` what makes such scores of inputs, and what makes forecasts of them."""
    inputs = {v for v in program.inputs if v.dtype in FLOATS}
    if any(kind.reduces for kind in flow.kinds.values()):
        found = _Found(inputs, flow)
        while beside := found.beside(inputs):  # as the states that a part of a transformer is fed
            inputs -= beside
            found = _Found(inputs, flow)
        for op in (*found.scores, *found.upstream, *found.forecasts()):
            constraints.keep(op, _WHY)


class _Found:
    """The elements that are fed, in their own size, numbers of theirs, and what makes scores of both."""

    def __init__(self, inputs: set[Variable], flow: Flow) -> None:
        self.flow = flow
        self.elements = set(inputs)
        self.numbers = set[Variable]()
        self.scores: dict[Operator, None] = {}
        for op, name, read in flow.steps:
            operands = [v for v in read if v is not None]
            if operands and not op.attrs.programs:
                self._take(op, name, operands)
        if not any(op.full_type == "Sub" for op in self.scores):
            self.scores.clear()  # shares and lengths alone: norms, whose numbers lie around 0
        self.wanted = {v for op in self.scores for v in self._own(op)}
        #: What computes of inputs what the scores are made of.
        self.upstream: list[Operator] = []
        for op, _, _ in reversed(flow.steps):
            if any(v in self.wanted for v in op.outputs if v is not None):
                self.wanted.update(self._own(op))
                self.upstream.append(op)

    def _take(self, op: Operator, name: str, operands: list[Variable]) -> None:
        fed = [v for v in operands if v in self.elements or v in self.numbers]
        if not fed or any(v not in fed and not _held(v) for v in operands):
            return
        traits, whole = traits_of(op), any(v in self.elements for v in fed)
        made = [v for v in op.outputs if v is not None]
        if traits.reduces and fed[0] is operands[0]:
            self.numbers.update(made)
        elif (traits.elementwise and traits.bounded is None) or moves(op):
            scored = name in _SCORES and whole and any(v in self.numbers for v in fed)
            if scored:
                self.scores[op] = None
            if not scored or name == "Sub":
                (self.elements if whole else self.numbers).update(made)

    def beside(self, inputs: set[Variable]) -> set[Variable]:
        """Those inputs with scores that something else reads as well, which may be 16 bit."""
        makers = {*self.scores, *self.upstream}
        return {v for v in inputs & self.wanted if any(op not in makers for op, _ in self.flow.uses[v])}

    def forecasts(self) -> Iterable[Operator]:
        """What multiplies with these, or adds to them, what the network computes."""
        large = set(self.wanted)
        for op, name, read in self.flow.steps:
            operands = [v for v in read if v is not None]
            sized = [v for v in operands if v in large]
            others = [v for v in operands if v not in large]
            computed = not any(_held(v) or v in self.elements or v in self.numbers for v in others)
            if sized and op not in self.scores and computed and (name in _JOINS or (moves(op) and not others)):
                large.update(v for v in op.outputs if v is not None)
                yield op

    def _own(self, op: Operator) -> list[Variable]:
        return [v for v in self.flow.inputs[op] if v is not None and (v in self.elements or v in self.numbers)]


def _held(variable: Variable) -> bool:
    """Whether the program holds it."""
    return variable.persistable or is_constant(variable)
