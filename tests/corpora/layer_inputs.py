"""What the cases of functions of the builder are given: a shape (normal numbers), or a kind of numbers of a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    shape: Shape
    kind: str
    below: int = 0


def P(*shape: int) -> Kind:
    return Kind(shape, "positive")


def U(*shape: int) -> Kind:
    return Kind(shape, "probability")


def D(*shape: int) -> Kind:
    return Kind(shape, "distribution")


def I(below: int, *shape: int) -> Kind:  # noqa: E743
    return Kind(shape, "integer", below)


Case = tuple[list[Any], Callable[..., Any], Callable[..., Any]]
X, IMAGE, LINE, CUBE = (3, 4), (2, 4, 7, 6), (2, 4, 9), (2, 2, 4, 5, 6)
