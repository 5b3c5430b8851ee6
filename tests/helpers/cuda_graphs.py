"""CUDA graphs without CUDA: sessions on CPU that record and replay as onnxruntime 1.31 was seen to.

Seen over stub libraries, by what the session asks of CUDA (``tests/runtime/test_cuda_graph_sessions.py``): the first run
with a number runs the step twice, records it, and launches it; later ones launch it alone, on the addresses that it was
recorded with. A thread has graphs of its own.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.runtime import executor
from amp_transpiler.runtime.capture import GRAPH_ID

#: How often onnxruntime runs a step in the call that records it.
RECORDING_RUNS = 3


class Binding:
    """An IO binding that knows its addresses, and takes nothing that has none."""

    def __init__(self, real: Any) -> None:
        self.real, self.addresses = real, dict[str, int]()

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.addresses[f"input {name}"] = value.data_ptr()
        self.real.bind_ortvalue_input(name, value)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.addresses[f"output {name}"] = value.data_ptr()
        self.real.bind_ortvalue_output(name, value)


@dataclass
class Calls:
    """What sessions were asked: program, "record" or "launch", and the number of the graph."""

    made: list[tuple[str, str, int]] = field(default_factory=list)
    fails: Exception | None = None  # in the middle of a recording, or of a launch

    def kinds(self, program: str = "") -> list[str]:
        return [kind for name, kind, _ in self.made if program in ("", name)]


class Session:
    """A session whose steps are captured; on the processor."""

    def __init__(self, real: Any, program: str, calls: Calls) -> None:
        self.real, self.program, self.calls = real, program, calls
        self.graphs, self.busy = threading.local(), threading.Lock()

    def io_binding(self) -> Binding:
        return Binding(self.real.io_binding())

    def run_with_iobinding(self, binding: Binding, options: ort.RunOptions) -> None:
        assert self.busy.acquire(blocking=False), "graphs of a session share their temporaries"
        try:
            self._run(binding, options)
            time.sleep(0.001)  # so that another thread comes, if it may
        finally:
            self.busy.release()

    def _run(self, binding: Binding, options: ort.RunOptions) -> None:
        number = int(options.get_run_config_entry(GRAPH_ID))
        graphs = self.graphs.__dict__.setdefault("graphs", {})
        recorded = graphs.get(number)
        self.calls.made.append((self.program, "launch" if recorded else "record", number))
        if recorded:
            assert recorded == binding.addresses, "a graph is launched that was recorded with other addresses"
        for _ in range(1 if recorded else RECORDING_RUNS):
            self.real.run_with_iobinding(binding.real)
            if self.calls.fails is not None:
                raise self.calls.fails
        graphs[number] = dict(binding.addresses)


def capturing(monkeypatch: pytest.MonkeyPatch) -> tuple[amp.Executor, Calls]:
    """An executor on CPU that captures what it runs, startup programs excepted, and its calls."""
    calls, real = Calls(), executor.create_session

    def create(model: Any, place: Any, settings: Any, name: str, *more: Any, **named: Any) -> Any:
        session, graph = real(model, place, replace(settings, cuda_graph=False), name, *more, **named)
        return (Session(session, name, calls) if settings.cuda_graph else session), graph

    monkeypatch.setattr(executor, "create_session", create)
    exe = amp.Executor(amp.CPUPlace(), threads=1)
    exe.settings = replace(exe.settings, cuda_graph=True)
    return exe, calls
