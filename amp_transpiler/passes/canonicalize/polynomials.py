"""Polynomials in one tensor, as exporters write them with Add, Mul, Div and Pow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.passes.canonicalize.matching import number
from amp_transpiler.passes.view.constants import constant_content
from amp_transpiler.passes.view.names import source

#: So many operators at most make a polynomial of what it is of, and so many tensors are looked at for that.
_STEPS, _LOOKED_AT = 8, 12
_ARITHMETIC = frozenset({"Add", "Mul", "Div", "Pow"})

#: Coefficients by powers.
Polynomial = Mapping[int, float]


def polynomials(variable: Variable | None) -> Iterator[tuple[Variable, Polynomial]]:
    """The tensors of which a variable is a polynomial, itself among them, and the coefficients; the nearest first."""
    queue = [] if variable is None else [source(variable)]
    for x in queue:
        found = polynomial(variable, x)
        if found is not None:
            yield x, found
        if x.producer is not None and x.producer.type in _ARITHMETIC and len(queue) < _LOOKED_AT:
            operands = (source(v) for v in x.producer.inputs if v is not None)
            queue += [v for v in operands if v not in queue and constant_content(v) is None]


def polynomial(variable: Variable | None, x: Variable, steps: int = _STEPS) -> Polynomial | None:
    """The coefficients of a variable that is a polynomial in ``x``; None where it is none."""
    variable = None if variable is None else source(variable)
    if variable is None or variable is x:
        return None if variable is None else {1: 1.0}
    held, op = number(variable), variable.producer
    if held is not None:
        return {0: held} if held else {}
    if op is None or op.full_type not in _ARITHMETIC or not steps:
        return None
    a, b = (polynomial(v, x, steps - 1) for v in op.inputs)
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


def _multiplied(a: Polynomial, b: Polynomial) -> Polynomial:
    result = defaultdict[int, float](float)
    for power, coefficient in a.items():
        for other, factor in b.items():
            result[power + other] += coefficient * factor
    return dict(result)
