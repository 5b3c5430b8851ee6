"""A rank that dies, hangs, raises, ends early or makes another call: all others stop in time and name it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import DistributedError
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.simulated import SimulatedEngine

RANKS = 3
#: Of the tests in which it is what ends a call; the others must end long before theirs.
TIMEOUT = 1.5


def outcomes(
    function: Callable[[SimulatedEngine], object], timeout: float = 60.0, stay: threading.Event | None = None
) -> dict[int, BaseException]:
    """What each rank's function raises. ``stay`` is set, for rank 1, once all others have ended."""
    found: dict[int, BaseException] = {}

    def go(engine: SimulatedEngine) -> None:
        try:
            function(engine)
        except BaseException as error:
            found[engine.rank] = error

    engines = SimulatedEngine.group(RANKS, timeout)
    threads = [threading.Thread(target=go, args=(engine,), daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in (threads[0], *threads[2:]):
        thread.join(20)
    if stay is not None:
        stay.set()
    threads[1].join(20)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for engine in engines:
        engine.close()
    return found


def reduce(engine: Engine, length: int = 10) -> None:
    engine.all_reduce(np.ones(length, np.float32))


def check(found: dict[int, BaseException], *said: str) -> None:
    """Ranks 0 and 2 stopped, and named rank 1 and these words."""
    for rank in (0, 2):
        assert isinstance(found[rank], DistributedError) and isinstance(found[rank], amp.AmpError | RuntimeError)
        assert found[rank].ranks == (1,)
        for each in said:
            assert re.search(each, str(found[rank])), (each, str(found[rank]))


def test_a_rank_that_raises_is_named_at_once_with_what_it_raised() -> None:
    def run(engine: SimulatedEngine) -> None:
        reduce(engine)
        if engine.rank == 1:
            engine.abort("raised ValueError: no data")
            return
        reduce(engine)

    check(
        outcomes(run), r"rank 1 \(host \S+, pid \d+\) raised ValueError: no data; rank [02] was at call 2 \(all_reduce"
    )


def test_a_call_after_the_fault_says_it_again() -> None:
    def run(engine: SimulatedEngine) -> None:
        if engine.rank == 1:
            engine.abort("has no disk")
        for _ in range(3):
            with pytest.raises(DistributedError, match="has no disk"):
                reduce(engine)
        engine.submit(lambda: reduce(engine)).wait()

    assert all("has no disk" in str(error) for error in outcomes(run).values())


def test_a_rank_that_makes_no_more_calls_is_named_after_the_timeout_with_its_last_one() -> None:
    stay = threading.Event()

    def run(engine: SimulatedEngine) -> None:
        reduce(engine)
        if engine.rank == 1:
            stay.wait(20)
            return
        reduce(engine, 20)

    started = time.monotonic()
    found = outcomes(run, TIMEOUT, stay)
    took = time.monotonic() - started
    check(
        found,
        r"waited [123]\.\d s at call 2 \(all_reduce sum float32\[20\]\): rank 1 \(host \S+, pid \d+\) has not come to it",
        r"its last was call 1 \(all_reduce sum float32\[10\]\), \d\.\d s ago",
    )
    assert TIMEOUT <= took < 8


def test_a_rank_that_does_not_even_answer_is_named() -> None:
    stay = threading.Event()

    def run(engine: SimulatedEngine) -> None:
        if engine.rank == 1:
            engine.submit(lambda: stay.wait(20))  # its thread of communication hangs too
            stay.wait(20)
            return
        reduce(engine)

    found = outcomes(run, TIMEOUT, stay)
    check(found, r"rank 1 \(.*\) does not answer", r"at call 1 \(all_reduce")


def test_a_rank_whose_process_is_gone_is_named_before_the_timeout() -> None:
    def run(engine: SimulatedEngine) -> None:
        reduce(engine)
        if engine.rank == 1:
            engine._transport.abort(9)
            return
        reduce(engine)

    check(outcomes(run), r"the process of rank 1 \(.*\) is gone; rank [02] was at call 2")


def test_a_rank_that_ends_its_program_early_is_named() -> None:
    def run(engine: SimulatedEngine) -> None:
        reduce(engine)
        if engine.rank == 1:
            engine.close()
            return
        reduce(engine)

    check(outcomes(run), r"rank 1 \(.*\) has ended its program after call 1; rank [02] was at call 2")


def test_one_that_ends_after_the_last_call_disturbs_nobody() -> None:
    def run(engine: SimulatedEngine) -> None:
        reduce(engine, 5000)
        if engine.rank == 1:
            engine.close()
            engine._transport.abort(0)

    assert outcomes(run) == {}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            lambda e: e.all_reduce(np.ones(10, np.float32), "max"),
            r"rank 1 made call 1 \(all_reduce max float32\[10\]\)",
        ),
        (lambda e: e.all_reduce(np.ones(10, np.float64)), r"rank 1 made call 1 \(all_reduce sum float64\[10\]\)"),
        (lambda e: e.all_reduce(np.ones(11, np.float32)), r"rank 1 made call 1 \(all_reduce sum float32\[11\]\)"),
        (lambda e: e.barrier(), r"rank 1 made call 1 \(barrier\)"),
        (lambda e: e.broadcast(np.ones(10, np.float32), 2), r"broadcast float32\[10\] from rank 2"),
        (lambda e: e.reduce_scatter(np.ones(10, np.float32), [10, 0, 0]), r"\(reduce_scatter sum float32\[10\]\)"),
    ],
    ids=["op", "type", "length", "kind", "root", "order"],
)
def test_ranks_that_make_different_calls_name_both(other: Callable[[Engine], object], said: str) -> None:
    found = outcomes(lambda engine: other(engine) if engine.rank == 1 else reduce(engine))
    check(found, said, r"rank [02] made call 1 \(all_reduce sum float32\[10\]\)")
    assert isinstance(found[1], DistributedError)


def test_sizes_that_differ_are_found() -> None:
    def run(engine: SimulatedEngine) -> None:
        engine.reduce_scatter(np.ones(10, np.float32), [10, 0, 0] if engine.rank == 1 else [5, 5, 0])

    check(outcomes(run), "their sizes differ")


def test_run_raises_what_began_it() -> None:
    def function(engine: SimulatedEngine) -> None:
        if engine.rank == 2:
            raise ZeroDivisionError("in rank 2")
        reduce(engine)

    with pytest.raises(ZeroDivisionError, match="in rank 2"):
        SimulatedEngine.run(RANKS, function, timeout=20)


def test_a_closed_engine_says_so() -> None:
    (engine,) = SimulatedEngine.group(1)
    engine.close()
    engine.close()
    with pytest.raises(amp.errors.OrderError, match=r"closed; amp.distributed.init\(\) makes another"):
        engine.barrier()
