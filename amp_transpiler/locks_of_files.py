"""Locks of files and folders, where the system has them: Windows and some network drives have none."""

from __future__ import annotations

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock(handle: int) -> bool:
    """Lock an open file or folder until it is closed; False where the system cannot. BlockingIOError where another has
    the lock."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
