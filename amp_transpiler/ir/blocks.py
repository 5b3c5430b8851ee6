"""What a program holds, by Paddle's names: it is its own, only block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self, cast

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, Operator, Variable
from amp_transpiler.option_checks import is_whole, shown


class Blocks(Graph):
    """A graph with Paddle's names. Operators and variables lie in it directly, nested graphs in attributes of
    operators."""

    def global_block(self) -> Self:
        """The program itself: operators and variables lie in it directly, nested graphs in attributes of operators."""
        return self

    def current_block(self) -> Self:
        """The program itself, as :meth:`global_block`."""
        return self

    @property
    def blocks(self) -> list[Self]:
        """The program, and the nested ones behind it."""
        return [self, *(cast(Self, inner) for op in self.walk() for inner in op.attrs.programs)]

    def block(self, index: int) -> Self:
        """``blocks[index]``; GraphError where there are not so many."""
        blocks = self.blocks
        if not is_whole(index) or not -len(blocks) <= index < len(blocks):
            raise GraphError(f"program '{self.name}' has blocks 0 to {len(blocks) - 1}, and no block {shown(index)}")
        return blocks[index]

    @property
    def num_blocks(self) -> int:
        """1, and the number of nested programs."""
        return len(self.blocks)

    @property
    def ops(self) -> list[Operator]:
        """``operators``."""
        return self.operators

    @property
    def vars(self) -> dict[str, Variable]:
        """Every variable by name."""
        return {variable.name: variable for variable in self.variables}

    def list_vars(self) -> Iterator[Variable]:
        """Every variable, those of nested programs included."""
        for program in self.blocks:
            yield from program.variables

    def all_parameters(self) -> list[Variable]:
        """Trainable and frozen parameters, running statistics among them: what lives in a scope and the model reads.

        State of the training step (moments, masters, the scale) is not among them; ``parameters`` has trainable ones.
        """
        return [
            v
            for v in self.variables
            if v.persistable
            and not v.name.startswith("@")
            and (v.trainable or any(op.role == FORWARD for op, _ in v.readers))
        ]

    @property
    def random_seed(self) -> int:
        """``seed``."""
        return self.seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        self.seed = seed
