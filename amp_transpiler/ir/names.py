"""Unique names: ``unique_name.generate("fc")`` gives fc_0, fc_1, …; ``unique_name.guard()`` starts afresh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

_counters: list[defaultdict[str, int]] = [defaultdict(int)]


def generate(prefix: str) -> str:
    """The next unused name ``<prefix>_<n>`` under the current guard."""
    number = _counters[-1][prefix]
    _counters[-1][prefix] += 1
    return f"{prefix}_{number}"


def counters() -> defaultdict[str, int]:
    """The counters of the current guard themselves, by prefix; a change that is taken back restores them."""
    return _counters[-1]


@contextmanager
def guard() -> Iterator[None]:
    """Names inside start from 0 again, so that a test program built alike names its parameters alike."""
    _counters.append(defaultdict(int))
    try:
        yield
    finally:
        _counters.pop()
