"""Past copies: Paddle's exporter puts an Identity behind most operators, TensorFlow's behind some."""

from __future__ import annotations

from collections.abc import Iterator

from amp_transpiler.ir.nodes import Operator, Variable


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


def _copies(op: Operator) -> bool:
    return op.type == "Identity" and not op.domain
