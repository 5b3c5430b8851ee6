"""Roots of a few squares become Euclidean norms: the magnitude of a spectrum, computed in fp32 inside.

Written out, ``sqrt(re * re + im * im + epsilon)`` needs fp32 tensors for its squares. As the norm of a vector of the
operands, and of the root of the epsilon as one more element, it reads and writes 16 bit. Where a division or a
logarithm reads the root, the digits of its smallest values count, which 16 bit does not keep: there it stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import NORM
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves
from amp_transpiler.passes.canonicalize.matching import added_number, only_reader, remove, squares
from amp_transpiler.passes.canonicalize.opset import add_operator
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.reached import reached

#: The least root of an epsilon: eight steps of float16's smallest numbers, to one of which it is rounded.
_LEAST = 2.0**-21
#: What reads a root so that the digits of a small one count.
_DELICATE = frozenset({"Log", "Div", "Reciprocal", "Pow", "Sqrt"})


@dataclass
class _Root:
    """The sum under a root: what is squared, a number beside it, and the operators that say so."""

    terms: list[Variable]
    number: float
    operators: list[Operator]


def write_hypotenuses(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> None:
    """Rewrite roots of sums of squares of tensors of one shape, in place.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    for root in of_type(program, "Sqrt"):
        made = root.output(0)
        if made is None or made in program.outputs or _counts(made):
            continue
        found = _under(root, {*program.outputs, *program.updates.values()}, names, keep)
        if found is not None and len(found.terms) + bool(found.number) > 1 and made.name not in names:
            _write(root, made, found)


def _under(root: Operator, outputs: set[Variable], names: frozenset[str], keep: frozenset[Operator]) -> _Root | None:
    """What is under the root, where it is squares of tensors of one shape and nobody else's."""
    found, pending = _Root([], 0.0, [root]), [root.input(0)]
    while pending:
        variable = pending.pop()
        op = None if variable is None else variable.producer
        if variable is None or op is None or op.domain or variable in outputs or variable.name in names:
            return None
        if only_reader(variable) is None:
            return None
        found.operators.append(op)
        if op.type == "Add":
            other, number = added_number(variable)
            if number is None:
                pending += op.inputs[::-1]
            elif found.number or number < 0:
                return None
            else:
                pending.append(other)
                found.number = number
        elif squares(op) and op.inputs[0] is not None:
            found.terms.append(op.inputs[0])
        else:
            return None
    first = found.terms[0]
    alike = all(v.shape == first.shape and v.dtype == "float32" for v in found.terms)
    known = first.shape is not None and None not in first.shape
    fits = not found.number or math.sqrt(found.number) >= _LEAST
    return found if alike and known and fits and not keep & set(found.operators) else None


def _counts(root: Variable) -> bool:
    """Whether the digits of a small root count in what follows, moved about or not."""

    def moved(at: Variable) -> Iterable[Variable | None]:
        return (v for op, slot in at.readers if isinstance(slot, int) and moves(op, slot) for v in op.outputs)

    readers = (use for v in reached([root], moved) for use in v.readers)
    return any(isinstance(slot, str) or op.type in _DELICATE for op, slot in readers)


def _write(root: Operator, made: Variable, found: _Root) -> None:
    program, rank = root.program, len(found.terms[0].shape or ())
    needed = set(found.terms)
    remove(root, needed)

    def add(type_: str, inputs: Sequence[Variable], size: int, **attrs: object) -> Variable:
        shape = (*(found.terms[0].shape or ()), size)
        out = program.fresh_variable(f"{made.name}.{type_.lower()}", "float32", shape)
        add_operator(root, type_, inputs, [out], **attrs)
        return out

    columns = [add("Unsqueeze", [term], 1, axes=[rank]) for term in found.terms]
    vector = add("Concat", columns, len(columns), axis=rank) if len(columns) > 1 else columns[0]
    if found.number:
        pads, value = [0] * (2 * rank + 1) + [1], float(np.float16(math.sqrt(found.number)))
        vector = add("Pad", [vector], len(columns) + 1, pads=pads, value=value)
    norm = add_operator(root, "ReduceL2", [vector], [made], axes=[rank], keepdims=0)
    norm.name, norm.metadata[NORM] = root.name, "of a sum of squares"
