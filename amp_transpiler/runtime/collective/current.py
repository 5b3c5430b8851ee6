"""The engine of this process, or of this thread where the ranks are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from amp_transpiler.errors import DistributedError
from amp_transpiler.runtime.collective.engine import Engine

_process: Engine | None = None
_of_thread: ContextVar[Engine | None] = ContextVar("engine", default=None)


def of_process() -> Engine | None:
    """The engine of this process; None before ``amp.distributed.init``."""
    return _process


def set_of_process(engine: Engine | None) -> None:
    """Let this engine be that of the process."""
    global _process
    _process = engine


def current() -> Engine | None:
    """The engine of this rank; None where it is alone, or ``amp.distributed.init`` was not called."""
    return _of_thread.get() or _process


def several() -> Engine | None:
    """The engine of this rank where it is one of several; None where it is alone."""
    engine = current()
    return engine if engine is not None and engine.size > 1 else None


@contextmanager
def use_engine(engine: Engine) -> Iterator[None]:
    """This thread is the rank of that engine inside, whatever the process is."""
    token = _of_thread.set(engine)
    try:
        yield
    finally:
        _of_thread.reset(token)


def by_rank_0(call: Callable[[], None]) -> None:
    """Call it on rank 0, and return on all ranks when that is done. DistributedError: it failed there."""
    engine = current()
    if engine is None or engine.size == 1:
        call()
        return
    failed: Exception | None = None
    if engine.rank == 0:
        try:
            call()
        except Exception as error:
            failed = error
    said = engine.all_gather_object(None if failed is None else f"{type(failed).__name__}: {failed}")[0]
    if failed is not None:
        raise failed
    if said is not None:
        raise DistributedError(f"rank 0 failed where the others waited for it: {said}")
