"""Cases in processes of their own, so that a crash, a hang or a flood of memory is a finding and not the end."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

#: Limits of a case: seconds, and bytes of resident memory beyond what the process begins with.
SECONDS, BYTES = 20.0, 1 << 30


@dataclass
class _Running:
    case: Any
    pipe: int
    started: float
    deadline: float
    received: bytes = b""
    verdict: str = ""


def judge(cases: Iterable[Any], run: Callable[[Any], str], workers: int = 2) -> Iterator[tuple[Any, str, float]]:
    """(case, what is wrong with it or "", seconds) in the order in which they end.

    ``run`` runs in a forked process, so this one may not have made threads; what it raises is a finding.
    """
    waiting = iter(cases)
    running: dict[int, _Running] = {}
    done = False
    while running or not done:
        while not done and len(running) < workers:
            case = next(waiting, None)
            if case is None:
                done = True
                break
            pid, one = _started(case, run)
            running[pid] = one
        yield from _finished(running)


def _started(case: Any, run: Callable[[Any], str]) -> tuple[int, _Running]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _silence()
        try:
            found = run(case)
        except BaseException:
            found = "the fuzzer itself failed: " + traceback.format_exc()[-800:]
        os.write(write, pickle.dumps(found[:4000]))
        os._exit(0)
    os.close(write)
    now = time.monotonic()
    return pid, _Running(case, read, now, now + SECONDS)


def _silence() -> None:
    """What C++ prints to the terminal is not judged."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _finished(running: dict[int, _Running]) -> Iterator[tuple[Any, str, float]]:
    """Look after what runs for a moment: take in words, end what exceeds a limit, give what has ended."""
    ready, _, _ = select.select([one.pipe for one in running.values()], [], [], 0.02)
    for pid, one in list(running.items()):
        if one.pipe in ready:
            one.received += os.read(one.pipe, 65536)
        now = time.monotonic()
        if now > one.deadline:
            one.verdict = one.verdict or f"more than {SECONDS:g} seconds"
            _end(pid)
        elif _resident(pid) > BYTES:
            one.verdict = one.verdict or f"more than {BYTES >> 20} MiB of memory"
            _end(pid)
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if not ended:
            continue
        while more := os.read(one.pipe, 65536):
            one.received += more
        os.close(one.pipe)
        del running[pid]
        if one.verdict:
            found = one.verdict
        elif os.WIFSIGNALED(status):
            found = f"died of signal {signal.Signals(os.WTERMSIG(status)).name}"
        elif not one.received:
            found = f"ended with status {os.WEXITSTATUS(status)} without a word"
        elif used.ru_maxrss * 1024 > BYTES:
            found = f"{used.ru_maxrss >> 10} MiB of memory"
        else:
            found = pickle.loads(one.received)
        yield one.case, found, now - one.started


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
