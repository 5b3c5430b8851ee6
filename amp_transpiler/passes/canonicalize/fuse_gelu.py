"""GELUs that an exporter wrote out become one operator again.

Before opset 20 there was no Gelu: exports hold Div, Erf, Add and two Mul, or, of the approximation, which many models
write out themselves, Tanh of a polynomial. Its gradient then reads several tensors of the size of the activation; that
of the one operator reads what it was computed from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.matching import added_number, number, only_reader, put
from amp_transpiler.passes.canonicalize.polynomials import Polynomial, polynomials
from amp_transpiler.passes.pipeline import Context, Pass, Property

#: How far a written constant may be from the number that it stands for: it may come from 16 bit.
_NEAR = 1e-3

#: By the operator that bends: how Gelu's attribute calls it, and the polynomial that it is taken of, by powers.
_GELUS: dict[str, tuple[str, Polynomial]] = {
    "Erf": ("none", {1: math.sqrt(0.5)}),
    "Tanh": ("tanh", {1: math.sqrt(2 / math.pi), 3: math.sqrt(2 / math.pi) * 0.044715}),
}

#: So many operators at most make a product of what is multiplied.
_STEPS = 8


def fuse_gelus(program: Graph) -> list[str]:
    """Put one Gelu in the place of each ``x / 2 * (1 + erf(x / √2))``, multiplied in any order; in place.

    So too of ``x / 2 * (1 + tanh(√(2 / π) * (x + 0.044715 * x³)))``, its approximation.
    """
    count = 0
    for op in program.operators:
        if op.full_type in _GELUS:
            kind, wanted = _GELUS[op.type]
            x = _source(op.input(0), wanted)
            last = None if x is None else _last(op, x)
            if x is not None and last is not None:
                put(last, "Gelu", [x], approximate=kind)
                count += 1
    return [f"{count} GELUs that were written out are one operator each"] if count else []


def _last(bend: Operator, x: Variable) -> Operator | None:
    """The operator that ends in half the product of ``x`` and 1 plus what ``bend`` makes; nobody reads between."""
    added = only_reader(bend.outputs[0])
    if added is None or added_number(added.outputs[0]) != (bend.outputs[0], 1) or added.outputs[0] is None:
        return None
    last: Operator | None = added
    wanted = (0.5, Counter([x, added.outputs[0]]))
    for _ in range(3):
        last = None if last is None else only_reader(last.outputs[0])
        if last is not None and _product(last.outputs[0], wanted[1], _STEPS) == wanted:
            made = last.outputs[0]
            return None if made is None or len(made.shape or ()) != len(x.shape or ()) else last
    return None


def _product(variable: Variable | None, leaves: Container[Variable], steps: int) -> tuple[float, Counter[Variable]]:
    """The number and the tensors, ``leaves`` or what no product makes, of which a variable is the product."""
    op = None if variable is None or variable in leaves else variable.producer
    held = number(variable)
    if held is not None or variable is None:
        return held or 0.0, Counter()
    if op is None or op.full_type not in ("Mul", "Div") or not steps:
        return 1.0, Counter([variable])
    (a, of_a), (b, of_b) = (_product(v, leaves, steps - 1) for v in op.inputs)
    if op.type == "Div":
        return (a / b, of_a) if b and not of_b else (1.0, Counter([variable]))
    return a * b, of_a + of_b


def _source(variable: Variable | None, wanted: Polynomial) -> Variable | None:
    """The tensor of which a variable is the polynomial with these coefficients."""
    for x, found in polynomials(variable):
        if found.keys() == wanted.keys():
            if all(math.isclose(found[power], wanted[power], rel_tol=_NEAR) for power in wanted):
                return x
    return None


class FuseGelus(Pass):
    """A GELU that is written out with Erf, or its approximation with Tanh, becomes one operator."""

    name = "fuse-gelus"
    needs = (Property.TARGET_OPSET,)

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(fuse_gelus(graph))
