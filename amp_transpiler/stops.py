"""What ends a program from outside: Ctrl-C, and SIGTERM, which schedulers of clusters send."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Stop:
    """What is said of it, and the exit status."""

    word: str
    status: int

    @property
    def told(self) -> str:
        """What a rank tells the others of itself."""
        return f"was {self.word}"


INTERRUPTED, TERMINATED = Stop("interrupted", 128 + signal.SIGINT), Stop("terminated", 128 + signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM: whatever cleans up after Ctrl-C cleans up after it."""


def stop_of(error: KeyboardInterrupt) -> Stop:
    """What has ended a program."""
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def told_stop(fault: str) -> Stop | None:
    """What has ended a rank, from its fault; None where that is another one."""
    return next((stop for stop in (INTERRUPTED, TERMINATED) if stop.told in fault), None)


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises :class:`Terminated`, unless somebody handles it otherwise, or this is no main thread."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: object) -> None:
    raise Terminated
