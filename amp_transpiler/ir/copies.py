"""Past copies: Paddle's exporter puts an Identity behind most operators, TensorFlow's behind some. Past what moves."""

from __future__ import annotations

from collections.abc import Iterator

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of


def readers_past_copies(variable: Variable | None) -> Iterator[tuple[Operator, int | str]]:
    """The operators that read the variable or a copy of it, and in which slot."""
    for op, slot in variable.readers if variable is not None else ():
        if _copies(op):
            yield from readers_past_copies(op.output(0))
        else:
            yield op, slot


def original(variable: Variable) -> Variable:
    """What the variable is a copy of; itself where it is none."""
    op = variable.producer
    while op is not None and _copies(op) and op.inputs[0] is not None:
        variable = op.inputs[0]
        op = variable.producer
    return variable


def unmoved(variable: Variable) -> Variable:
    """What holds the elements of a variable before they were moved; itself where it was computed."""
    while (op := variable.producer) is not None and only_moves(op, 0) and op.inputs[0] is not None:
        variable = op.inputs[0]
    return variable


def only_moves(op: Operator, slot: int) -> bool:
    """Whether all that an operator makes are the elements of what it reads in a slot, other than a table's."""
    return moves(op, slot) and not traits_of(op).lookup and len(op.outputs) == 1


def _copies(op: Operator) -> bool:
    return op.full_type == "Identity"
