"""The engine of this process, or of this thread where the ranks are threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

from amp_transpiler.errors import DistributedError, OrderError
from amp_transpiler.passes.lowering.place import Place, check_place
from amp_transpiler.runtime.collective import mpi
from amp_transpiler.runtime.collective.engine import Engine

_Result = TypeVar("_Result")
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


def engine_on(place: Place) -> Engine | None:
    """The engine of this rank for values on a place; None where the rank is alone. PlaceError where it has none."""
    engine = several()
    return None if engine is None else engine.on(place)


def own_place(place: object, what: str) -> Place:
    """A place as :func:`check_place` takes it, with its errors; by the name of its kind, of several ranks that of this
    one, since each has a device."""
    found = check_place(place, what)
    own: Place | None = getattr(current(), "place", None)
    return own if isinstance(place, str) and own is not None and own.kind == found.kind else found


def several_launched() -> bool:
    """Whether a launcher started several ranks."""
    found = mpi.launched()
    if found is not None:
        return found[0] > 1
    others = os.environ.get("WORLD_SIZE", "")
    if others.isdecimal() and int(others) > 1:
        raise DistributedError(
            f"WORLD_SIZE is {others}, but no mpiexec started this process: each would train by itself. Start the "
            f"program with mpiexec -n {others}, or unset WORLD_SIZE"
        )
    return False


def is_initialized() -> bool:
    """Whether there is an engine: :func:`init` was called, or this is a rank of :func:`simulate`."""
    return current() is not None


def get_engine() -> Engine:
    """The engine of this rank. OrderError before :func:`init`."""
    engine = current()
    if engine is None:
        raise OrderError("several ranks need amp.distributed.init() first")
    return engine


def rank() -> int:
    """The number of this rank, from 0 on; 0 before :func:`init`. OrderError where mpiexec started several."""
    return get_engine().rank if is_initialized() or several_launched() else 0


def world_size() -> int:
    """The number of ranks; 1 before :func:`init`. OrderError where mpiexec started several."""
    return get_engine().size if is_initialized() or several_launched() else 1


def local_rank() -> int:
    """The number of this rank among those on its host, from 0 on; 0 before :func:`init`. OrderError as :func:`rank`."""
    return get_engine().local_rank if is_initialized() or several_launched() else 0


@contextmanager
def use_engine(engine: Engine) -> Iterator[None]:
    """This thread is the rank of that engine inside, whatever the process is."""
    token = _of_thread.set(engine)
    try:
        yield
    finally:
        _of_thread.reset(token)


def own_rank() -> int:
    """The number of this rank; 0 of one alone."""
    engine = current()
    return 0 if engine is None else engine.rank


def own_size() -> int:
    """The number of ranks; 1 of one alone."""
    engine = current()
    return 1 if engine is None else engine.size


def holds(owner: int | None) -> bool:
    """Whether what belongs to this rank, or to all (None), is here. One rank alone holds what is of any."""
    engine = current()
    return owner is None or engine is None or owner % engine.size == engine.rank


def by_rank_0(call: Callable[[], None], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Call it on rank 0, ``meanwhile`` on the others, and return on all ranks when that is done.

    DistributedError: it failed there.
    """
    by_all(call if own_rank() == 0 else meanwhile)


def by_all(call: Callable[[], _Result]) -> _Result:
    """Call it on every rank, and return when that is done on all. DistributedError where it failed on others alone.

    It may not talk to other ranks: where it fails on some, these would talk past one another.
    """
    engine = several()
    if engine is None:
        return call()
    result, failed = None, None
    try:
        result = call()
    except DistributedError:  # the ranks have parted already
        raise
    except Exception as error:
        failed = error
    of_all = engine.all_gather_object(None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    for rank, said in enumerate(of_all):
        if said is not None:
            raise DistributedError(f"rank {rank} failed where the others waited for it: {said}", (rank,), told=True)
    return cast(_Result, result)
