"""How kernels of places round 16-bit values: ``roundings.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from amp_transpiler.lists._schemas import read_tables


@dataclass(frozen=True)
class Roundings:
    """How a place's kernels round values of one 16-bit type, by full operator type.

    ``orders``: in which order sums are added that are rounded after each addition, as (what else must hold of the
    operands, order); the first that holds counts. ``inside``: how many roundings of the result the error of a kernel is
    worth that computes in 16 bit. ``roundings.toml`` says more.
    """

    orders: Mapping[str, tuple[tuple[str, str], ...]]
    inside: Mapping[str, float]


@cache
def roundings(kind: str, dtype: str) -> Roundings | None:
    """How kernels of a place of this kind round; None where each result is rounded once."""
    found = read_tables("roundings.toml", kind).get(dtype)
    if found is None:
        return None
    orders: dict[str, list[tuple[str, str]]] = {}
    for entry in sorted(found.get("sums", ()), key=lambda each: "where" not in each):
        for operator in entry["operators"]:
            orders.setdefault(operator, []).append((entry.get("where", ""), entry["order"]))
    return Roundings(
        MappingProxyType({name: tuple(each) for name, each in orders.items()}),
        MappingProxyType(found.get("inside", {})),
    )
