"""The command as one of several ranks: it says everything once."""

from __future__ import annotations

import os
import sys
from typing import Self

from amp_transpiler.cli.terminal import complain
from amp_transpiler.errors import DistributedError
from amp_transpiler.runtime.collective.mpi import launched_rank


class Voice:
    """Inside, what ranks other than the first print goes nowhere; errors by :meth:`complain` are an exception."""

    def __init__(self) -> None:
        self.rank = launched_rank()
        self._streams = sys.stdout, sys.stderr

    def complain(self, error: Exception) -> None:
        """Say an error, by rank 0; by the first rank that can, where it is rank 0 that is gone or hangs."""
        silent = sys.stdout, sys.stderr
        if self.rank and isinstance(error, DistributedError) and not error.told:
            speaker = next(rank for rank in range(len(error.ranks) + 1) if rank not in error.ranks)
            if speaker == self.rank:
                sys.stdout, sys.stderr = self._streams
        complain(error)
        sys.stdout, sys.stderr = silent

    def __enter__(self) -> Self:
        self._streams = sys.stdout, sys.stderr
        if self.rank:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self.rank:
            sys.stdout.close()
        sys.stdout, sys.stderr = self._streams
