"""The garbage collector rests while programs are read, decided and written."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects from which on going through all that was made takes its time, and from which on it takes a part of it.
MANY, SOME = 1 << 18, 1 << 12
#: Fewer are frozen by Python itself (3.12 starts with some 400); a program that freezes its objects has thousands.
_OWN_FROZEN = 1000
#: Full collections there had been when objects were last called old unseen.
_unseen: list[int] = []


@contextmanager
def collector_paused(lasting: bool = False) -> Iterator[None]:
    """Such work makes many objects and no garbage; the collector would go through all of them again and again.

    Nor does it go through them at the end, where they are some: they count as old, as what it has been through. Once:
    where it has not looked at what is old since, it goes through them, and where they are many, through those before
    them too. ``lasting``: they stay for good, as modules do, and count as old however few they are. A program that has
    frozen objects is left alone.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() < _OWN_FROZEN:
                if lasting:
                    _grow_old()
                elif (made := gc.get_count()[0]) >= SOME:
                    _grow_old_once(made)
            gc.enable()


def leave_at_exit() -> None:
    """For programs that own their process: it ends without going through all objects again, which takes as long as a
    third of the imports. What modules hold is not finalised then."""
    atexit.register(gc.freeze)


def _grow_old() -> None:
    gc.freeze()
    gc.unfreeze()  # into the oldest generation


def _grow_old_once(made: int) -> None:
    full = gc.get_stats()[2]["collections"]
    if full not in _unseen:
        _grow_old()
        _unseen[:] = [full]
    elif made >= MANY:
        gc.collect()
        _unseen.clear()
