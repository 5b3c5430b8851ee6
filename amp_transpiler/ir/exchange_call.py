"""What ranks do at an operator of a lowered step: a call of the engine between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Ranks(Protocol):
    """The calls of an engine (``runtime/collective/engine.py``) of which an exchange is made."""

    rank: int
    size: int

    def all_reduce(self, array: Any, op: str = "sum") -> Any: ...
    def reduce_scatter(self, array: Any, sizes: Sequence[int], op: str = "sum") -> Any: ...
    def all_gather(self, part: Any, sizes: Sequence[int], out: Any) -> Any: ...
    def all_to_all(self, parts: Sequence[Any]) -> list[Any]: ...


#: Attribute of an exchange in a lowered step: its number. Other nodes of a rank may be others, and arranged otherwise.
ORDER = "order"

#: ``call(ranks, sent, received, attributes)``: fills the received arrays, each of the shape that lowering gave it.
Call = Callable[[Ranks, Sequence[Any], Sequence[Any], Mapping[str, Any]], None]


@dataclass(frozen=True)
class Exchange:
    """An operator of a lowered step at which ranks meet.

    ``in_place``: it is received where it was sent from, in the same memory, shape by shape.
    ``joined``: it works in place, and what several such operators send may go in one call, their tensors one behind the
    other in one flat array.
    ``uneven``: ranks may send more or less than one another.
    ``on_device``: it hands the arrays to calls of the engine, and looks at nothing of them but their ``size``; so they
    may be values on a device. Those of others are brought to the host and back.
    """

    call: Call
    in_place: bool = False
    joined: bool = False
    uneven: bool = False
    on_device: bool = False
