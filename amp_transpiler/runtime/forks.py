"""What a process that ``os.fork`` made has of its parent: multiprocessing's "fork", servers that load before they fork.

It has the memory, and of the threads the one that forked. A lock that another thread held stays taken for ever, and a
session with threads of its own waits for them where it is freed, at the end of the process at the latest. So whoever
holds locks or sessions is told, in the child, before anything else runs there.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

from amp_transpiler.errors import ArgumentTypeError


class OfOneProcess:
    """What lies in the memory of its process, or of a device: no other has it, and a copy of it would be the same."""

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            f"{type(self).__name__} is neither copied nor pickled. Another process makes its own Executor and Scope; "
            "save_checkpoint and load_checkpoint bring values there, find_var and set_var into another Scope"
        )


class Inherited(Protocol):
    def forked(self) -> None:
        """Be fit for use in a process without the other threads of the one that made this."""


_inherited: WeakSet[Inherited] = WeakSet()


def tell_of_forks(holder: Inherited) -> None:
    """Call ``holder.forked()`` in every child process, for as long as the holder lives."""
    _inherited.add(holder)


def never_free(value: Any) -> None:
    """Keep a value beyond the end of the interpreter, which frees what modules hold."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _tell() -> None:
    for holder in list(_inherited):
        holder.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_tell)
