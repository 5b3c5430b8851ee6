"""Operators of which a place's kernels lose too much inside stay fp32: sums that are rounded after each addition."""

from __future__ import annotations

import math

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.lists import parts_of, place_traits, roundings
from amp_transpiler.passes.lowering.arithmetic import MOST, Arithmetic
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.typing import has_float

#: The kinds of reasons given here.
ROUNDED = frozenset({Kind.ROUNDED_SUM, Kind.ROUNDED_INSIDE})


def keep_rounded(program: Graph, kind: str, dtype: str, constraints: Constraints) -> None:
    """Keep fp32 what kernels of places of this kind would round more often inside than is allowed."""
    found = roundings(kind, dtype)
    if found is None:
        return
    arithmetic, title = Arithmetic(kind), place_traits(kind).title
    for op in program.walk():
        if not has_float(op) or op.attrs.programs:
            continue
        order, worth = inner_roundings(op, arithmetic, dtype)
        if op.domain == DOMAIN and op.full_type not in found.orders and op.full_type not in found.inside:
            worth = math.inf  # not measured
        if worth > MOST:
            why = Kind.ROUNDED_SUM if order else Kind.ROUNDED_INSIDE
            constraints.keep(op, Reason(why, title, (dtype, in_roundings(worth))))


def inner_roundings(op: Operator, arithmetic: Arithmetic, dtype: str) -> tuple[str, float]:
    """In which order a kernel adds up an operator's sum, "" for none, and how many roundings its error is worth."""
    shapes, made = [[None if v is None else static(v.shape) for v in each] for each in (op.inputs, op.outputs)]
    parts = () if op.domain else parts_of(op.type, dtype, op.program.opset(), arithmetic.kind)
    if parts:  # the sizes of what lies between them are not known
        return "", max(arithmetic.rounds(part, dtype, {}, [None] * 3, [None])[1] for part in parts)
    return arithmetic.rounds(op.full_type, dtype, op.attrs, shapes, made)


def in_roundings(worth: float) -> str:
    """An error, of which mean squares are given, as a number of roundings of the result."""
    return f"{math.sqrt(worth):.2g}" if math.isfinite(worth) else "an unknown number of"
