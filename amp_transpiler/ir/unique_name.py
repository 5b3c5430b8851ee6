"""Unique names: ``unique_name.generate("fc")`` gives fc_0, fc_1, …; ``unique_name.guard()`` starts afresh."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from amp_transpiler.ir.context import inside

_Counters = defaultdict[str, int]

#: The counters of the process, and those of the innermost guard of the running thread or task.
_process: _Counters = defaultdict(int)
_guarded: ContextVar[_Counters | None] = ContextVar("counters", default=None)
_lock = threading.RLock()


def generate(prefix: str) -> str:
    """The next unused name ``<prefix>_<n>`` under the current guard."""
    used = counters()
    with _lock:
        number = used[prefix]
        used[prefix] += 1
    return f"{prefix}_{number}"


def counters() -> _Counters:
    """The counters of the current guard themselves, by prefix; a change that is taken back restores them."""
    found = _guarded.get()
    return _process if found is None else found


@contextmanager
def guard() -> Iterator[None]:
    """Names inside start from 0 again, so that a test program built alike names its parameters alike.

    A guard is its thread's (or asyncio task's) own; threads that build without one share their names.
    """
    with inside(_guarded, defaultdict(int)):
        yield
