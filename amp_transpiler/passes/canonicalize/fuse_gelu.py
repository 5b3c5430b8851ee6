"""GELUs that an exporter wrote out become one operator again.

Before opset 20 there was no Gelu: exports hold Div, Erf, Add and two Mul. Its gradient then reads four tensors of the
size of the activation; that of the one operator reads what it was computed from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.passes.canonicalize.fuse_norm import added_number, maker, remove
from amp_transpiler.passes.pipeline import Context, Pass
from amp_transpiler.passes.view.constants import content

#: How far a written constant may be from the number that it stands for: it may come from 16 bit.
_NEAR = 1e-3


def fuse_gelus(program: Graph) -> list[str]:
    """Put one Gelu in the place of each ``x / 2 * (1 + erf(x / √2))``, multiplied in any order; in place."""
    count = 0
    for op in program.operators:
        found = _found(op) if op.type == "Erf" and not op.domain else None
        if found is not None:
            _fuse(*found)
            count += 1
    return [f"{count} GELUs that were written out are one operator each"] if count else []


def _fuse(x: Variable, last: Operator) -> None:
    program, out = last.program, last.outputs[0]
    remove(last, {x})
    program.add_operator("Gelu", [x], [out], attrs={"approximate": "none"}, name=last.name, like=last)


def _found(erf: Operator) -> tuple[Variable, Operator] | None:
    """What goes into the GELU that holds this Erf, and its last operator."""
    x, factor = _multiplied(erf.input(0))
    added = _only_reader(erf, "Add")
    if x is None or not math.isclose(factor, math.sqrt(0.5), rel_tol=_NEAR) or added is None:
        return None
    summed, one = added_number(added.outputs[0])
    first = _only_reader(added, "Mul") if summed is erf.outputs[0] and one == 1 else None
    if first is None or first.input(0) is first.input(1):
        return None
    other = first.input(0) if first.input(1) is added.outputs[0] else first.input(1)
    if _multiplied(other) == (x, 0.5):
        return x, first
    last = _only_reader(first, "Mul")
    if last is None:
        return None
    if other is x:
        return (x, last) if _multiplied(last.outputs[0]) == (first.outputs[0], 0.5) else None
    halved = _multiplied(first.outputs[0]) == (added.outputs[0], 0.5)
    return (x, last) if halved and x in (last.input(0), last.input(1)) else None


def _multiplied(variable: Variable | None) -> tuple[Variable | None, float]:
    """What a number is multiplied with, or divided by, and the factor."""
    for kind, slots in (("Mul", (0, 1)), ("Div", (1,))):
        op = maker(variable, kind)
        for slot in slots if op is not None else ():
            other = op.input(slot) if op is not None else None
            data = None if other is None else content(other)
            if op is not None and data is not None and math.prod(tensor_type(data)[1]) == 1:
                number = float(as_array(data).reshape(-1)[0])
                return op.input(1 - slot), number if kind == "Mul" else 1 / number if number else 0.0
    return None, 0.0


def _only_reader(op: Operator, type_: str) -> Operator | None:
    """The operator of this type that alone reads what ``op`` makes, which nobody outside the program sees."""
    made = op.outputs[0]
    if made is None or len(made.readers) != 1 or made in op.program.outputs:
        return None
    reader, _ = made.readers[0]
    return reader if reader.type == type_ and not reader.domain else None


@dataclass(frozen=True)
class FuseGelus(Pass):
    """A GELU that is written out with Erf becomes one operator."""

    name = "fuse-gelus"

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(fuse_gelus(graph))
