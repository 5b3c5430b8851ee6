"""Kernels of places that do not compute what they should: ``faults.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from amp_transpiler.lists._schemas import read_tables


@dataclass(frozen=True)
class Fault:
    """A kernel that fails on some operands; ``faults.toml`` says what each field means."""

    operator: str
    where: str
    what: str
    around: str
    measured: str

    @property
    def channels(self) -> int:
        """The number that channels are padded to a multiple of; 0 where it is written otherwise."""
        way, _, number = self.around.partition("channels by ")
        return 0 if way else int(number)


@cache
def faults(kind: str) -> Mapping[str, tuple[Fault, ...]]:
    """By full operator type: the faults of the kernels of a place of this kind."""
    found: dict[str, tuple[Fault, ...]] = {}
    for entry in read_tables("faults.toml", kind):
        found[entry["operator"]] = (*found.get(entry["operator"], ()), Fault(**entry))
    return MappingProxyType(found)
