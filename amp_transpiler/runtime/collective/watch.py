"""What ranks tell one another beside the exchanges: a call that waits in vain ends with an error that says why.

While a rank waits it listens, looks whether processes of its machine are gone, and after ``timeout`` asks all others
where they are; idle ranks answer too. Whoever finds a fault tells everybody, so that all name the same rank.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from amp_transpiler.errors import DistributedError
from amp_transpiler.runtime.collective.headers import Call
from amp_transpiler.runtime.collective.transport import Pending, Transport, TransportError

#: Seconds: between two looks at what others say; between two looks at processes; for which a call may still complete
#: when a process is gone, since what it sent before may be on its way; in which ranks that were asked must answer.
_LISTEN, _LOOK, _LATE, _ANSWER = 0.02, 0.1, 0.4, 1.0
#: Characters of another rank's message that are shown.
_SHOWN = 2000


class Watch:
    """The knowledge of one rank. All but :meth:`announce` is called by the thread that communicates."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport, self._timeout = transport, timeout
        self.fault: DistributedError | None = None
        self._waits: Call | None = None
        self._last: Call | None = None
        self._since = time.monotonic()
        self._left: dict[int, int] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._ended: set[int] = set()
        self._stuck: set[int] = set()
        self._gone: dict[int, float] = {}
        self._announcement: str | None = None
        self.announced = threading.Event()

    # -- calls -------------------------------------------------------------------------------------------------
    def wait(self, pending: Pending, call: Call) -> None:
        """Waits for the messages of a call. DistributedError where they do not come."""
        self._waits, self._since = call, time.monotonic()
        try:
            self._wait(pending, call)
        except TransportError as error:
            self._search(call)
            self._raise(f"{self._named(self._transport.rank)} cannot communicate: {error}", (), call)
        finally:
            self._waits, self._last, self._since = None, call, time.monotonic()

    def check(self, call: Call) -> None:
        """Raises the fault, where there is one, in a call that is made or waits."""
        if self.fault is not None:
            place = f"; rank {self._transport.rank} was at {call}"
            raise DistributedError(f"{self.fault}{place}", self.fault.ranks, self.fault.told)

    def _wait(self, pending: Pending, call: Call) -> None:
        looked, asked = self._since, 0.0
        while not pending.wait(_LISTEN):
            self.listen()
            self.check(call)
            for rank, number in self._left.items():
                if number < call.number:
                    self._raise(f"{self._named(rank)} has ended its program after call {number}", (rank,), call)
            now = time.monotonic()
            if now - looked >= _LOOK:
                looked = now
                self._look(call)
            if not asked and now - self._since >= self._timeout:
                asked = now
                self._answers.clear()
                self._tell({"kind": "asks"})
            elif asked and (len(self._answers) == self._transport.size - 1 or now - asked >= _ANSWER):
                self._judge(call, now - self._since)

    def mismatch(self, message: str, rank: int) -> NoReturn:
        """Ranks made different calls; each of them finds it by itself."""
        self.fault = DistributedError(f"the ranks do not make the same calls: {message}", (rank,))
        raise DistributedError(str(self.fault), self.fault.ranks, differ=True)

    # -- faults ------------------------------------------------------------------------------------------------
    def _look(self, call: Call) -> None:
        for rank in self._others():
            if rank not in self._left and self._transport.gone(rank):
                first = self._gone.setdefault(rank, time.monotonic())
                if time.monotonic() - first >= _LATE:
                    self._raise(f"the process of {self._named(rank)} is gone", (rank,), call)

    def _search(self, call: Call) -> None:
        """Looks for the reason of an error of the transport: what others say, or a process that is gone."""
        until = time.monotonic() + 2 * _LATE
        while time.monotonic() < until:
            try:
                self.listen()
            except TransportError:
                pass
            self.check(call)
            self._look(call)
            time.sleep(_LISTEN)

    def _judge(self, call: Call, seconds: float) -> NoReturn:
        found: dict[int, str] = {}
        for rank in self._others():
            state = self._answers.get(rank)
            if state is None:
                found[rank] = "does not answer"
            elif not state["waits"]:
                found[rank] = f"has not come to it: its last was {state['said']}, {state['seconds']:.1f} s ago"
            elif state["number"] != call.number:
                found[rank] = f"waits at {state['said']}"
        what = "; ".join(f"{self._named(rank)} {said}" for rank, said in found.items())
        if not found:
            what = "all ranks wait at it, and nothing comes through"
        self._stuck = set(found)
        self._raise(f"rank {self._transport.rank} waited {seconds:.1f} s at {call}: {what}", tuple(found))

    def _raise(self, message: str, ranks: tuple[int, ...], call: Call | None = None) -> NoReturn:
        """Raises a fault that was found here, after telling it to all."""
        self.fault = DistributedError(message, ranks)
        self._tell_fault(message, ranks, told=False)
        if call is not None:
            self.check(call)
        raise DistributedError(message, ranks)

    def _named(self, rank: int) -> str:
        return str(self._transport.peers[rank])

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self._transport.size) if rank != self._transport.rank)

    # -- messages ----------------------------------------------------------------------------------------------
    def announce(self, message: str) -> None:
        """Any thread: what the communicating thread shall tell all others, as the reason why this rank stops."""
        if self.fault is None and self._announcement is None:
            self._announcement = message
        else:
            self.announced.set()

    def listen(self) -> None:
        """Takes in what others say, answers, and tells what was announced. Raises nothing of it: see :meth:`check`."""
        if self._announcement is not None and not self.announced.is_set():
            self._announce(self._announcement)
        for rank, message in self._transport.heard():
            said = json.loads(message)
            if said["kind"] == "fault":
                if self.fault is None:
                    self.fault = DistributedError(said["said"], tuple(said["ranks"]), said["told"])
                    self._stuck = set(said["stuck"])
            elif said["kind"] == "asks":
                self._transport.tell(rank, json.dumps(self._state()).encode())
            elif said["kind"] == "state":
                self._answers[rank] = said
            elif said["kind"] == "left":
                self._left[rank] = said["number"]
            elif said["kind"] == "ended":
                self._ended.add(rank)

    def idle(self) -> None:
        """Listens between calls; what goes wrong shows in the next one."""
        try:
            self.listen()
        except TransportError as error:
            if self.fault is None:
                said = f"{self._named(self._transport.rank)} cannot communicate: {error}"
                self.fault = DistributedError(said, (self._transport.rank,))

    def _announce(self, message: str) -> None:
        if self.fault is None:
            said = f"{self._named(self._transport.rank)} {message[:_SHOWN]}"
            self._tell_fault(said, (self._transport.rank,), told=True)
            self.fault = DistributedError(said, (self._transport.rank,), told=True)
        self.announced.set()

    def _state(self) -> dict[str, Any]:
        call = self._waits or self._last
        return {
            "kind": "state",
            "waits": self._waits is not None,
            "number": call.number if call else 0,
            "said": str(call) if call else "none",
            "seconds": time.monotonic() - self._since,
        }

    def leave(self) -> None:
        """Tells all others that this rank makes no more calls."""
        self._tell({"kind": "left", "number": self._last.number if self._last else 0})

    def end(self, seconds: float) -> bool:
        """After a fault: tells all others that this rank ends, and waits until they do too, or so many seconds.

        Gives whether all of them end by themselves. Nobody waits for one that hangs, or waits in MPI's own end.
        """
        self._tell({"kind": "ended"})
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.listen()
            left = {rank for rank in self._others() if rank not in self._ended and not self._transport.gone(rank)}
            if left <= self._stuck | set(self._left):
                return not left
            time.sleep(_LISTEN)
        return False

    def _tell_fault(self, message: str, ranks: tuple[int, ...], told: bool) -> None:
        self._tell({"kind": "fault", "said": message, "ranks": list(ranks), "told": told, "stuck": list(self._stuck)})

    def _tell(self, message: dict[str, Any]) -> None:
        said = json.dumps(message).encode()
        for rank in self._others():
            try:
                self._transport.tell(rank, said)
            except TransportError:  # it may be the very rank that is at fault
                pass
