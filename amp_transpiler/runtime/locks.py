"""What keeps threads apart that share a scope, and a step whole when Ctrl-C comes.

Locks are taken in this order, each kind only while none of a later kind is held: the lock of a scope
(:class:`StepLock`), that of one signature while its session is made, that of an executor's tables (held for a look-up
alone), that of a step of which one run goes on at a time, that of the devices. So nobody waits in a circle.
"""

from __future__ import annotations

# What ``signal`` wraps; the wrappers make enum members, which takes 10 µs a step.
import _signal as signals  # type: ignore[import-not-found]
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from amp_transpiler.errors import OrderError
from amp_transpiler.runtime.forks import tell_of_forks


class StepLock:
    """Any number of threads that read, or one that writes; a thread may take again what it holds.

    A writer that waits keeps new readers out, so that evaluation in many threads does not starve training. Signal
    handlers run in the main thread between any two operations; therefore what is taken here may be taken again by the
    same thread, a thread that reads may go on to write (it waits for the other readers), and a block that Ctrl-C
    leaves gives back what it took.
    """

    def __init__(self) -> None:
        # Held by the writer, and by a reader for the moment in which it enters.
        self._turn: threading.RLock | _Lost = threading.RLock()
        self._left = threading.Condition()  # told when a reader leaves while a writer waits
        self._waits = False
        self._readers: dict[object, int] = {}  # a token for each block that reads -> its thread
        tell_of_forks(self)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nobody writes inside, unless this thread does."""
        me, token = threading.get_ident(), object()
        try:
            if me in self._readers.values():  # it is inside already, and must not wait for a writer that waits for it
                self._readers[token] = me
            else:
                with self._turn:
                    self._readers[token] = me
            yield
        finally:
            try:
                self._readers.pop(token, None)
            finally:
                self._readers.pop(token, None)  # where Ctrl-C came just before the first
            if self._waits:
                with self._left:
                    self._left.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nobody else reads or writes inside."""
        with self._turn:
            if self._readers:
                self._wait(threading.get_ident())
            yield

    def _wait(self, me: int) -> None:
        with self._left:
            self._waits = True  # first: a reader that leaves unseen from here on tells
            while any(reader != me for reader in list(self._readers.values())):
                self._left.wait(1)  # and look again: Ctrl-C may have kept a reader from telling
            self._waits = False

    def forked(self) -> None:
        """In a child process: those that read are not here, and what one who wrote has left is not to be used."""
        me = threading.get_ident()
        self._readers = {token: reader for token, reader in self._readers.items() if reader == me}
        self._left, self._waits = threading.Condition(), False
        if self._turn.acquire(blocking=False):
            self._turn.release()
        else:
            self._turn = _Lost()


class _Lost:
    """The turn of a thread that this process does not have: nobody else ever gets it."""

    def acquire(self, blocking: bool) -> bool:
        return False

    def release(self) -> None: ...

    def __enter__(self) -> None:
        raise OrderError(
            "this process was forked while another thread of its parent was in the middle of a step, which ends there "
            "alone: the values here may be partly of one step and partly of the next. Fork while no thread runs a "
            'step, start processes with multiprocessing\'s "spawn", or run in another Scope, from a checkpoint'
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


#: Of all devices: runs and copies read; what must have them for itself writes, as the capture of a graph, and all calls
#: where a runtime takes those of one thread at a time.
DEVICES = StepLock()


class Uninterrupted:
    """Lets Ctrl-C, and a SIGTERM that Python handles, take effect after the block: a step happens wholly or not at all.

    Python delivers the signal right after the session returns, that is, before the scope has the new values. Only the
    main thread gets it.
    """

    def __enter__(self) -> None:
        self.pending: tuple[Any, ...] | None = None
        self.handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signals.SIGINT, signals.SIGTERM):
                handler = signals.getsignal(number)
                if callable(handler):
                    self.handlers[number] = handler
                    signals.signal(number, self._later)

    def _later(self, *arguments: Any) -> None:
        self.pending = arguments

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signals.signal(number, handler)
        if self.pending is not None:
            self.handlers[self.pending[0]](*self.pending)
