"""Processes that os.fork makes: they run, they end, and what is half a step there is refused."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import OrderError
from tests.tools.threads_run import Counting, counting, ones

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:This process .*is multi-threaded:DeprecationWarning"),
]


def status_of(work: Callable[[], object], seconds: float = 60) -> int:
    """What a forked child that does ``work`` ends with: 0, 1 after an error, -9 where it hung."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def warm(threads: int) -> tuple[Counting, amp.Executor, amp.Scope]:
    net, exe = counting("fp32"), amp.Executor(threads=threads)
    scope = net.started()
    exe.run(net.main, ones(4), [net.loss], scope)
    return net, exe, scope


def test_a_child_frees_what_its_parent_compiled() -> None:
    """onnxruntime waits for the threads of a session where it is freed, and a child has none of its parent's."""
    net, exe, scope = warm(threads=2)

    def work() -> None:
        exe.run(net.main, ones(4), [net.loss], scope)
        assert scope.find_var("w").ravel().tolist() == [-2] * 4
        exe.close()

    assert status_of(work, 20) == 0
    assert scope.find_var("w").ravel().tolist() == [-1] * 4


def test_a_scope_in_the_middle_of_a_step_is_refused_in_a_child() -> None:
    net, exe, scope = warm(threads=1)
    inside, go_on = threading.Event(), threading.Event()

    def step() -> None:
        with scope.writing():
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=step)
    thread.start()
    inside.wait(60)

    def work() -> None:
        for use in (lambda: scope.find_var("w"), lambda: exe.run(net.main, ones(4), [net.loss], scope)):
            with pytest.raises(OrderError, match="forked while another thread .* another Scope"):
                use()
        own = net.started()
        exe.run(net.main, ones(4), [net.loss], own)
        assert own.find_var("w").ravel().tolist() == [-1] * 4
        assert status_of(lambda: scope.find_var("w")) == 1

    status = status_of(work, 20)
    go_on.set()
    thread.join()
    assert status == 0
    assert np.array_equal(scope.find_var("w").ravel(), [-1] * 4)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_what_is_of_one_process_is_neither_copied_nor_sent(way: Callable[[object], object]) -> None:
    """A copy of a scope was another name of the same values, which training went on to change."""
    _, exe, scope = warm(threads=1)
    for value, name in ((scope, "Scope"), (exe, "Executor"), ({"exe": amp.watch(exe)}, "Executor")):
        if not (way is copy.copy and isinstance(value, dict)):
            with pytest.raises(TypeError, match=f"^{name} is neither copied nor pickled.* load_checkpoint"):
                way(value)


def test_who_reads_in_the_parent_keeps_no_child_from_writing() -> None:
    net, exe, scope = warm(threads=1)
    inside, go_on = threading.Event(), threading.Event()

    def read() -> None:
        with scope.reading():
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait(60)
    status = status_of(lambda: exe.run(net.main, ones(4), [net.loss], scope), 20)
    go_on.set()
    thread.join()
    assert status == 0


def test_a_thread_that_forks_within_a_block_has_it_in_the_child_too() -> None:
    net, exe, scope = warm(threads=1)
    with scope.writing():
        assert status_of(lambda: exe.run(net.main, ones(4), [net.loss], scope), 20) == 0
    with scope.reading():
        assert status_of(lambda: exe.run(net.main, ones(4), [net.loss], scope), 20) == 0
