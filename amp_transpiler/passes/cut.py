"""The assignment of precisions with the least traffic, as a minimum cut. See :func:`solve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HALF, FULL = True, False


@dataclass(frozen=True)
class Tensor:
    """A tensor that operators exchange.

    ``producer``: index of the free operator in whose precision it is made, or HALF or FULL where that is fixed.
    ``readers``: indices of the free operators that read it in their own precision. ``read_half``, ``read_full``:
    whether something fixed reads it in 16 bit, in fp32. ``cast``: bytes that one cast of it moves.
    """

    producer: int | bool
    readers: tuple[int, ...]
    read_half: bool
    read_full: bool
    cast: int
