"""What an engine needs from what carries its bytes: one exchange, one gather of headers, and a way to tell of faults.

The algorithms of :mod:`~amp_transpiler.runtime.collective.ordered` are written over this alone, so that ranks that are
threads of one process go through the same code as ranks on a cluster.
"""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Seconds between two looks: none at first, then a share of the time waited, up to the longest.
_SHARE, _LONGEST = 0.125, 2e-4


class TransportError(Exception):
    """What carries the bytes says that it cannot."""


@dataclass(frozen=True)
class Peer:
    """Where a rank runs. ``space`` is the same for ranks that see each other's process numbers."""

    rank: int
    host: str
    pid: int
    space: str

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def fields(self) -> dict[str, Any]:
        """As an object that can be told to other ranks."""
        return asdict(self)


def this_process(rank: int) -> Peer:
    """The peer that this process is."""
    host = socket.gethostname()
    try:  # equal host names may be containers, which do not see each other's processes
        space = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        space = host
    return Peer(rank, host, os.getpid(), space)


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, be it that nobody has asked for its exit status yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        pass
    else:
        return state in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def done_in_time(done: Callable[[], bool], seconds: float) -> bool:
    """Whether something is done, asked again and again, at the latest after so many seconds."""
    started = time.perf_counter()
    while not done():
        passed = time.perf_counter() - started
        if passed >= seconds:
            return False
        time.sleep(min(passed * _SHARE, _LONGEST))
    return True


class Pending(ABC):
    """Messages on their way; their buffers belong to the transport until it is done."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Whether all have arrived and all that was to be sent is sent, at the latest after so many seconds."""


class Transport(ABC):
    """Carries bytes between ``size`` ranks, of which this is ``rank``. One thread calls it.

    Exchanges and gathers are matched by their order alone: every rank begins the same ones, in the same order.
    """

    rank: int
    size: int
    #: What is known of every rank.
    peers: tuple[Peer, ...]

    @abstractmethod
    def exchange(self, send: Sequence[np.ndarray | None], receive: Sequence[np.ndarray | None]) -> Pending:
        """Begins to send each rank its bytes (``uint8``, contiguous), and to receive from each into the arrays given.

        Both ends know every size. None, or an array without elements: nothing for that rank, and the entries of this
        rank itself are not looked at.
        """

    @abstractmethod
    def headers(self, own: np.ndarray, out: np.ndarray) -> Pending:
        """Begins to gather one row of bytes from every rank into the rows of ``out``."""

    @abstractmethod
    def tell(self, rank: int, message: bytes) -> None:
        """Sends another rank a short message beside all exchanges, and does not wait."""

    @abstractmethod
    def heard(self) -> list[tuple[int, bytes]]:
        """Messages that came since the last call, with their senders."""

    def gone(self, rank: int) -> bool:
        """Whether the process of that rank is known to have ended."""
        peer = self.peers[rank]
        return peer.space == self.peers[self.rank].space and is_gone(peer.pid)

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds. No call comes after it."""

    @abstractmethod
    def abort(self, status: int) -> None:
        """Has whoever started the ranks end all of them, where there is such a one; may not return."""


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array, as a flat array of bytes."""
    return array.reshape(-1).view(np.uint8)
