"""Folders that one training at a time writes into: two would remove each other's checkpoints and mix their logs."""

from __future__ import annotations

import os
from contextlib import ExitStack

from amp_transpiler.errors import AmpError
from amp_transpiler.locks_of_files import lock


class Claims(ExitStack):
    """Folders that are this training's until it ends, or its process does; a context manager.

    Where the system has no locks for folders (Windows, some network drives), nothing is claimed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: set[tuple[int, int]] = set()

    def take(self, folder: str | os.PathLike[str], what: str, kind: type[AmpError]) -> None:
        """Claim a folder, where it is there; ``kind``, naming ``what``, where another training has it."""
        if not os.path.isdir(folder):
            return
        try:
            handle = os.open(folder, os.O_RDONLY)
        except OSError:  # it may not be listed, or the system opens no folders
            return
        found = os.fstat(handle)
        if (found.st_dev, found.st_ino) in self._held:
            os.close(handle)
            return
        self.callback(os.close, handle)
        try:
            if lock(handle):
                self._held.add((found.st_dev, found.st_ino))
        except BlockingIOError:
            raise kind(
                f"{what} '{os.fspath(folder)}': another training that has not ended writes there; wait for it, or give "
                "another folder"
            ) from None
