"""What is true of the places that programs are lowered for: ``places.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import onnxruntime

from amp_transpiler.errors import ListError
from amp_transpiler.lists._schemas import read_text

#: Elements from which on onnxruntime's Add and Mul take several threads (1.31, measured).
_SHARED_OUT = 2**17


@dataclass(frozen=True)
class PlaceTraits:
    """What a lowering asks of a place; ``places.toml`` says what each field means."""

    title: str
    provider: str
    plugin: str
    memory: str
    device: bool
    numbered: bool
    one_thread: bool
    in_place: bool
    optional: tuple[str, ...]
    host: bool
    emulates: bool
    fused: bool
    gated_add: bool
    recurrent: bool
    turns_images: bool
    zeroed_rows: bool
    branches: bool
    wide_integers: bool
    tensor_cores: bool
    bodies: bool
    dtypes: tuple[str, ...]
    most_tensors: int
    most_pieces: int
    by_address: bool
    flat_fewest: int
    flat_largest: int
    chunks: tuple[tuple[int, int, int], ...]
    rounds_once: tuple[str, ...]
    over_first: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """Whether sessions run there."""
        return bool(self.provider)

    def chunk(self, cache: int, threads: int) -> tuple[int, int]:
        """From how many elements on a parameter is worked on in chunks, and how many one has about; 0, 0: never.

        ``cache``: bytes of the cache that a core has for itself, 0 where that is not known. A chunk that is shared out
        among ``threads`` lies in the caches of all of them.
        """
        if not self.chunks:
            return 0, 0
        (_, *whole), (_, start, size) = self.chunks[0], [row for row in self.chunks if cache >= row[0]][-1]
        parts = threads if size * threads >= _SHARED_OUT else 1
        return min(whole[0], start * parts), min(whole[1], size * parts)


@cache
def _table() -> Mapping[str, PlaceTraits]:
    found = tomllib.loads(read_text("places.toml"))
    return MappingProxyType({kind: _traits(facts) for kind, facts in found.items()})


def _traits(facts: Mapping[str, Any]) -> PlaceTraits:
    return PlaceTraits(**{name: _fact(name, fact) for name, fact in facts.items()})


def _fact(name: str, fact: Any) -> Any:
    if name == "gated_add":
        return bool(fact) and _version(fact) <= _version(onnxruntime.__version__)
    return tuple(_fact("", item) for item in fact) if isinstance(fact, list) else fact


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


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
