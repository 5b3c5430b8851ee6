"""GELUs that an exporter wrote out become one operator again.

Before opset 20 there was no Gelu: exports hold Div, Erf, Add and two Mul, or, of the approximation, which many models
write out themselves, Tanh of a polynomial. Its gradient then reads several tensors of the size of the activation; that
of the one operator reads what it was computed from.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.matching import added_number, number, only_reader, remove
from amp_transpiler.passes.pipeline import Context, Pass
from amp_transpiler.passes.view.constants import content

#: How far a written constant may be from the number that it stands for: it may come from 16 bit.
_NEAR = 1e-3

#: By the operator that bends: how Gelu's attribute calls it, and the polynomial that it is taken of, by powers.
_GELUS: dict[str, tuple[str, dict[int, float]]] = {
    "Erf": ("none", {1: math.sqrt(0.5)}),
    "Tanh": ("tanh", {1: math.sqrt(2 / math.pi), 3: math.sqrt(2 / math.pi) * 0.044715}),
}

#: So many operators at most make a polynomial of what it is of, and so many tensors are looked at for that.
_STEPS, _LOOKED_AT = 8, 12


def fuse_gelus(program: Graph) -> list[str]:
    """Put one Gelu in the place of each ``x / 2 * (1 + erf(x / √2))``, multiplied in any order; in place.

    So too of ``x / 2 * (1 + tanh(√(2 / π) * (x + 0.044715 * x³)))``, its approximation.
    """
    count = 0
    for op in program.operators:
        if op.type in _GELUS and not op.domain:
            kind, wanted = _GELUS[op.type]
            x = _source(op.input(0), wanted)
            last = None if x is None else _last(op, x)
            if x is not None and last is not None:
                out = last.outputs[0]
                remove(last, {x})
                program.add_operator("Gelu", [x], [out], attrs={"approximate": kind}, name=last.name, like=last)
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
    if op is None or op.domain or op.type not in ("Mul", "Div") or not steps:
        return 1.0, Counter([variable])
    (a, of_a), (b, of_b) = (_product(v, leaves, steps - 1) for v in op.inputs)
    if op.type == "Div":
        return (a / b, of_a) if b and not of_b else (1.0, Counter([variable]))
    return a * b, of_a + of_b


def _source(variable: Variable | None, wanted: Mapping[int, float]) -> Variable | None:
    """The tensor of which a variable is the polynomial with these coefficients, by powers."""
    queue = [] if variable is None else [variable]
    for x in queue:
        found = _polynomial(variable, x, _STEPS)
        if found is not None and found.keys() == wanted.keys():
            if all(math.isclose(found[power], wanted[power], rel_tol=_NEAR) for power in wanted):
                return x
        if x.producer is not None and x.producer.type in ("Add", "Mul", "Div", "Pow") and len(queue) < _LOOKED_AT:
            queue += [v for v in x.producer.inputs if v is not None and v not in queue and content(v) is None]
    return None


def _polynomial(variable: Variable | None, x: Variable, steps: int) -> dict[int, float] | None:
    """The coefficients of a variable that is a polynomial in ``x``, by powers; None where it is none."""
    if variable is None or variable is x:
        return None if variable is None else {1: 1.0}
    held, op = number(variable), variable.producer
    if held is not None:
        return {0: held} if held else {}
    if op is None or op.domain or op.type not in ("Add", "Mul", "Div", "Pow") or not steps:
        return None
    a, b = (_polynomial(v, x, steps - 1) for v in op.inputs)
    if a is None or b is None:
        return None
    if op.type == "Add":
        return {power: a.get(power, 0.0) + b.get(power, 0.0) for power in a.keys() | b.keys()}
    if op.type == "Mul":
        return _multiplied(a, b)
    if b.keys() != {0}:
        return None
    if op.type == "Div":
        return {power: coefficient / b[0] for power, coefficient in a.items()}
    square = _multiplied(a, a)
    return {1.0: a, 2.0: square, 3.0: _multiplied(square, a)}.get(b[0])


def _multiplied(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    result = defaultdict[int, float](float)
    for power, coefficient in a.items():
        for other, factor in b.items():
            result[power + other] += coefficient * factor
    return dict(result)


@dataclass(frozen=True)
class FuseGelus(Pass):
    """A GELU that is written out with Erf, or its approximation with Tanh, becomes one operator."""

    name = "fuse-gelus"

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(fuse_gelus(graph))
