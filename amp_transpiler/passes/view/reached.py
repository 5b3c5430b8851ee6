"""What is reached from somewhere, step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def reached(starts: Iterable[Item], onward: Callable[[Item], Iterable[Item | None]]) -> Iterator[Item]:
    """The starts, and all that ``onward`` leads to, each once; what was found last comes first, None leads nowhere."""
    pending = list(starts)
    seen = set(pending)
    while pending:
        here = pending.pop()
        yield here
        for each in onward(here):
            if each is not None and each not in seen:
                seen.add(each)
                pending.append(each)
