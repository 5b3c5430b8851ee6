"""Ctrl-C and signal handlers: a step is whole or did not happen, and nothing stays locked."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.runtime import (
    Executor,
    Scope,
    binding,
)
from amp_transpiler.stops import Terminated, terminable
from tests.helpers.refusals import BATCH, CPU, trained, values
from tests.helpers.running import FEED, W, started
from tests.tools.threads_run import counting, ones, together


@pytest.mark.parametrize(("stop", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_ctrl_c_waits_for_the_end_of_the_step(
    exe: Executor, scope: Scope, stop: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = started(exe, scope)
    exe.run(program, FEED, ["y"], scope)
    step = exe._tables.programs[program].last.last  # type: ignore[union-attr]
    plain = step.session.run_with_iobinding  # type: ignore[union-attr]

    def interrupted(*arguments: Any) -> None:
        os.kill(os.getpid(), stop)
        plain(*arguments)

    monkeypatch.setattr(step.session, "run_with_iobinding", interrupted)  # type: ignore[union-attr]
    with terminable(), pytest.raises(error):
        exe.run(program, FEED, ["y"], scope)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    np.testing.assert_array_equal(scope.find_var("w"), W / 4)
    np.testing.assert_array_equal(scope.find_var("total"), W * 3)


def test_ctrl_c_keeps_the_turn_of_a_window_in_step_with_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    net = counting("pure-fp16", runs=2)
    scope, exe = net.started(), amp.Executor(threads=1)
    plain = binding._Bindings._execute
    calls: list[int] = []

    def interrupted(self: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        plain(self)

    monkeypatch.setattr(binding._Bindings, "_execute", interrupted)
    exe.run(net.main, ones(4), scope=scope)
    with pytest.raises(KeyboardInterrupt):
        exe.run(net.main, ones(4), scope=scope)
    assert int(scope.find_var(net.main.accumulation.counter.name)) == 0
    assert scope.find_var("w_fp32_master_0").ravel().tolist() == [-1] * 4
    exe.run(net.main, ones(4), scope=scope)
    exe.run(net.main, ones(4), scope=scope)
    assert scope.find_var("w_fp32_master_0").ravel().tolist() == [-2] * 4


def test_ctrl_c_while_waiting_for_another_thread_leaves_nothing_locked() -> None:
    net = counting()
    scope, exe = net.started(), amp.Executor(threads=1)
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with scope.writing():
            held.set()
            free.wait(20)

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threads = [threading.Thread(target=task, daemon=True) for task in (hold, interrupt)]
    threads[0].start()
    assert held.wait(20)
    threads[1].start()
    with pytest.raises(KeyboardInterrupt):
        exe.run(net.main, ones(4), scope=scope)
    free.set()
    together([lambda: exe.run(net.main, ones(4), scope=scope)], timeout=20)
    assert scope.find_var("w")[0, 0] == -1


def test_a_signal_handler_may_save_and_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs when the step is over, in the thread that still holds the scope."""
    net = counting()
    scope, exe = net.started(), amp.Executor(threads=1)
    plain, before = binding._Bindings._execute, signal.getsignal(signal.SIGINT)
    seen: list[float] = []

    def interrupted(self: Any) -> None:
        if not seen:
            os.kill(os.getpid(), signal.SIGINT)
        plain(self)

    def handler(*_: Any) -> None:
        seen.append(float(scope.find_var("w")[0, 0]))
        amp.save_checkpoint(tmp_path / "last", net.main, scope)
        exe.run(net.main, ones(4), scope=scope)

    monkeypatch.setattr(binding._Bindings, "_execute", interrupted)
    signal.signal(signal.SIGINT, handler)
    try:
        exe.run(net.main, ones(4), scope=scope)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [-1] and scope.find_var("w")[0, 0] == -2


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="needs signals")
@pytest.mark.parametrize("buffers", ["in place", "two"])
def test_ctrl_c_at_any_line_of_a_run_leaves_a_whole_step(buffers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if buffers == "two":
        monkeypatch.setattr(binding, "refusals", lambda graph, pairs, *_: ["a test wants two buffers"] * len(pairs))
    net, optimizer, _, scope, executor = trained()
    optimizer.amp_init(CPU, scope)
    executor.run(net.main, BATCH, [net.loss], scope)
    reached = [values(scope)]
    folder = str(Path(amp.__file__).parent / "runtime")
    start = {name: scope.find_var(name) for name in scope.var_names()}
    executor.run(net.main, BATCH, [net.loss], scope)
    reached.append(values(scope))
    interrupted = 0
    for at in range(5, 2000, 17):
        for name, value in start.items():
            scope.set_var(name, value)
        left = [at]

        def tracer(frame: Any, event: str, argument: Any, left: list[int] = left) -> Any:
            if not frame.f_code.co_filename.startswith(folder):
                return None
            left[0] -= event == "line"
            if event == "line" and left[0] == 0:
                signal.raise_signal(signal.SIGINT)
            return tracer

        old = sys.gettrace()
        sys.settrace(tracer)
        try:
            executor.run(net.main, BATCH, [net.loss], scope)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(old)
        assert values(scope) in reached, f"after an interrupt at line {at} the scope holds half a step"
        if left[0] > 0:
            break
    assert interrupted > 10
