"""What the user of a conversion names stays what it is while the program is simplified."""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.patterns import matching
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
