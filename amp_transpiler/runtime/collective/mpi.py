"""Ranks that ``mpiexec`` starts: the transport over MPI, through mpi4py, and the engine on it.

MPI carries bytes alone: point-to-point messages for arrays, one small all-gather for headers, and a communicator of its
own for what is told beside. Nothing blocks in MPI; the engine's thread asks whether messages are done, and listens in
between. All calls come from that thread, so that MPI must offer SERIALIZED threads (its start and end are the main
thread's); a program that calls MPI itself beside an engine needs MULTIPLE, which mpi4py asks for by default.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import DistributedError, MissingPackageError
from amp_transpiler.runtime.collective.ordered import OrderedEngine
from amp_transpiler.runtime.collective.transport import (
    Peer,
    Pending,
    Transport,
    TransportError,
    done_in_time,
    this_process,
)

#: Numbers of ranks in the environment, by the launcher that sets them; and the number of this one, in the same order.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpiexec of Open MPI",
    "MV2_COMM_WORLD_SIZE": "mpiexec of MVAPICH",
    "PMI_SIZE": "mpiexec of MPICH or Intel MPI",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
#: Tag of the first messages, which go over the user's communicator.
_HELLO = 32001
#: Bytes of a message: MPI before version 4 counts in 32 bits.
_MESSAGE = 1 << 30
#: Bytes for what a rank says of itself.
_ROOM = 1 << 14


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """The number of ranks that a launcher says it started, and what it is called; None where none did."""
    for name, launcher in _LAUNCHERS.items():
        text = environment.get(name, "")
        if text.isdecimal() and (int(text) > 1 or launcher != "srun"):  # a batch job is a step of one task as well
            return int(text), launcher
    return None


def launched_rank() -> int:
    """The number that a launcher of several ranks gave this one, before MPI has started; 0 where none did."""
    found = launched()
    if found is None or found[0] == 1:
        return 0
    own = dict(zip(_LAUNCHERS.values(), _RANKS, strict=True))[found[1]]
    return int(os.environ.get(own, "0"))


def imported(timeout: float) -> Any:
    """mpi4py's module, whose import starts MPI. MissingPackageError where it, or an MPI, is not installed.

    MPI's start waits for all ranks, and lets nothing of Python run meanwhile. After ``timeout`` seconds the process
    ends, and says the lines in which it is.
    """
    several = (launched() or (1, ""))[0] > 1
    if several and sys.stderr is not None:
        faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        from mpi4py import MPI  # noqa: PLC0415 - an optional package; waits until every rank has come to init()
    except ImportError as error:
        raise MissingPackageError(
            f"several ranks on CPU need mpi4py and an MPI: pip install 'amp-transpiler[mpi]', or, on a cluster with an "
            f"MPI of its own, pip install mpi4py ({error})"
        ) from None
    except RuntimeError as error:  # mpi4py is there, and finds no library
        raise MissingPackageError(
            f"mpi4py finds no MPI library: pip install 'amp-transpiler[mpi]', or load the cluster's MPI ({error})"
        ) from None
    finally:
        if several:
            faulthandler.cancel_dump_traceback_later()
    return MPI


class _Requests(Pending):
    def __init__(self, mpi: Any, requests: list[Any], buffers: list[Any]) -> None:
        self._mpi, self._requests, self._buffers = mpi, requests, buffers

    def wait(self, seconds: float) -> bool:
        if not done_in_time(lambda: _guarded(lambda: self._mpi.Request.Testall(self._requests)), seconds):
            return False
        self._requests, self._buffers = [], []
        return True


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # mpi4py's own class, a RuntimeError
        raise TransportError(f"MPI says {error}") from error


def _pieces(array: np.ndarray | None) -> list[np.ndarray]:
    size = 0 if array is None else array.size
    return [] if array is None else [array[start : start + _MESSAGE] for start in range(0, size, _MESSAGE)]


class MPITransport(Transport):
    """Bytes over duplicates of a communicator."""

    def __init__(self, mpi: Any, communicator: Any, timeout: float) -> None:
        self._mpi, self.rank, self.size = mpi, communicator.rank, communicator.size
        self.peers = self._meet(communicator, timeout)
        self._data, self._beside = communicator.Dup(), communicator.Dup()
        self._told: list[tuple[Any, bytes]] = []

    def _meet(self, communicator: Any, timeout: float) -> tuple[Peer, ...]:
        """All ranks tell one another where they run. Who does not come here in time is named."""
        mine = json.dumps(this_process(self.rank).fields()).encode()
        others = [rank for rank in range(self.size) if rank != self.rank]
        rows = {rank: np.zeros(_ROOM, np.uint8) for rank in others}
        receives = {rank: communicator.Irecv([rows[rank], self._mpi.BYTE], rank, _HELLO) for rank in others}
        sends = [communicator.Isend([mine, self._mpi.BYTE], rank, _HELLO) for rank in others]
        pending = _Requests(self._mpi, [*receives.values(), *sends], [])
        if not pending.wait(timeout):
            missing = [rank for rank in others if not rows[rank][0]]
            atexit.register(self.abort, 1)  # MPI's own end would wait for them
            raise DistributedError(
                f"rank {self.rank} waited {timeout:.1f} s for ranks {', '.join(map(str, missing))} to come to "
                "amp.distributed.init()",
                tuple(missing),
            )
        found = {rank: Peer(**json.loads(row.tobytes().rstrip(b"\0"))) for rank, row in rows.items()}
        return tuple(found.get(rank) or this_process(rank) for rank in range(self.size))

    def exchange(self, send: Sequence[np.ndarray | None], receive: Sequence[np.ndarray | None]) -> Pending:
        order = [(self.rank + step) % self.size for step in range(1, self.size)]  # not all to rank 0 first
        come = [(piece, rank) for rank in order[::-1] for piece in _pieces(receive[rank])]
        go = [(piece, rank) for rank in order for piece in _pieces(send[rank])]
        requests = _guarded(
            lambda: [
                *(self._data.Irecv([piece, self._mpi.BYTE], rank) for piece, rank in come),
                *(self._data.Isend([piece, self._mpi.BYTE], rank) for piece, rank in go),
            ]
        )
        return _Requests(self._mpi, requests, [*send, *receive])

    def headers(self, own: np.ndarray, out: np.ndarray) -> Pending:
        byte = self._mpi.BYTE
        return _Requests(self._mpi, [_guarded(lambda: self._data.Iallgather([own, byte], [out, byte]))], [own, out])

    def tell(self, rank: int, message: bytes) -> None:
        self._told = [(request, kept) for request, kept in self._told if not _guarded(request.Test)]
        request = _guarded(lambda: self._beside.Isend([message, self._mpi.BYTE], rank))
        self._told.append((request, message))

    def heard(self) -> list[tuple[int, bytes]]:
        found = []
        status = self._mpi.Status()
        while _guarded(lambda: self._beside.Iprobe(status=status)):
            found.append((status.Get_source(), self._received(status.Get_source(), status.Get_count(self._mpi.BYTE))))
        return found

    def _received(self, source: int, size: int) -> bytes:
        message = bytearray(size)
        _guarded(lambda: self._beside.Recv([message, self._mpi.BYTE], source))
        return bytes(message)

    def close(self) -> None:
        pass  # MPI frees the communicators when it ends; freeing them here would wait for all other ranks

    def abort(self, status: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        self._mpi.COMM_WORLD.Abort(status)


class MPIEngine(OrderedEngine):
    """Ranks that ``mpiexec`` started, with arrays in memory.

    Args:
        timeout: seconds after which a call that waits for other ranks ends with DistributedError.
        communicator: one of mpi4py's, whose ranks take part; COMM_WORLD where None.

    Raises:
        MissingPackageError: mpi4py, or an MPI, is not installed.
        DistributedError: MPI was started without support for threads; or mpiexec belongs to another MPI than the one
            that mpi4py was loaded with, so that each process believes to be alone.
    """

    def __init__(self, timeout: float = 600.0, communicator: Any = None) -> None:
        mpi = imported(timeout)
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise DistributedError(
                "MPI was started for one thread; an engine has one of its own. Before the first import of mpi4py.MPI: "
                "mpi4py.rc.thread_level = 'multiple' ('serialized' is enough where nothing else calls MPI)"
            )
        chosen = mpi.COMM_WORLD if communicator is None else communicator
        found = launched()
        if found is not None and found[0] > 1 and mpi.COMM_WORLD.size == 1:
            library = mpi.Get_library_version().split("\n")[0].split(",")[0].strip(" \0")
            raise DistributedError(
                f"{found[1]} started {found[0]} processes, but mpi4py runs with {library} and sees one: they do not "
                "fit together. Start with the mpiexec of the same MPI (python -m mpi4py --mpi-lib-version says which)"
            )
        super().__init__("mpi", MPITransport(mpi, chosen, timeout), timeout)
