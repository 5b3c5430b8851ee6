"""Programs for real ranks, and their launcher: what is exact, and what comes of ranks that fail.

    python -m tests.tools.ranks_run [--ranks 2] [--kills 50] [CASE ...]

starts ``mpiexec`` for each case (all where none is named), prints what came, and how long it took. The test suite runs the
same cases on two ranks. ``--kills``: that many times, kill -9 of any rank at any moment of a loop of calls; the others must
end within seconds and name it, or its process. Exit status 1 where one of them does not.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import amp_transpiler as amp
from amp_transpiler.ir.gc_pause import leave_at_exit
from amp_transpiler.runtime.collective import mpi, ordered
from tests.helpers.dealt import batch, dealing
from tests.helpers.normalised import trained
from tests.helpers.ranks import TYPES, drawn, rounded_once, words
from tests.helpers.sharded import Net
from tests.helpers.tables import Recommender
from tests.helpers.where import ROOT

TIMEOUT = 2.0
#: The environment variable for the folder that ranks print into.
FOLDER = "AMP_TEST_RANKS_FOLDER"
#: With ``-disable-auto-cleanup`` MPICH's mpiexec leaves the others alone where a rank exits, but not where a signal ends it;
#: and it tells them by a signal that would end them.
WRAPPER = """trap '' USR1; "$@"; exit $?"""
#: The rank that fails.
CULPRIT = 1


def sums() -> None:
    """Every call, to the bit, blocking and submitted."""
    engine, ordered.SEGMENT, mpi._MESSAGE = amp.distributed.get_engine(), 1 << 18, 70_001  # as with large arrays
    ranks = range(engine.size)
    for dtype in TYPES:
        for length in (0, 3, 1000, 300_001):
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


def dealt_out() -> None:
    """Optimizer state, and rows of tables, that are dealt out: bits and files are those without."""
    engine = amp.distributed.get_engine()
    folder = Path(engine.all_gather_object(tempfile.mkdtemp() if engine.rank == 0 else "")[0])
    found = []
    for shard in (False, True):
        net = Net(shard)
        losses = [net.step(number) for number in range(2)]
        found.append((losses, net.state(), net.saved(folder / str(shard))))
        held = sum(map(net.scope.has_var, net.names()))
    assert found[0] == found[1] and held < len(net.names())
    amp.load_checkpoint(folder / "False", net.main, net.scope)
    assert net.state() == found[0][1]
    tables = []
    for deal in (False, True):
        table = dealing(lambda: amp.optimizer.Adam(0.01, lazy_mode=True), deal)
        net_of_rows = Recommender(table, "mixed", init_loss_scaling=128.0)
        losses = [net_of_rows.run(batch(number)).tobytes() for number in range(2)]
        path = amp.save_checkpoint(folder / f"table {deal}", net_of_rows.main, net_of_rows.scope)
        tables.append((losses, (path / "state.safetensors").read_bytes()))
    assert tables[0] == tables[1]
    amp.distributed.barrier()
    if engine.rank == 0:
        shutil.rmtree(folder)
    print(f"rank {engine.rank} of {engine.size}: the bits are the same", flush=True)


def shared_norms() -> None:
    """Norms over all ranks, unequal shares, gradients reduced by hand: the losses and a hash of the state."""
    losses, state = trained("mixed", [0, 9], by_hand=True)()
    digest = hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
    print(f"rank {amp.distributed.rank()} {losses} {digest}", flush=True)


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


def loop() -> None:
    """Calls of all kinds and sizes, for ever."""
    engine = amp.distributed.get_engine()
    print(os.getpid(), flush=True)
    for step in range(100_000):
        engine.all_reduce(np.ones(10 ** (step % 7), np.float16), "mean")
        amp.distributed.all_gather_object(step)
        engine.broadcast(np.ones(100_000), step % engine.size)


def times() -> None:
    """Milliseconds of an all-reduce beside MPI's own sum of fp32, in turns."""
    from mpi4py import MPI

    engine, elements, taken = amp.distributed.get_engine(), 1 << 24, dict[str, list[tuple[float, float]]]()
    single = np.ones(elements, np.float32)
    arrays = {name: np.ones(elements, TYPES[name]) for name in ("float16", "bfloat16", "float32")}
    calls = {name: lambda array=array: engine.all_reduce(array, "mean") for name, array in arrays.items()}
    calls["MPI's own, float32"] = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, single)  # type: ignore[misc]
    for name in [*calls] * 15:
        engine.barrier()
        begun = time.perf_counter(), time.process_time()
        calls[name]()
        taken.setdefault(name, []).append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    if engine.rank == 0:
        for name, rows in taken.items():
            wall, cpu = ([1e3 * row[i] for row in rows] for i in (0, 1))
            least, median, work = min(wall), statistics.median(wall), statistics.median(cpu)
            print(f"{name}: {least:.1f} ms at least, {median:.1f} median, {work:.1f} of processor time", flush=True)


CASES: dict[str, Callable[[], object]] = {
    "sums": sums,
    "dealt_out": dealt_out,
    "shared_norms": shared_norms,
    "raises": failing(wrong),
    "raises_overlapped": failing(overlapped),
    "sleeps": failing(lambda: time.sleep(3600)),
    "stops": failing(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "killed": failing(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "exits": failing(lambda: sys.exit(0)),
    "mismatch": failing(lambda: amp.distributed.all_reduce(np.ones(2000, np.float64))),
    "late": lambda: None,  # these two fail before init: see the end of this file
    "absent": lambda: None,
    "interrupted": failing(ready),
    "times": times,
    "loop": loop,
}


def mpiexec() -> str | None:
    """The mpiexec of this environment; None where mpi4py or it is not there."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return found if importlib.util.find_spec("mpi4py") else None


class Started:
    """A case on its way. What the ranks print goes into files, since lines of several ranks may mix on the way."""

    def __init__(self, case: str, ranks: int, *options: str, wrapped: bool = False, apart: bool = True) -> None:
        """``case``: one, or several with blanks between, one after the other. ``wrapped``: each rank in a shell, so that
        mpiexec sees none die by a signal. ``apart``: print into files."""
        launcher = mpiexec()
        assert launcher is not None
        command = [sys.executable, "-m", "tests.tools.ranks_run", "--case", *case.split()]
        if wrapped:
            command = ["sh", "-c", WRAPPER, "sh", *command]
        self.ranks, self._folder = ranks, tempfile.TemporaryDirectory()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", FOLDER: self._folder.name * apart}
        self.process = subprocess.Popen(
            [launcher, *options, "-n", str(ranks), *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def said(self) -> list[str]:
        """What each rank has printed so far."""
        files = [Path(self._folder.name) / str(rank) for rank in range(self.ranks)]
        return [file.read_text(encoding="utf-8") if file.exists() else "" for file in files]

    def outcome(self, seconds: float = 60.0) -> tuple[int, str]:
        """The status, and all that was printed."""
        try:
            said, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            said, _ = self.process.communicate()
            said += "\n(it hung)"
        whole = said + "".join(self.said())
        self._folder.cleanup()
        return self.process.returncode, whole

    def interrupt(self) -> None:
        """Ctrl-C, once the rank that sleeps does."""
        self._until(lambda: "ready\n" in self.said()[CULPRIT])
        self.process.send_signal(signal.SIGINT)

    def kill(self, rank: int, after: float) -> None:
        """kill -9 of a rank of a loop, so many seconds after all have begun it."""
        self._until(lambda: all(said.endswith("\n") for said in self.said()))
        time.sleep(after)
        os.kill(int(self.said()[rank]), signal.SIGKILL)

    def _until(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < until and self.process.poll() is None, self.outcome()
            time.sleep(0.02)


def kill(ranks: int, draw: random.Random) -> str:
    """Kills a rank of a loop at some moment; what the others did wrong, "" where nothing."""
    started = Started("loop", ranks, "-disable-auto-cleanup", wrapped=True)
    rank = draw.randrange(ranks)
    started.kill(rank, draw.uniform(0, 0.5))
    killed = time.perf_counter()
    status, said = started.outcome(20)
    took = time.perf_counter() - killed
    named = len(re.findall(rf"Error: the process of rank {rank} \(host .*; rank \d+ was at call", said))
    print(f"rank {rank} killed: status {status} after {took:.2f} s, named {named} times", flush=True)
    return "" if status and named == ranks - 1 and "(it hung)" not in said else said


def run(case: str, ranks: int) -> None:
    begun = time.perf_counter()
    started = Started(case, ranks, apart=case == "interrupted")
    if case == "interrupted":
        started.interrupt()
    status, said = started.outcome(100)
    print(f"== {case}: status {status} after {time.perf_counter() - begun:.1f} s\n{said}", flush=True)


if __name__ == "__main__":
    leave_at_exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--case", choices=CASES, nargs="+", help="be a rank of it")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.case:
        if os.environ.get(FOLDER):
            printed = os.open(Path(os.environ[FOLDER]) / os.environ["PMI_RANK"], os.O_WRONLY | os.O_CREAT)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
        early = {"late": 1.0, "absent": 2.0}.get(chosen.case[0])
        if early and os.environ.get("PMI_RANK") == str(CULPRIT):
            if chosen.case == ["absent"]:
                import mpi4py.MPI  # noqa: F401 - which starts MPI
            time.sleep(3600)
        engine = amp.distributed.init("mpi", timeout=early or 60)
        if chosen.case[0] in ("sleeps", "stops"):  # a machine at work may need longer to start a rank
            engine._watch._timeout = TIMEOUT
        for case in chosen.case:
            CASES[case]()
    elif chosen.kills:
        drawn_moments = random.Random(chosen.seed)
        wrong_ones = list(filter(None, (kill(chosen.ranks, drawn_moments) for _ in range(chosen.kills))))
        sys.exit("\n".join(wrong_ones) or 0)
    else:
        for name in chosen.cases or [name for name in CASES if name != "loop"]:
            run(name, chosen.ranks)
