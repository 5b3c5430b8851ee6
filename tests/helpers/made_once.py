"""What takes long to make and is the same for every test: made once in a run of the tests, for all its processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

_folder: list[Path] = []


def keep_in(folder: Path) -> None:
    """Where the processes of this run keep it."""
    _folder[:] = [folder]


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name, which ``make`` fills if no process has before."""
    (kept,) = _folder
    found, own = kept / name, kept / f"{name}.{os.getpid()}"
    if not found.exists():
        own.mkdir()
        make(own)
        try:
            own.rename(found)
        except OSError:  # another process was quicker
            shutil.rmtree(own)
    return found
