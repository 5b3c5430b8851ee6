"""Steps of all ranks as a trace: a file of the form that onnxruntime's profiler writes, for browsers and Perfetto."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amp_transpiler.file_targets import check_target
from amp_transpiler.files import put, write_files
from amp_transpiler.runtime.collective.current import by_rank_0
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.journal import StepExchanges, listening

#: The rows of a rank: what it computes or waits for, and what travels meanwhile.
ROWS = ("sessions", "exchanges")


@contextmanager
def traced(engine: Engine, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the steps inside, of all ranks, to a file; see ``amp.distributed.trace``."""
    target = check_target(path, "trace: path")
    steps: list[StepExchanges] = []
    with listening(engine, steps.append):
        yield
    events = [event for of_rank in engine.all_gather_object(_events(engine, steps)) for event in of_rank]
    timed = [event for event in events if "ts" in event]
    begin = min((event["ts"] for event in timed), default=0.0)
    for event in timed:
        event["ts"] = round(event["ts"] - begin, 3)
    by_rank_0(lambda: write_files([(target, put(json.dumps(events).encode()))]))


def _events(engine: Engine, steps: list[StepExchanges]) -> list[dict[str, Any]]:
    """The events of one rank. Times are microseconds on the clock of its host."""
    rank = engine.rank
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": str(engine.peers[rank])}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]
    for row, name in enumerate(ROWS):
        named.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
    clock = time.time() - time.perf_counter()

    def event(step: StepExchanges, number: int, row: int, kind: str, each: Any, **more: Any) -> dict[str, Any]:
        start = 1e6 * (clock + step.began + each.start)
        what = {"cat": kind, "ph": "X", "name": each.name, "pid": rank, "tid": row}
        return what | {"ts": start, "dur": round(1e6 * each.seconds, 3), "args": {"step": number, **more}}

    found = []
    for number, step in enumerate(steps):
        found += [event(step, number, 0, "Session", each) for each in step.sessions]
        found += [event(step, number, 0, "Wait", each) for each in step.waits]
        for each in step.exchanges:
            sizes = {"bytes": each.bytes, "sent": each.sent, "received": each.received}
            found.append(event(step, number, 1, "Exchange", each, **sizes))
    return named + found
