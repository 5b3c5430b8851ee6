"""The end of a program with ranks: what is told, printed and returned. ``test_mpi`` has the same with real ranks."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from amp_transpiler.errors import DistributedError
from amp_transpiler.runtime.collective.exits import guard
from amp_transpiler.runtime.collective.simulated import SimulatedEngine
from amp_transpiler.stops import Terminated

Ends = list[Callable[[], None]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """What would run at the end of this process, in which neither hooks nor signals change."""
    registered: Ends = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(SimulatedEngine, "end", lambda self, status: registered.append(("status", status)))  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGINT)
    yield registered
    signal.signal(signal.SIGINT, before)


def raised(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_an_exception_is_told_printed_and_ends_with_1(ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
    engine, other = SimulatedEngine.group(2, 20)
    guard(engine)
    raised(ValueError("no data"))
    with pytest.raises(DistributedError, match="rank 0 .* raised ValueError: no data"):
        other.barrier()
    ends[0]()
    assert ends[-1] == ("status", 1)
    assert capsys.readouterr().err == "ValueError: no data\n"


@pytest.mark.parametrize(
    ("error", "word", "status"), [(KeyboardInterrupt, "interrupted", 130), (Terminated, "terminated", 143)]
)
@pytest.mark.parametrize("own", [True, False])
def test_ctrl_c_or_sigterm_here_or_on_another_rank_is_one_line_and_its_status(
    ends: Ends, own: bool, error: type[BaseException], word: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, other = SimulatedEngine.group(2, 20)
    guard(engine)
    if own:
        raised(error())
    else:
        other.abort(f"was {word}")
        with pytest.raises(DistributedError) as found:
            engine.barrier()
        raised(found.value)
    ends[0]()
    assert ends[-1] == ("status", status)
    assert capsys.readouterr().err == f"rank 0: {word}\n"


def test_a_good_end_tells_that_no_more_calls_come(ends: Ends) -> None:
    engine, other = SimulatedEngine.group(2, 20)
    guard(engine)
    ends[0]()
    assert len(ends) == 1 and engine.closed
    with pytest.raises(DistributedError, match="rank 0 .* has ended its program after call 0"):
        other.barrier()


def test_what_happens_after_shutdown_is_a_ranks_own_affair(ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
    engine, other = SimulatedEngine.group(2, 20)
    guard(engine)
    engine.close()
    raised(ValueError("in a report"))
    ends[0]()
    assert len(ends) == 1 and engine.fault() is other.fault() is None
    assert "in a report" in capsys.readouterr().err
    other.close()


def test_a_child_process_leaves_the_engine_alone(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,) = SimulatedEngine.group(1)
    guard(engine)
    own: Any = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    ends[0]()
    assert not engine.closed
    engine.close()
