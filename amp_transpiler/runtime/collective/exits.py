"""The end of a program with several ranks: whoever raises tells all others, and nobody hangs in the end of MPI."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import TracebackType

from amp_transpiler.runtime.collective.ordered import OrderedEngine
from amp_transpiler.stops import stop_of, told_stop


def guard(engine: OrderedEngine) -> None:
    """Looks after an engine until this process ends.

    An exception that nothing catches is told to all other ranks. After a fault the process ends with status 1 (130
    after Ctrl-C, 143 after SIGTERM, which all of them get at once, mostly, and one line each says it): what it wrote
    goes out first, other ranks get a moment to end by themselves, and those that hang are ended by whoever started
    them. Without a fault, a rank that ends tells the others that it makes no more calls.
    """
    usual, process = sys.excepthook, os.getpid()

    def raised(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if engine.closed and engine.fault() is None:  # what happens now is this rank's own affair
            usual(kind, error, traceback)
            return
        own = stop_of(error) if isinstance(error, KeyboardInterrupt) else None
        engine.abort(f"raised {kind.__name__}: {error}" if own is None else own.told)
        stop = own or told_stop(str(engine.fault()))
        if stop is not None:
            print(f"rank {engine.rank}: {stop.word}", file=sys.stderr)
        else:
            usual(kind, error, traceback)

    def ended() -> None:
        if os.getpid() != process:  # a child of this one
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if engine.fault() is None:
            engine.close()
        if engine.fault() is not None:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            stop = told_stop(str(engine.fault()))
            engine.end(1 if stop is None else stop.status)

    sys.excepthook = raised
    atexit.register(ended)
