"""Room in a file for results: those of constants go where the constants and their operators went."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.nodes import Operator

#: Bytes that any result may have.
_TINY = 128


class Room:
    """Bytes that results may take: those of the constants that go with the operators, and a little for all."""

    def __init__(self, common: int) -> None:
        self.common = common
        self.above: dict[Operator, Operator] = {}
        self.bytes: dict[Operator, int] = {}

    def root(self, op: Operator | None) -> Operator:
        """What stands for the connected part that the operator is of."""
        assert op is not None
        path = []
        while op in self.above:
            path.append(op)
            op = self.above[op]
        self.above.update(dict.fromkeys(path, op))
        return op

    def join(self, one: Operator, other: Operator | None) -> None:
        """They are of one connected part."""
        first, second = self.root(one), self.root(other)
        if first is not second:
            self.above[first] = second

    def add(self, op: Operator, size: int) -> None:
        """A constant of this size goes with the operator."""
        root = self.root(op)
        self.bytes[root] = self.bytes.get(root, 0) + size

    def take(self, op: Operator, size: int) -> bool:
        """Take a result in if there is room for it."""
        if size <= _TINY:
            return True
        root = self.root(op)
        own = min(size, self.bytes.get(root, 0))
        if size - own > self.common:
            return False
        self.bytes[root] = self.bytes.get(root, 0) - own
        self.common -= size - own
        return True


def connected(operators: Sequence[Operator]) -> list[list[Operator]]:
    """The operators by connected parts, each in order."""
    parts = Room(0)
    members = set(operators)
    for op in operators:
        for variable in (v for v in op.inputs if v is not None):
            if variable.producer in members:
                parts.join(op, variable.producer)
    found: dict[Operator, list[Operator]] = {}
    for op in operators:
        found.setdefault(parts.root(op), []).append(op)
    return list(found.values())
