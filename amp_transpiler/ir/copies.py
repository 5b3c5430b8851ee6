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


def producer_past_copies(variable: Variable | None) -> Operator | None:
    """The operator that made the variable, or what it is a copy of."""
    op = None if variable is None else variable.producer
    while op is not None and _copies(op):
        read = op.input(0)
        op = None if read is None else read.producer
    return op


def _copies(op: Operator) -> bool:
    return op.type == "Identity" and not op.domain
