"""What simplifies a model before precisions are decided, and leaves alone what the user of the conversion names."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.patterns import matching
from amp_transpiler.passes.canonicalize.simplify import remove_dead
from amp_transpiler.passes.pipeline import Context, Pass, Property, Value
from amp_transpiler.passes.precision.rules import black_operators


def protected(program: Graph, options: ConversionOptions) -> tuple[frozenset[str], frozenset[Operator]]:
    """The names of variables, and the operators that patterns except or keep fp32."""
    operators = set(black_operators(program, options.lists))
    if options.exclude:
        operators.update(matching(program.walk(), list(options.exclude), options.called("exclude")))
    return frozenset(options.lists.black_varnames), frozenset(operators)


def converted(program: Graph) -> bool:
    """Whether a conversion has decided on the program: it was simplified then, and a further one changes nothing."""
    return any([op.why is not None for op in program.walk()])


class Simplification(Pass, base=True):
    """A pass over a model that was not converted before; what it leaves unread goes."""

    needs: ClassVar[tuple[Property | Value[Any], ...]] = (Property.TYPED, Property.CONSTANTS, OPTIONS)

    def applies(self, graph: Graph, context: Context) -> bool:
        return self.wanted(graph, context[OPTIONS]) and not converted(graph)

    def wanted(self, graph: Graph, options: ConversionOptions) -> bool:
        """Whether it is of use in such a conversion of ``graph``."""
        return True

    def run(self, graph: Graph, context: Context) -> None:
        options, before = context[OPTIONS], graph.version
        names, keep = protected(graph, options)
        context.notes += self.simplify(graph, names, keep, options) or ()
        if graph.version != before:
            remove_dead(graph, names, keep)

    @abstractmethod
    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> list[str] | None:
        """Do it in place; what there is to say of it. Variables among ``names`` and operators of ``keep`` stay."""
