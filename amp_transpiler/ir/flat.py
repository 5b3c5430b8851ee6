"""Several tensors as one: where each lies in a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Elements at whose multiples a part begins: 256 bytes of 16 bit, as kernels that read several elements at once ask.
ALIGNED = 128


@dataclass(frozen=True)
class Segment:
    """A variable in a flat buffer: its first element there, and its shape."""

    variable: str
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of an operator of the step that are worked on together.

    ``shapes``: of the tensors of these rows, which then lie one behind the other in a flat tensor; with none, it is one
    row alone, in its own shape. ``shape`` is that of the flat tensor: (1, n), since ONNX's inference follows the
    content of vectors as if they were shapes. One row may be worked on in several ``chunks`` of a size, one after the
    other: then it is (chunks, n / chunks).
    """

    numbers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    chunks: int = 1
    offsets: tuple[int, ...] = field(init=False)
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        offsets, end = [], 0
        for shape in self.shapes:
            offsets.append(-(-end // ALIGNED) * ALIGNED)
            end = offsets[-1] + math.prod(shape)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "shape", (self.chunks, end // self.chunks))

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return math.prod(self.shape)

    def segments(self, names: Sequence[str]) -> tuple[Segment, ...]:
        """Where variables of these names and of the rows' shapes lie."""
        return tuple(map(Segment, names, self.offsets, self.shapes))
