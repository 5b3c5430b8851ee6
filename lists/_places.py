"""What is true of the places that programs are lowered for: ``places.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from amp_transpiler.errors import ListError
from amp_transpiler.lists._schemas import read_text


@dataclass(frozen=True)
class PlaceTraits:
    """What a lowering asks of a place; ``places.toml`` says what each field means."""

    title: str
    provider: str
    memory: str
    device: bool
    host: bool
    emulates: bool
    fused: bool
    gated_add: bool
    recurrent: bool
    branches: bool
    wide_integers: bool
    bodies: bool
    dtypes: tuple[str, ...]
    most_tensors: int
    fails: Mapping[str, Mapping[str, Sequence[str]]]

    @property
    def runs(self) -> bool:
        """Whether sessions run there."""
        return bool(self.provider)


@cache
def _table() -> Mapping[str, PlaceTraits]:
    found = tomllib.loads(read_text("places.toml"))
    return MappingProxyType(
        {
            kind: PlaceTraits(**{"fails": {}} | facts | {"dtypes": tuple(facts["dtypes"])})
            for kind, facts in found.items()
        }
    )


def place_kinds() -> tuple[str, ...]:
    """The kinds of places that programs run on."""
    return tuple(kind for kind, traits in _table().items() if traits.runs)


def half_places() -> tuple[str, ...]:
    """The kinds of places whose kernels compute in 16 bit."""
    return tuple(kind for kind in place_kinds() if not _table()[kind].emulates)


def place_traits(kind: str) -> PlaceTraits:
    """What is true of a place of this kind. ListError for an unknown one."""
    try:
        return _table()[kind]
    except KeyError:
        raise ListError(f"There is no place '{kind}'; there are {', '.join(_table())}.") from None
