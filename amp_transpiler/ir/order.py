"""The order of operators: stable, so that the same program gives the same file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.nodes import Operator, Variable


def topological_order(operators: Mapping[int, Operator], name: str) -> list[Operator]:
    """The operators of program ``name`` in stable order: as added, each after its producers. GraphError on a cycle."""
    added = [operators[key] for key in sorted(operators)]
    if _after_producers(added):
        return added  # as a file is written, and a program is built
    ahead: set[int] = set()  # those in the order before their turn; before the root, all are in it
    open_: set[int] = set()
    order: list[Operator] = []
    for first in added:
        root = first.key
        if root in ahead:
            continue
        for variable in _reads(first):
            producer = None if variable is None else variable.producer
            if producer is not None and producer.key >= root and producer.key not in ahead:
                break
        else:
            order.append(first)
            continue
        stack = [(root, False)]
        while stack:
            key, leave = stack.pop()
            if leave:
                open_.discard(key)
                ahead.add(key)
                order.append(operators[key])
                continue
            if key < root or key in ahead:
                continue
            if key in open_:
                label = operators[key].label
                raise GraphError(f"program '{name}' has a cycle through operator '{label}'")
            open_.add(key)
            stack.append((key, True))
            producers = {v.producer.key for v in _reads(operators[key]) if v is not None and v.producer is not None}
            for producer_key in sorted(producers - ahead, reverse=True):
                if producer_key < root:
                    continue
                if producer_key in open_:
                    raise GraphError(
                        f"program '{name}' has a cycle through operators '{operators[producer_key].label}' "
                        f"and '{operators[key].label}'"
                    )
                stack.append((producer_key, False))
    return order


def walked(order: Sequence[Operator]) -> Iterator[Operator]:
    """Operators in this order, each before those of its nested programs."""
    for op in order:
        yield op
        for nested in op.attrs.programs:
            yield from nested.walk()


def _after_producers(added: Sequence[Operator]) -> bool:
    """Whether each operator was added after all that makes what it reads."""
    for op in added:
        key = op.key
        for variable in (*op.inputs, *op.captures) if op.attrs.programs else op.inputs:
            if variable is not None and variable.producer is not None and variable.producer.key >= key:
                return False
    return True


def _reads(op: Operator) -> Sequence[Variable | None]:
    """What the operator and its nested graphs read."""
    return (*op.inputs, *op.captures) if op.attrs.programs else op.inputs
