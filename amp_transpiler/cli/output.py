"""Standard output whose trouble waits until the work is done."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TextIO


class Patient(io.TextIOBase):
    """Writes to ``stream`` until that fails, and then nowhere; ``trouble`` is why.

    A reader that has gone (``head``), or a full disk behind the output, must not keep a command from writing its files.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.trouble: OSError | None = None

    def write(self, text: str) -> int:
        """Write, where that still works."""
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Bring what was written to the stream's end, if it is still open: from Python 3.14 on this runs at the end of
        the object's life, and would say that it is not."""
        if not self.stream.closed:
            self._try(self.stream.flush)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self.stream.isatty()

    def _try(self, call: Callable[[], object]) -> None:
        if self.trouble is None:
            try:
                call()
            except OSError as error:
                self.trouble = error


@contextmanager
def patient_output() -> Iterator[Patient]:
    """Standard output is a :class:`Patient`; after trouble nothing that is left in its buffer is tried again."""
    stream = sys.stdout
    with redirect_stdout(Patient(stream)) as output:
        try:
            yield output
        finally:
            output.flush()
            if output.trouble is not None:
                with suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
