"""What the inputs and outputs of an operator of the training step are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Slots:
    """What each input and output is for, by name.

    ``inputs`` come first; ``input_row`` follows once for each tensor that the operator works on. ``outputs`` and
    ``output_row`` say the same of the outputs. An output with the name of an input is that input's new value. An
    operator that writes "parameter" is an update. ``gated``: new values are the old ones, bit for bit, where
    ``found_inf`` is true.
    """

    inputs: tuple[str, ...] = ()
    input_row: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    output_row: tuple[str, ...] = ()
    gated: bool = False

    @property
    def updates(self) -> bool:
        """Whether the operator updates parameters."""
        return "parameter" in self.output_row

    @property
    def accumulators(self) -> tuple[str, ...]:
        """The state that an update keeps of each parameter, beside the parameter and its master weight."""
        return tuple(name for name in self.output_row if name not in ("parameter", "master"))

    def rows(self, inputs: Sequence[T]) -> Iterator[dict[str, T]]:
        """The rows of an operator's inputs; the last one lacks the names whose inputs are not there."""
        width = len(self.input_row)
        for start in range(len(self.inputs), len(inputs), width or 1):
            yield dict(zip(self.input_row, inputs[start : start + width], strict=False))

    def replaced(self, output: int) -> int | None:
        """The input that this output is the new value of; None where there is no such input."""
        name, names, start = "", self.inputs, 0
        if output < len(self.outputs):
            name = self.outputs[output]
        elif self.output_row:
            row, place = divmod(output - len(self.outputs), len(self.output_row))
            name, names, start = self.output_row[place], self.input_row, len(self.inputs) + row * len(self.input_row)
        return start + names.index(name) if name in names else None

    def replacements(self, count: int) -> Iterator[tuple[int, int]]:
        """(output, the input that it is the new value of) of an operator with ``count`` inputs."""
        rows = max(0, -((len(self.inputs) - count) // len(self.input_row))) if self.input_row else 0
        for output in range(len(self.outputs) + rows * len(self.output_row)):
            place = self.replaced(output)
            if place is not None:
                yield output, place

    def states(self, inputs: Sequence[T]) -> list[T]:
        """The inputs that outputs replace, in the order of the outputs."""
        return [inputs[place] for _, place in self.replacements(len(inputs))]
