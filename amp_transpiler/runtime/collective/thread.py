"""The one thread of an engine in which all of its communication happens, and what a caller holds of its work."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from amp_transpiler.errors import DistributedError

_Result = TypeVar("_Result")
#: Seconds between two looks at what other ranks have to say, while there is nothing to do.
_IDLE = 0.05


class Work(Generic[_Result]):
    """What :meth:`Engine.submit` gives: a call that runs, or waits for its turn, on the engine's thread."""

    def __init__(self, call: Callable[[], _Result]) -> None:
        self._call: Callable[[], _Result] | None = call
        self._context = contextvars.copy_context()  # where ranks are threads, it knows which of them calls
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the call has ended; :meth:`wait` then returns at once."""
        return self._done.is_set()

    def wait(self) -> _Result:
        """Waits for the end of the call: what it gave. Raises what it raised, DistributedError after a fault."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        result: _Result = self._result
        return result

    def run(self) -> None:
        """Runs the call; the engine's thread does this."""
        call, self._call = self._call, None  # what it refers to may go once it ran
        assert call is not None
        try:
            self._result = self._context.run(call)
        except DistributedError as error:  # what happened elsewhere; where it was noticed tells nobody anything
            self._error = error.with_traceback(None)
        except BaseException as error:
            self._error = error
        self._done.set()


class CommunicationThread:
    """Runs what is submitted in order. ``idle`` is called in between, again and again."""

    def __init__(self, name: str, idle: Callable[[], None]) -> None:
        self._waiting: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
        self._idle = idle
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()

    def submit(self, call: Callable[[], _Result]) -> Work[_Result]:
        """Puts a call behind all others."""
        work = Work(call)
        self._waiting.put(work)
        return work

    def stop(self, seconds: float) -> bool:
        """Ends the thread after what was submitted; False where that takes longer."""
        self._waiting.put(None)
        if not self.is_current():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                work = self._waiting.get(timeout=_IDLE)
            except queue.Empty:
                self._idle()
                continue
            if work is None:
                return
            work.run()
