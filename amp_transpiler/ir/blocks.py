"""A program by the names of Paddle's ``Program`` and ``Block``: a program here is its own, only block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from amp_transpiler.ir.nodes import FORWARD, Operator, Variable
from amp_transpiler.lists.paddle import paddle_attributes

if TYPE_CHECKING:
    from amp_transpiler.ir.program import Program

_numbers = count()


def numbered_name() -> str:
    """``program_<n>``, never given before in this process: what a program without a name is called in messages."""
    return f"program_{next(_numbers)}"


def other_program(program: Program, current: Program) -> str:
    """``program`` in a message that tells it from ``current``."""
    return f"program '{program.name}'" if program.name != current.name else f"another program called '{program.name}'"


class Blocks:
    """What :class:`~amp_transpiler.ir.program.Program` answers beside its own names."""

    name: str
    __getattr__ = paddle_attributes("amp_transpiler.Program")

    def call(self, name: str, graph_name: str) -> None:
        """Call the program ``name``, and its graph in a file ``graph_name`` as long as the program is called so."""
        self.name, self._called = name, (name, graph_name)

    @property
    def graph_name(self) -> str:
        """What the graph is called in a file."""
        name, graph_name = self._called
        return graph_name if self.name == name else self.name

    def global_block(self) -> Program:
        """The program itself: operators and variables lie in it directly, nested graphs in attributes of operators."""
        return cast("Program", self)

    current_block = global_block

    @property
    def blocks(self) -> list[Program]:
        """The program, and the nested ones behind it."""
        nested = [inner for op in self.global_block().walk() for inner in op.attrs.programs]
        return [self.global_block(), *nested]

    def block(self, index: int) -> Program:
        """``blocks[index]``."""
        return self.blocks[index]

    @property
    def num_blocks(self) -> int:
        """1, and the number of nested programs."""
        return len(self.blocks)

    @property
    def ops(self) -> list[Operator]:
        """``operators``."""
        return self.global_block().operators

    @property
    def vars(self) -> dict[str, Variable]:
        """Every variable by name."""
        return {variable.name: variable for variable in self.global_block().variables}

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
            for v in self.global_block().variables
            if v.persistable
            and not v.name.startswith("@")
            and (v.trainable or any(op.role == FORWARD for op, _ in v.readers))
        ]

    @property
    def random_seed(self) -> int:
        """``seed``."""
        return self.global_block().seed

    @random_seed.setter
    def random_seed(self, seed: Any) -> None:
        self.global_block().seed = seed


__all__ = ["Blocks", "numbered_name", "other_program"]
