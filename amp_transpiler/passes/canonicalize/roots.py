"""Roots that are written as powers become roots: Gemma multiplies by ``(mean(x * x) + epsilon) ** -0.5``.

What recognises norms looks for Sqrt and Reciprocal, and a negative power of what is next to 0 leaves float16.

Roots of squares are marked as lengths: written out, torch's standard deviation, norm, cosine similarity and distance
have a slope of NaN where they are 0, which they have not in torch. Divisions by a length of 1e-12 at least are marked
for float16: a vector of zeros, as of what is padded, has a slope of 1e12 there, which is infinite, and NaN behind a
mask.
"""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import FLOORED, LENGTH
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.passes.canonicalize.matching import (
    added_number,
    computed,
    lower_bound,
    maker,
    number,
    put,
    squaring,
)
from amp_transpiler.passes.view.of_type import of_type

#: An exponent may be so far from a half: torch's exporter writes distances with 1 / (2 + 1e-6).
_ABOUT = 1e-6


def write_roots(program: Graph, names: frozenset[str] = frozenset(), keep: frozenset[Operator] = frozenset()) -> int:
    """Put Sqrt, and Reciprocal behind it, in the place of powers of 0.5 and -0.5 of mean squares and sums of squares,
    which are not negative, with or without an epsilon; in place; how many.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    count = 0
    for power in of_type(program, "Pow"):
        exponent, out = number(power.input(1), power.input(0)), power.output(0)
        if exponent is None or abs(abs(exponent) - 0.5) > _ABOUT or out is None or power in keep or out.name in names:
            continue
        if _of_squares(power.input(0)):
            _write(power, exponent < 0)
            count += 1
    return count


def _of_squares(variable: Variable | None) -> bool:
    summed, epsilon = added_number(variable)
    return _sums_squares(variable if epsilon is None or epsilon < 0 else summed)


def _sums_squares(variable: Variable | None) -> bool:
    if maker(variable, "ReduceSumSquare") is not None:
        return True
    total = maker(variable, "ReduceMean") or maker(variable, "ReduceSum")
    return total is not None and squaring(total.input(0)) is not None


def mark_lengths(program: Graph) -> None:
    """Say of roots of sums and means of squares, their multiples and products, that they are lengths; in place."""
    for root in of_type(program, "Sqrt"):
        if _is_square(root.input(0)):
            root.metadata[LENGTH] = "1"


def mark_floored(program: Graph, dtype: str) -> None:
    """Say of divisions by lengths that are a number at least, or more by it, over which no slope fits ``dtype``, that
    they are; in place."""
    for division in of_type(program, "Div") if dtype == "float16" else ():
        divisor = _unmoved(division.input(1))
        clip = maker(divisor, "Clip")
        length, least = added_number(divisor, "Max" if maker(divisor, "Add") is None else "Add")
        if clip is not None:
            length, least = clip.input(0), lower_bound(clip)
        if least is not None and 0 < least < LIMITS["float16"].normal and _is_length(_unmoved(length)):
            division.metadata[FLOORED] = "1"


def _unmoved(variable: Variable | None) -> Variable | None:
    while variable is not None and variable.producer is not None and moves(variable.producer, 0):
        variable = variable.producer.input(0)
    return variable


def _is_length(variable: Variable | None) -> bool:
    root, total = maker(variable, "Sqrt"), maker(variable, "ReduceSum")
    if root is not None:
        return _is_square(root.input(0))
    if total is not None:
        return maker(total.input(0), "Abs") is not None
    return (maker(variable, "ReduceL2") or maker(variable, "ReduceL1")) is not None


def _is_square(variable: Variable | None) -> bool:
    """Whether a variable is 0 only where sums of squares are, and never less."""
    pending, seen = [variable], set[Variable | None]()
    while pending:
        read = pending.pop()
        if read in seen:
            continue
        seen.add(read)
        op = None if read is None else read.producer
        if op is None or op.domain:
            return False
        if moves(op, 0):
            pending.append(op.input(0))
        elif op.type in ("Mul", "Div"):
            factors = [op.input(0), op.input(1)]
            rest = [factor for factor in factors if not (number(factor) or 0) > 0]
            if not rest or (op.type == "Div" and rest != factors[:1]):
                return False
            pending += rest
        elif not _sums_squares(read):
            return False
    return True


def _write(power: Operator, inverse: bool) -> None:
    base, out = power.inputs[0], power.outputs[0]
    assert base is not None and out is not None
    if inverse:
        put(power, "Reciprocal", [computed(power, "Sqrt", [base], f"{out.name}.root", out.shape)])
    else:
        put(power, "Sqrt", [base])
