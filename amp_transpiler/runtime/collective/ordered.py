"""Engines that compute in the order of ranks: the algorithms, written once over a :class:`Transport`.

A reduction sends each rank its share of every rank's array, adds there, and gathers the results: the volume of a ring,
with each element added and rounded in one place. Large arrays go in segments, so that the memory for what arrives is
bounded, and one segment travels while another is added.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, DistributedError, OrderError, PlaceError
from amp_transpiler.option_checks import number, shown
from amp_transpiler.passes.lowering.place import CPUPlace, Place
from amp_transpiler.runtime.collective import arguments, headers
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.headers import Call
from amp_transpiler.runtime.collective.sums import Reducer
from amp_transpiler.runtime.collective.thread import CommunicationThread, Work
from amp_transpiler.runtime.collective.transport import Pending, Transport, TransportError, as_bytes
from amp_transpiler.runtime.collective.watch import Watch

_Result = TypeVar("_Result")
#: Bytes of an array that travel at once, and of the smallest share of it worth a message of its own.
SEGMENT, _SHARE = 1 << 24, 1 << 15
#: Up to this many bytes every rank sends all of its array to all others, and adds by itself: one exchange, not two.
SMALL = 1 << 11
#: Seconds: for an announced fault to be told; for other ranks to end after one; for the thread to end.
_TELL, _END, _STOP = 1.0, 2.0, 1.0


class OrderedEngine(Engine):
    """An engine for arrays in memory, over any transport."""

    def __init__(self, name: str, transport: Transport, timeout: float) -> None:
        number("timeout", timeout)
        self.name, self.rank, self.size = name, transport.rank, transport.size
        self.timeout, self.peers = float(timeout), transport.peers
        self.place: Place = CPUPlace()
        self._transport, self._reducer = transport, Reducer()
        self._watch = Watch(transport, self.timeout)
        self._calls, self.closed = 0, False
        self._buffers: list[np.ndarray] = []
        self._closing = threading.Lock()
        self._thread = CommunicationThread(f"amp-{name}-{self.rank}", self._watch.idle)

    # -- calls -------------------------------------------------------------------------------------------------
    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        flat = arguments.flat("all_reduce", array)
        arguments.operation("all_reduce", op, flat.dtype.name)
        self.on_thread(lambda: self._all_reduce(flat, op))
        return array

    def reduce_scatter(self, array: np.ndarray, sizes: Sequence[int], op: str = "sum") -> np.ndarray:
        flat = arguments.flat("reduce_scatter", array)
        arguments.operation("reduce_scatter", op, flat.dtype.name)
        parts = _split(flat, arguments.sizes_of("reduce_scatter", sizes, self.size, flat.size))
        self.on_thread(lambda: self._reduce_scatter(flat, parts, op))
        return parts[self.rank]

    def all_gather(self, part: np.ndarray, sizes: Sequence[int], out: np.ndarray) -> np.ndarray:
        own, flat = arguments.flat("all_gather: part", part, written=False), arguments.flat("all_gather: out", out)
        parts = _split(flat, arguments.sizes_of("all_gather", sizes, self.size, flat.size))
        if own.dtype != flat.dtype or own.size != parts[self.rank].size:
            raise ArgumentError(
                f"all_gather: the part of rank {self.rank} is {own.dtype.name}[{own.size}]; "
                f"sizes and out say {flat.dtype.name}[{parts[self.rank].size}]"
            )
        self.on_thread(lambda: self._all_gather(own, parts))
        return out

    def all_to_all(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        given = arguments.parts_of("all_to_all", parts, self.size)
        return self.on_thread(lambda: self._all_to_all(given))

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        root = arguments.rank_of("broadcast", root, self.size)
        flat = arguments.flat("broadcast", array, written=root != self.rank)
        self.on_thread(lambda: self._broadcast(flat, root))
        return array

    def barrier(self) -> None:
        self.on_thread(lambda: self.begin(Call(0, "barrier")))

    def all_gather_object(self, value: Any) -> list[Any]:
        try:
            said = json.dumps(value).encode()
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(f"all_gather_object: {shown(value)} cannot be sent as JSON: {error}") from None
        return self.on_thread(lambda: self._all_gather_object(said))

    def agree(self, value: Any) -> bool:
        """By a hash, which travels in the place of a length: one message to each rank."""
        digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()
        mine = Call(0, "agree", length=int.from_bytes(digest, signed=True))
        return self.on_thread(lambda: all(call.length == mine.length for call in self.begin(mine)))

    def submit(self, call: Callable[[], _Result]) -> Work[_Result]:
        with self._closing:
            if self.closed:
                raise OrderError(f"this {self.name} engine is closed; amp.distributed.init() makes another one")
            return self._thread.submit(call)

    def on_thread(self, call: Callable[[], _Result]) -> _Result:
        """Submits a call and waits for it; what runs in the engine's thread already goes on."""
        return call() if self._thread.is_current() else self.submit(call).wait()

    # -- algorithms, in the engine's thread --------------------------------------------------------------------
    def _begin(self, kind: str, op: str, array: np.ndarray, root: int = 0, check: int = 0) -> list[Call]:
        return self.begin(Call(0, kind, op, array.dtype.name, root, array.size, check))

    def begin(self, call: Call) -> list[Call]:
        """Begins a call, in the engine's thread: the headers of all ranks, numbered, which must say the same."""
        self._calls += 1
        mine = replace(call, number=self._calls)
        self._watch.check(mine)
        if self.size == 1:
            return [mine]
        rows = np.empty((self.size, headers.SIZE), np.uint8)
        self.count((self.size - 1) * headers.SIZE, (self.size - 1) * headers.SIZE)
        self.wait(self._transport.headers(mine.packed(), rows), mine)
        made = [Call.unpacked(row) for row in rows]
        found = headers.difference(made, self.rank)
        if found is not None:
            self._watch.mismatch(found[1], found[0])
        return made

    def count(self, sent: int, received: int) -> None:
        """Count bytes that go to other ranks and come from them, in the engine's thread."""
        self.sent, self.received = self.sent + sent, self.received + received

    def wait(self, pending: Pending, call: Call) -> None:
        """Waits, in the engine's thread, for what a call has under way. DistributedError after a fault."""
        self._watch.wait(pending, call)

    def _exchange(
        self, call: Call, send: Sequence[np.ndarray | None], receive: Sequence[np.ndarray | None]
    ) -> Callable[[], None]:
        """Begins an exchange of arrays; what it gives waits for the end."""
        sent = [None if array is None else as_bytes(array) for array in send]
        received = [None if array is None else as_bytes(array) for array in receive]
        of_others = [
            [a.nbytes for i, a in enumerate(each) if a is not None and i != self.rank] for each in (sent, received)
        ]
        self.count(*map(sum, of_others))
        pending = self._transport.exchange(sent, received)
        return lambda: self.wait(pending, call)

    def _all_reduce(self, flat: np.ndarray, op: str) -> None:
        call = self._begin("all_reduce", op, flat)[self.rank]
        if self.size == 1:
            return
        if flat.nbytes <= SMALL:
            others = [np.empty_like(flat) if rank != self.rank else flat for rank in range(self.size)]
            self._exchange(call, [flat] * self.size, others)()
            result = np.empty_like(flat)
            self._reducer.reduce(others, result, op)
            flat[...] = result
            return
        step = max(1, self._segment() // flat.itemsize)
        segments = (flat[start : start + step] for start in range(0, flat.size, step))
        self._reduce(call, ([*_even(segment, self.size)] for segment in segments), op, gather=True)

    def _reduce_scatter(self, flat: np.ndarray, parts: Sequence[np.ndarray], op: str) -> None:
        call = self._begin("reduce_scatter", op, flat, check=headers.check_sum([part.size for part in parts]))[
            self.rank
        ]
        if self.size > 1:
            step = max(1, self._segment() // self.size // flat.itemsize)
            longest = max(part.size for part in parts)
            self._reduce(call, ([p[s : s + step] for p in parts] for s in range(0, longest, step)), op, gather=False)

    def _segment(self) -> int:
        return max(SEGMENT, _SHARE * self.size)

    def _reduce(self, call: Call, segments: Iterator[list[np.ndarray]], op: str, gather: bool) -> None:
        """Each segment is a list of shares, one for each rank; the rank's own ones are reduced, and gathered."""
        ending: list[Callable[[], None]] = []
        ahead: tuple[list[np.ndarray], list[np.ndarray], Callable[[], None]] | None = None
        for turn, shares in enumerate([*segments, None]):
            here = ahead
            ahead = None
            if shares is not None:  # this one travels while the one before it is added
                arrived = self._room(turn % 2, shares[self.rank])
                ahead = (shares, arrived, self._exchange(call, shares, arrived))
            if here is not None:
                before, addends, wait = here
                wait()
                addends[self.rank] = before[self.rank]
                self._reducer.reduce(addends, before[self.rank], op)
                if gather:
                    ending.append(self._exchange(call, [before[self.rank]] * self.size, before))
        for end in ending:
            end()

    def _room(self, turn: int, share: np.ndarray) -> list[np.ndarray]:
        """Memory for the shares of all ranks, which the next call of the same turn uses again."""
        while len(self._buffers) <= turn:
            self._buffers.append(np.empty(0, np.uint8))
        if self._buffers[turn].size < share.nbytes * self.size:
            self._buffers[turn] = np.empty(share.nbytes * self.size, np.uint8)
        whole = self._buffers[turn][: share.nbytes * self.size].view(share.dtype)
        return [*whole.reshape(self.size, share.size)]

    def _all_gather(self, own: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        call = self._begin("all_gather", "", own, check=headers.check_sum([part.size for part in parts]))[self.rank]
        if not np.shares_memory(own, parts[self.rank]):
            parts[self.rank][...] = own
        if self.size > 1:
            self._exchange(call, [own] * self.size, parts)()

    def _all_to_all(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        mine, tail = parts[self.rank], parts[0].shape[1:]
        check = headers.check_sum(tail)
        call = self._begin("all_to_all", "", mine, check=check)[self.rank]
        if self.size == 1:
            return [mine.copy()]
        lengths = np.array([len(part) for part in parts], np.int64)
        theirs = lengths.copy()
        self._exchange(call, [*lengths.reshape(-1, 1)], [*theirs.reshape(-1, 1)])()
        received = [np.empty((int(length), *tail), mine.dtype) for length in theirs]
        self._exchange(call, parts, received)()
        received[self.rank][...] = mine
        return received

    def _broadcast(self, flat: np.ndarray, root: int) -> None:
        call = self._begin("broadcast", "", flat, root=root)[self.rank]
        if self.size == 1:
            return
        nothing: list[np.ndarray | None] = [None] * self.size
        if flat.nbytes <= SMALL * self.size:
            come: list[np.ndarray | None] = [flat if rank == root else None for rank in range(self.size)]
            self._exchange(call, [flat] * self.size if self.rank == root else nothing, come)()
            return
        # The root gives each rank a share, and they send theirs to one another: the root sends its array but once.
        shares = [*_even(flat, self.size)]
        own: list[np.ndarray | None] = [shares[self.rank] if rank == root else None for rank in range(self.size)]
        if self.rank == root:
            own = nothing
        self._exchange(call, shares if self.rank == root else nothing, own)()
        send = [None if rank == root else shares[self.rank] for rank in range(self.size)]
        self._exchange(call, send, nothing if self.rank == root else shares)()

    def _all_gather_object(self, said: bytes) -> list[Any]:
        own = np.frombuffer(said, np.uint8)
        made = self._begin("all_gather_object", "", own)
        if self.size == 1:
            return [json.loads(said)]
        arrived = [np.empty(call.length, np.uint8) for call in made]
        self._exchange(made[self.rank], [own] * self.size, arrived)()
        arrived[self.rank] = own
        return [json.loads(each.tobytes()) for each in arrived]

    def on(self, place: Place) -> Engine:
        if place.kind == "cpu":
            return self
        if place.kind != "cuda":
            raise PlaceError(
                f"several ranks cannot train on {place!r}: no engine carries what lies there",
                "Train them on CPUPlace(), or one alone on it",
            )
        raise PlaceError(
            f"the {self.name} engine carries what lies in memory; several ranks on {place!r} need "
            "amp.distributed.init('nccl')"
        )

    def mark(self) -> None:
        return None

    def follow(self, mark: Any) -> None:
        pass  # what a session gives is there when it returns

    def finish(self) -> None:
        pass

    # -- faults and the end ------------------------------------------------------------------------------------
    def fault(self) -> DistributedError | None:
        """The error that ended the work of this engine; None while all is well."""
        return self._watch.fault

    def abort(self, message: str) -> None:
        self._watch.announce(message)
        if not self._thread.is_alive() or self._thread.is_current():
            self._watch.idle()
        else:
            self._watch.announced.wait(_TELL)

    def close(self) -> None:
        with self._closing:
            if self.closed:
                return
            self.closed = True
        if self._watch.fault is None:
            self._thread.submit(self._watch.leave)
        if self._thread.stop(self.timeout):
            self._transport.close()

    def end(self, status: int) -> None:
        """Ends the program after a fault; other ranks get a moment to end by themselves before they are ended."""
        with self._closing:
            self.closed = True
        try:
            alone = self._thread.stop(_STOP) and self._watch.end(_END)
        except TransportError:
            alone = False
        if not alone:
            self._transport.abort(status)
        os._exit(status)  # MPI's own end would wait for the ranks that are gone


def _split(flat: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    ends = np.cumsum([0, *sizes])
    return [flat[ends[i] : ends[i + 1]] for i in range(len(sizes))]


def _even(flat: np.ndarray, parts: int) -> Iterator[np.ndarray]:
    """Parts of a flat array that differ by one element at most."""
    each, more = divmod(flat.size, parts)
    start = 0
    for index in range(parts):
        stop = start + each + (index < more)
        yield flat[start:stop]
        start = stop
