"""What a step of several ranks says of its exchanges: bytes, times, and how they lie beside its sessions in a trace."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering import rounds
from amp_transpiler.runtime import buckets
from amp_transpiler.runtime.collective.headers import SIZE

WIDTH, LAYERS, SLOW = 64, 6, 0.05


class Net:
    """Six layers of 64 x 64 and a table, trained with Adam."""

    def __init__(self, table: bool = False) -> None:
        self.main, startup = amp.Program(), amp.Program("startup")
        startup.seed = 1
        with amp.program_guard(self.main, startup), amp.unique_name.guard():
            h = amp.data("x", [4, WIDTH], "float32")
            if table:
                h = h + amp.nn.embedding(amp.data("ids", [4], "int64"), [100, WIDTH], is_sparse=True)
            for _ in range(LAYERS):
                h = amp.nn.fc(h, WIDTH, act="relu", bias_attr=False)
            self.loss = F.mean(h)
            amp.optimizer.Adam(0.01).minimize(self.loss, startup)
        self.exe, self.scope = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope()
        self.exe.run(startup, scope=self.scope)
        self.feed = {"x": np.ones((4, WIDTH), np.float32)} | ({"ids": np.arange(4)} if table else {})

    def run(self, *fetches: Any) -> list[Any]:
        return self.exe.run(self.main, self.feed, list(fetches) or [self.loss], self.scope)


@pytest.fixture
def four_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BUCKET", WIDTH * WIDTH)


@pytest.mark.usefixtures("four_buckets")
@pytest.mark.parametrize("ranks", [2, 4])
def test_volume_is_that_of_a_ring(ranks: int) -> None:
    def run() -> distributed.StepExchanges:
        net = Net(table=True)
        net.run()
        return distributed.step_report()

    weights, rows, ids = LAYERS * WIDTH * WIDTH * 4, 4 * WIDTH * 4, 4 * 8
    for rank, step in enumerate(distributed.simulate(ranks, run)):
        assert (step.rank, step.ranks) == (rank, ranks) and len(step.exchanges) >= 5
        headers = len(step.exchanges) * (ranks - 1) * SIZE
        others = ranks - 1
        assert step.sent == step.received == 2 * others * weights // ranks + others * (rows + ids) + headers
        assert step.bytes == weights + ranks * (rows + ids)
        assert 0 < step.exchanging < step.seconds * len(step.exchanges) and 0 <= step.overlap <= 1
        text = str(step)
        assert f"rank {rank} of {ranks}" in text and text.count("\n  bucket") == len(step.exchanges)


def slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges that last while sessions run, however the machine is at work: the first has begun before they go on."""
    call: Callable[..., None] = buckets._Call.run
    start: Callable[..., Any] = buckets.Buckets.start
    begun: defaultdict[Any, threading.Event] = defaultdict(threading.Event)

    def slow(self: buckets._Call, engine: Any, mark: Any) -> None:
        begun[engine].set()
        call(self, engine, mark)
        time.sleep(SLOW)

    def started(self: buckets.Buckets, part: int, journal: Any) -> Any:
        if part == 0:
            begun[distributed.get_engine()].clear()
        works = start(self, part, journal)
        if part == 0:
            begun[distributed.get_engine()].wait(10)
        return works

    monkeypatch.setattr(buckets._Call, "run", slow)
    monkeypatch.setattr(buckets.Buckets, "start", started)


@pytest.mark.usefixtures("four_buckets")
def test_the_trace_shows_exchanges_beside_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch)

    def run() -> list[distributed.StepExchanges]:
        net, steps = Net(), []
        net.run()
        with distributed.trace(tmp_path / "trace.json"):
            for _ in range(2):
                net.run()
                steps.append(distributed.step_report())
        net.run()  # behind it
        return steps

    of_ranks = distributed.simulate(2, run)
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {(rank, row): name for rank in (0, 1) for row, name in enumerate(("sessions", "exchanges"))}
    timed = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in timed) == 0
    for rank, steps in enumerate(of_ranks):
        for number, step in enumerate(steps):
            mine = [e for e in timed if e["pid"] == rank and e["args"]["step"] == number]
            sessions = [e for e in mine if e["cat"] == "Session"]
            first, *_ = travelled = sorted((e for e in mine if e["cat"] == "Exchange"), key=lambda e: e["ts"])
            assert (len(sessions), len(travelled)) == (5, 4)
            assert {e["tid"] for e in travelled} == {1} and {e["tid"] for e in mine if e["cat"] != "Exchange"} == {0}
            after = sorted(sessions, key=lambda e: e["ts"])[1]
            assert first["ts"] <= after["ts"] + 1 and after["ts"] < first["ts"] + first["dur"]
            assert step.exchanges[0].overlapped > 0 and step.overlap > 0
            assert step.waited > SLOW  # the last one travels when there is nothing left to compute
            assert sum(e["args"]["sent"] for e in travelled) == step.sent
    assert {e["args"]["step"] for e in timed} == {0, 1}


def test_reports_of_steps_say_what_was_exchanged(tmp_path: Path) -> None:
    def run() -> tuple[Any, Any, str]:
        net = Net()
        reports = amp.StepReports(net.main)
        (report,) = net.run(reports)
        step = distributed.step_report()
        with amp.CsvWriter(tmp_path / str(distributed.rank())) as writer:
            writer.write(report)
        return report, step, str(report)

    for rank, (report, step, line) in enumerate(distributed.simulate(2, run)):
        record = report.to_dict()
        assert report.exchanges is step and record["bytes_sent"] == step.sent > 0
        assert record["exchange_seconds"] == step.exchanging and record["overlap"] == step.overlap
        assert line.endswith(step.line()) and "sent 96.0 KiB, received 96.0 KiB in " in line
        head, row = (tmp_path / str(rank)).read_text(encoding="utf-8").splitlines()
        assert dict(zip(head.split(","), row.split(","), strict=True))["bytes_received"] == str(step.received)


def test_one_rank_alone_says_nothing_of_exchanges(tmp_path: Path) -> None:
    net = Net()
    (report,) = net.run(amp.StepReports(net.main))
    assert report.exchanges is None and "bytes_sent" not in report.to_dict() and "sent" not in str(report)
    with pytest.raises(amp.AmpError, match="has run no step that exchanges"):
        distributed.step_report()


def test_a_file_that_is_gone_on_with_keeps_its_columns(tmp_path: Path) -> None:
    """One rank goes on where two were, or the other way round."""
    path = tmp_path / "steps.csv"

    def several() -> None:
        net = Net()
        (report,) = net.run(amp.StepReports(net.main, step=1))
        if distributed.rank() == 0:
            with amp.CsvWriter(path, append=True) as writer:
                writer.write(report)

    net = Net()
    (report,) = net.run(amp.StepReports(net.main))
    with amp.CsvWriter(path) as writer:
        writer.write(report)
    distributed.simulate(2, several)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [len(line.split(",")) for line in lines] == [12] * 3 and "bytes_sent" not in lines[0]


def test_nothing_is_written_where_the_traced_block_raises(tmp_path: Path) -> None:
    def run() -> None:
        with pytest.raises(KeyError), distributed.trace(tmp_path / "trace.json"):
            raise KeyError

    distributed.simulate(2, run)
    assert list(tmp_path.iterdir()) == []
