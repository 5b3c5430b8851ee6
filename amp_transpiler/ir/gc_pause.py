"""The garbage collector rests while programs are read, decided and written."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects from which on going through all that was made takes its time.
MANY = 1 << 18
#: Full collections there had been when objects were last called old unseen.
_unseen: list[int] = []


@contextmanager
def collector_paused(lasting: bool = False) -> Iterator[None]:
    """Such work makes many objects and no garbage; the collector would go through all of them again and again.

    Nor does it go through them at the end, where they are many: they count as old, as what it has been through. Once:
    where it has not looked at what is old since, they and those before them are looked at first. ``lasting``: they stay
    for good, as modules do, and count as old however few they are.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                if lasting:
                    _grow_old()
                elif gc.get_count()[0] >= MANY:
                    _grow_old_once()
            gc.enable()


def _grow_old() -> None:
    gc.freeze()
    gc.unfreeze()  # into the oldest generation


def _grow_old_once() -> None:
    full = gc.get_stats()[2]["collections"]
    if full in _unseen:
        gc.collect()
        _unseen.clear()
        return
    _grow_old()
    _unseen[:] = [full]
