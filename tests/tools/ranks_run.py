"""Programs for real ranks, and their launcher: what is exact, and what comes of ranks that fail.

    python -m tests.tools.ranks_run [--ranks 4] [CASE ...]

starts ``mpiexec`` for each case (all where none is named), prints what came, and how long it took. The test suite runs the
same cases on two ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import amp_transpiler as amp
from tests.helpers.ranks import TYPES, drawn, rounded_once, words
from tests.helpers.where import ROOT

TIMEOUT = 2.0
#: The rank that fails.
CULPRIT = 1


def sums() -> None:
    """Every call, to the bit, blocking and submitted."""
    engine = amp.distributed.get_engine()
    ranks = range(engine.size)
    for dtype in TYPES:
        for length in (0, 3, 1000, 6_000_001 if dtype == "float16" else 100_003):
            array = drawn(engine.rank, length, dtype)
            work = engine.submit(lambda array=array: engine.all_reduce(array, "mean"))  # type: ignore[misc]
            expected = rounded_once([drawn(rank, length, dtype) for rank in ranks], "mean")
            np.testing.assert_array_equal(words(work.wait()), words(expected))
    most = np.full(5, 65504, np.float16)
    assert amp.distributed.all_reduce([most])[0].tolist() == [65504.0] * 5
    sizes = [1000 * (rank + 1) for rank in ranks]
    whole = drawn(engine.rank, sum(sizes), "bfloat16")
    own = engine.reduce_scatter(whole, sizes, "sum")
    gathered = engine.all_gather(own, sizes, np.empty_like(whole))
    expected = rounded_once([drawn(rank, sum(sizes), "bfloat16") for rank in ranks], "sum")
    np.testing.assert_array_equal(words(gathered), words(expected))
    received = engine.all_to_all([np.full((engine.rank + j, 2), 10 * engine.rank + j) for j in ranks])
    assert [part.tolist() for part in received] == [[[10 * j + engine.rank] * 2] * (j + engine.rank) for j in ranks]
    big = np.arange(300_000) if engine.rank == engine.size - 1 else np.zeros(300_000, np.int64)
    np.testing.assert_array_equal(amp.distributed.broadcast(big, engine.size - 1), np.arange(300_000))
    assert amp.distributed.all_gather_object({"rank": engine.rank}) == [{"rank": rank} for rank in ranks]
    assert [a.shape for a in amp.distributed.all_gather(np.zeros((engine.rank, 2)))] == [(rank, 2) for rank in ranks]
    amp.distributed.barrier()
    print(f"rank {engine.rank} of {engine.size}: all is exact", flush=True)


def reduce(length: int = 1000) -> None:
    amp.distributed.all_reduce(np.ones(length, np.float32))


def failing(fail: Callable[[], object]) -> Callable[[], None]:
    """One rank fails after a call, the others go on to the next one."""

    def run() -> None:
        reduce()
        if amp.distributed.rank() == CULPRIT:
            fail()
        reduce(2000)

    return run


def wrong() -> None:
    raise ValueError("no such file")


def ready() -> None:
    print("ready", flush=True)
    time.sleep(3600)


def overlapped() -> None:
    """It raises while a reduction that nobody joins is under way."""
    engine = amp.distributed.get_engine()
    engine.submit(lambda: (reduce(2000), reduce(2000)))
    time.sleep(0.2)
    raise ValueError("no such file")


CASES: dict[str, Callable[[], object]] = {
    "sums": sums,
    "raises": failing(wrong),
    "raises_overlapped": failing(overlapped),
    "sleeps": failing(lambda: time.sleep(3600)),
    "stops": failing(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "killed": failing(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "exits": failing(lambda: sys.exit(0)),
    "mismatch": failing(lambda: amp.distributed.all_reduce(np.ones(2000, np.float64))),
    "late": lambda: amp.distributed.rank() and time.sleep(3600),  # fails before init: see the end of this file
    "interrupted": failing(ready),
}


def mpiexec() -> str | None:
    """The mpiexec of this environment; None where mpi4py or it is not there."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return found if importlib.util.find_spec("mpi4py") else None


def start(case: str, ranks: int, *options: str, wrapped: bool = False) -> subprocess.Popen[str]:
    """Starts a case on so many ranks. ``wrapped``: each in a shell, so that mpiexec sees no rank die by a signal."""
    launcher = mpiexec()
    assert launcher is not None
    command = [sys.executable, "-m", "tests.tools.ranks_run", "--case", case]
    if wrapped:
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [launcher, *options, "-n", str(ranks), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def outcome(running: subprocess.Popen[str], seconds: float = 60.0) -> tuple[int, str]:
    """The status and all that was printed."""
    try:
        said, _ = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        said, _ = running.communicate()
        said += "\n(it hung)"
    return running.returncode, said


def interrupt(running: subprocess.Popen[str]) -> None:
    """Ctrl-C, once the rank that sleeps does."""
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)


def run(case: str, ranks: int) -> None:
    started = time.perf_counter()
    running = start(case, ranks)
    if case == "interrupted":
        interrupt(running)
    status, said = outcome(running)
    print(f"== {case}: status {status} after {time.perf_counter() - started:.1f} s\n{said}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--case", choices=CASES, help="be a rank of it")
    chosen = parser.parse_args()
    if chosen.case:
        if chosen.case == "late" and os.environ.get("PMI_RANK") == str(CULPRIT):
            time.sleep(3600)
        engine = amp.distributed.init("mpi", timeout=TIMEOUT if chosen.case == "late" else 60)
        if chosen.case in ("sleeps", "stops"):  # a machine at work may need longer to start a rank
            engine._watch._timeout = TIMEOUT
        CASES[chosen.case]()
    else:
        for name in chosen.cases or CASES:
            run(name, chosen.ranks)
