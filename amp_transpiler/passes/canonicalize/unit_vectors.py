"""Vectors that are divided by their length: the length is an operator that squares in fp32 inside.

Written out, ``x / max(sqrt(sum(x * x)), epsilon)`` needs fp32 tensors: a square leaves float16 beyond 255, and the
epsilon vanishes there. ReduceL2 reads and writes 16 bit and squares in fp32. The epsilon is there for x = 0, and the
least number of float16 does for that: nothing that float16 holds is shorter. One that is added to the squares does the
same where its root is next to nothing; a larger one is an element of the vector (:mod:`.root_mean_squares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import NORM
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.matching import (
    LEAST_HALF,
    added_number,
    alone,
    computed,
    lower_bound,
    put,
    reduced_axes,
    squares,
)
from amp_transpiler.passes.canonicalize.opset import add_operator
from amp_transpiler.passes.canonicalize.root_mean_squares import LEAST_ROOT
from amp_transpiler.passes.view.of_type import of_type

#: What a length is made of, from the last on.
_PARTS = ("Expand", "Max", "Clip", "Add", "Sqrt", "ReduceL2", "ReduceSum", "ReduceSumSquare")


@dataclass
class _Length:
    """A length as it is written: of ``x`` along ``axes``, ``floor`` at least; what the quotient is multiplied with."""

    x: Variable
    axes: list[int]
    operators: list[Operator]
    floor: float
    gain: float | Variable = 1.0


def write_unit_vectors(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> int:
    """Rewrite divisions of vectors by their lengths, in place; how many.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    count = 0
    for last in of_type(program, "Div", "Mul"):
        found = _length(last, names) if last.outputs[0] is not None else None
        if found is not None and not keep.intersection(found.operators) and last not in keep:
            _write(last, found)
            count += 1
    return count


def _length(last: Operator, names: frozenset[str]) -> _Length | None:
    """What the operator divides by, where that is the length of what it divides."""
    for slot in (1,) if last.type == "Div" else (0, 1):
        below, before = last.input(slot), list[Operator]()
        gain: float | Variable = 1.0
        share = alone(below, ("Div",), names) if last.type == "Mul" else None
        if share is not None and share.inputs[0] is not None:  # as torch writes its weight norm
            gain, below, before = share.inputs[0], share.input(1), [share]
        elif last.type == "Mul":
            product = alone(below, ("Mul",), names)
            factor, by = (None, None) if product is None else added_number(below, "Mul")
            if product is not None and by is not None:
                below, gain, before = factor, by, [product]
            inverse = alone(below, ("Reciprocal",), names)
            below = None if inverse is None else inverse.input(0)
        x = last.input(1 - slot)
        found = None if x is None or x.dtype != "float32" or x.shape is None else _written(below, x, names)
        if found is not None:
            return replace(found, gain=gain, operators=found.operators + before)
    return None


def _written(below: Variable | None, x: Variable, names: frozenset[str]) -> _Length | None:
    """The length of ``x``, with a floor under it or under its square, repeated along its axes or not."""
    operators, floor, power = [], 0.0, 1.0
    while True:
        op = alone(below, _PARTS, names)
        if op is None:
            return None
        operators.append(op)
        if op.type in ("Max", "Clip"):
            least = added_number(below, "Max")[1] if op.type == "Max" else lower_bound(op)
            if least is None or least <= 0 or floor:
                return None
            below = added_number(below, "Max")[0] if op.type == "Max" else op.input(0)
            floor = least**power
        elif op.type == "Add":
            below, least = added_number(below)
            if least is None or not 0 < least < LEAST_ROOT**2 or floor or power == 1:
                return None
            floor = math.sqrt(least)
        elif op.type == "Sqrt" and power == 1:
            below, power = op.input(0), 0.5
        elif op.type == "Expand" and len(operators) == 1:
            below = op.input(0)
        else:
            break
    summed = op.input(0)
    if op.type == "ReduceSum":
        square = alone(summed, ("Mul", "Pow"), names)
        if square is None or not squares(square):
            return None
        operators.append(square)
        summed = square.input(0)
    axes, squared = reduced_axes(op), op.type != "ReduceL2"
    if NORM in op.metadata:  # written here before
        return None
    if summed is not x or squared != (power == 0.5) or not axes or not op.attrs.get("keepdims", 1):
        return None
    return _Length(x, axes, operators, floor)


def _write(last: Operator, found: _Length) -> None:
    program, x = last.program, found.x
    assert x.shape is not None
    shape = tuple(1 if axis in found.axes else size for axis, size in enumerate(x.shape))
    length = program.fresh_variable(f"{x.name}.norm", x.dtype, shape)
    norm = add_operator(last, "ReduceL2", [x], [length], axes=found.axes, keepdims=1)
    norm.metadata[NORM] = "of a vector that it divides"
    if found.floor:
        floor = np.float16(max(found.floor, LEAST_HALF))
        held = program.add_constant(f"{x.name}.floor", np.array(floor, np.float32))
        length = computed(last, "Max", [length, held], length.name, shape)
    gain = found.gain
    if isinstance(gain, float) and gain != 1:
        gain = program.add_constant(f"{x.name}.gain", np.array(gain, np.float32))
    if isinstance(gain, float):
        put(last, "Div", [x, length])
    else:
        put(last, "Mul", [computed(last, "Div", [x, length], f"{x.name}.unit", x.shape), gain])
