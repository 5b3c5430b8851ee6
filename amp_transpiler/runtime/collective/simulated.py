"""Ranks that are threads of one process: the same algorithms without MPI, for tests and for trying out many ranks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from amp_transpiler.errors import DistributedError
from amp_transpiler.option_checks import whole
from amp_transpiler.runtime.collective.ordered import OrderedEngine
from amp_transpiler.runtime.collective.transport import Peer, Pending, Transport, this_process

_Result = TypeVar("_Result")


class _Arrivals(Pending):
    """What one rank receives in one exchange; others may put it there before the rank has come to it."""

    def __init__(self, taken: Callable[[], object]) -> None:
        self._taken = taken
        self._changed = threading.Condition(threading.Lock())
        self._messages: dict[int, bytes] = {}
        self._receive: dict[int, np.ndarray] | None = None

    def put(self, source: int, message: bytes) -> None:
        with self._changed:
            self._messages[source] = message
            if self._receive is not None and len(self._messages) == len(self._receive):
                self._changed.notify_all()

    def expect(self, receive: dict[int, np.ndarray]) -> None:
        with self._changed:
            self._receive = receive

    def wait(self, seconds: float) -> bool:
        receive = self._receive
        assert receive is not None
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._messages) == len(receive), seconds):
                return False
        for source, array in receive.items():
            array[...] = np.frombuffer(self._messages[source], np.uint8)
        self._receive, self._messages = {}, {}
        self._taken()
        return True


class _Post:
    """What is on its way between all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.told: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self.gone: set[int] = set()
        self._lock = threading.Lock()
        self._arrivals: dict[tuple[int, int], _Arrivals] = {}

    def arrivals(self, target: int, turn: int) -> _Arrivals:
        """Those of a rank in its exchange of that number."""
        key = (target, turn)
        with self._lock:
            if key not in self._arrivals:
                self._arrivals[key] = _Arrivals(lambda: self._arrivals.pop(key, None))
            return self._arrivals[key]


class ThreadTransport(Transport):
    """Copies bytes from thread to thread."""

    def __init__(self, post: _Post, rank: int) -> None:
        here = this_process(rank)
        self._post, self.rank, self.size = post, rank, post.size
        self.peers = tuple(Peer(other, here.host, here.pid, here.space) for other in range(post.size))
        self._turn = 0

    def exchange(self, send: Sequence[np.ndarray | None], receive: Sequence[np.ndarray | None]) -> Pending:
        self._turn += 1
        said: dict[int, bytes] = {}  # by array: most exchanges send the same to all
        for target, array in enumerate(send):
            if target != self.rank and array is not None and array.size:
                message = said.setdefault(id(array), b"") or array.tobytes()
                said[id(array)] = message
                self._post.arrivals(target, self._turn).put(self.rank, message)
        pending = self._post.arrivals(self.rank, self._turn)
        pending.expect({s: a for s, a in enumerate(receive) if s != self.rank and a is not None and a.size})
        return pending

    def headers(self, own: np.ndarray, out: np.ndarray) -> Pending:
        out[self.rank] = own
        return self.exchange([own] * self.size, list(out))

    def tell(self, rank: int, message: bytes) -> None:
        self._post.told[rank].append((self.rank, message))

    def heard(self) -> list[tuple[int, bytes]]:
        box, found = self._post.told[self.rank], []
        while box:
            found.append(box.popleft())
        return found

    def gone(self, rank: int) -> bool:
        return rank in self._post.gone

    def close(self) -> None:
        pass  # nothing is held

    def abort(self, status: int) -> None:
        self._post.gone.add(self.rank)


class SimulatedEngine(OrderedEngine):
    """One of several ranks that are threads of this process; :meth:`run` makes them."""

    @classmethod
    def group(cls, size: int, timeout: float = 60.0) -> list[SimulatedEngine]:
        """An engine for each of so many ranks; each is to be used by a thread of its own, and closed."""
        whole("size", size, 1)
        post = _Post(size)
        return [cls("simulated", ThreadTransport(post, rank), timeout) for rank in range(size)]

    @classmethod
    def run(cls, size: int, function: Callable[[SimulatedEngine], _Result], timeout: float = 60.0) -> list[_Result]:
        """Calls ``function(engine)`` for every rank in a thread of its own; what they return, in the order of ranks.

        Where one raises, the others' calls end too, and its error is raised here.
        """
        engines, results = cls.group(size, timeout), dict[int, _Result]()
        errors: list[tuple[bool, int, BaseException]] = []

        def go(engine: SimulatedEngine) -> None:
            try:
                results[engine.rank] = function(engine)
            except BaseException as error:
                errors.append((isinstance(error, DistributedError), engine.rank, error))
                engine.abort(f"raised {type(error).__name__}: {error}")

        threads = [threading.Thread(target=go, args=(engine,), daemon=True) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for engine in engines:
            engine.close()
        if errors:  # what began it, rather than what others made of it
            raise min(errors, key=lambda each: each[:2])[2]
        return [results[rank] for rank in range(size)]


def single_engine(timeout: float) -> OrderedEngine:
    """An engine for one rank alone."""
    return OrderedEngine("single", ThreadTransport(_Post(1), 0), timeout)
