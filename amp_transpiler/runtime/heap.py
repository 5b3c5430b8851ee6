"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
from typing import Any

try:
    _trim: Any = ctypes.CDLL(None).malloc_trim
except (AttributeError, OSError, TypeError):  # not glibc: the others give large blocks back by themselves
    _trim = None


def trim() -> None:
    """Give back the pages between what is in use.

    glibc takes a block that is larger than any it has seen freed from the system and gives it back, but from the first
    one freed on it takes blocks of that size, up to 32 MiB, from its heap: there the memory of replaced weights stays.
    """
    if _trim is not None:
        _trim(0)
