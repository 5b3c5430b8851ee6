"""Ranks of a training that die or hang, at random moments: ``python -m tests.tools.rank_kills [--kills 50] [--stops 5]``.

``mpiexec -n N amp-transpile train --checkpoint FOLDER``, with a checkpoint every three steps, loses a rank by kill -9
(``--kills``) or by SIGSTOP, which is a rank that sleeps for ever (``--stops``), half of the time while a file is written.
Each time the others must end within seconds, in one message that names the rank and what stands; every checkpoint must be
whole; and the same command goes on. A training that ends has the very bytes, of its file and of its last checkpoint, of
one that nothing happened to. Exit status 1 where anything of this fails.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import amp_transpiler as amp
from amp_transpiler.runtime.checkpoint.reading import TensorFile, read_meta
from tests.helpers.where import ROOT
from tests.tools.kills import WIDTH, Files, hidden, model, visible
from tests.tools.ranks_run import WRAPPER, mpiexec

#: Seconds in which the others must end; for which ranks wait for one that hangs; in which a training must do anything.
IN_TIME, HANGS, PATIENCE = 30.0, 8.0, 300.0
_MARK = "AMP_TEST_RANK_KILLS"


@dataclass
class Training:
    """The command, and where it writes. ``epochs`` are of three steps each."""

    home: Path
    ranks: int
    epochs: int

    def __post_init__(self) -> None:
        model(self.home / "net.onnx")
        rng = np.random.default_rng(1)
        x = rng.standard_normal((44, WIDTH)).astype(np.float32)  # batches of 16, 16 and 12
        np.savez(self.home / "data.npz", x=x, label=rng.integers(0, 4, 44))

    def command(self, out: Path) -> list[str]:
        """``amp-transpile train`` into a folder; the same to begin and to go on."""
        given = ["train", self.home / "net.onnx", out / "m.onnx", "--data", self.home / "data.npz", "--batch-size", 16]
        more = ["--epochs", self.epochs, "--checkpoint", out / "saved", "--optimizer", "adam"]
        return [sys.executable, "-m", "amp_transpiler.cli", *map(str, [*given, *more])]

    def start(self, out: Path, said: Path, timeout: float = 120.0) -> subprocess.Popen[bytes]:
        """The command on all ranks, whose output goes into the file ``said``."""
        out.mkdir(exist_ok=True)
        prefix = [str(mpiexec()), "-disable-auto-cleanup", "-n", str(self.ranks), "sh", "-c", WRAPPER, "sh"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {_MARK: str(out), "AMP_DISTRIBUTED_TIMEOUT": str(timeout)}
        with open(said, "wb") as file:
            return subprocess.Popen(
                [*prefix, *self.command(out)],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def finish(self, out: Path, threads: bool = False) -> Files:
        """Run it to its end, by ranks that are threads of this process where ``threads``; the files that it leaves."""
        if threads:
            out.mkdir(exist_ok=True)
            options = {"batch_size": 16, "epochs": self.epochs, "optimizer": "adam", "checkpoint": out / "saved"}
            files = self.home / "net.onnx", out / "m.onnx"
            amp.distributed.simulate(self.ranks, lambda: amp.fit(*files, data=self.home / "data.npz", **options))
            return visible(out)
        process = self.start(out, self.home / "said")
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        said = (self.home / "said").read_text()
        assert process.returncode == 0, said
        assert not hidden(out), hidden(out)
        return visible(out)


def process_of(rank: int, out: Path) -> int:
    """The process number of a rank of the training into ``out``."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"{_MARK}={out}".encode(), f"PMI_RANK={rank}".encode()} <= {*environment} and command[0] != b"sh":
            return int(folder.name)
    raise ProcessLookupError(rank)


def check_whole(out: Path) -> int:
    """Reads every tensor of every checkpoint, against its check sum; how many checkpoints there are."""
    folders = [folder for folder in (out / "saved").glob("step_*") if folder.is_dir()]
    for folder in folders:
        meta = read_meta(folder)
        file = TensorFile(folder, meta)
        for name in meta["tensors"]:
            file.read(name)
    return len(folders)


@dataclass
class Striker:
    """Strikes ranks, and counts what came of it."""

    chance: random.Random
    struck: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0

    def strike(self, training: Training, out: Path, stop: bool) -> None:
        """Start the training and strike one of its ranks, or see it end first."""
        said = training.home / "said"
        process = training.start(out, said, HANGS if stop else 120.0)
        try:
            self._strike(process, training.ranks, out, said, stop)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _strike(self, process: subprocess.Popen[bytes], ranks: int, out: Path, said: Path, stop: bool) -> None:
        self._until(lambda: "parameters are trained" in said.read_text(), process, said)
        moment = time.monotonic() + self.chance.uniform(0, 1.5)
        if self.chance.random() < 0.5:
            while not hidden(out) and process.poll() is None:
                time.sleep(0.001)
            moment = time.monotonic() + self.chance.uniform(0, 0.03)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.001)
        rank = self.chance.randrange(ranks)
        try:
            os.kill(process_of(rank, out), signal.SIGSTOP if stop else signal.SIGKILL)
        except ProcessLookupError:  # it was faster
            process.wait(PATIENCE)
            return
        begun, torn = time.monotonic(), bool(hidden(out))
        try:
            process.wait(IN_TIME + (HANGS if stop else 0))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} was struck, and the others hang\n{said.read_text()}") from None
        took, text = time.monotonic() - begun, said.read_text()
        if "the trained model in" in text:  # all was done when it came
            return
        lines = re.findall(r"^amp-transpile: .*", text, re.MULTILINE)
        way = (
            f"rank {rank} \\(host \\S+, pid \\d+\\) (does not answer|has not come)"
            if stop
            else (f"the process of rank {rank} \\(host \\S+, pid \\d+\\) is gone")
        )
        stands = r"m.onnx was not written; (the checkpoint of epoch \d+ in \S+ stands|there is no checkpoint)"
        named = len(lines) == 1 and re.search(way, lines[0]) and re.search(stands, lines[0])
        assert process.returncode and named, f"rank {rank}: status {process.returncode}\n{text}"
        assert not (out / "m.onnx").exists()
        self.struck["stops" if stop else "kills"] += 1
        self.struck["in the middle of a write"] += torn
        self.longest = max(self.longest, took - (HANGS if stop else 0))
        check_whole(out)
        print(
            f"{'stopped' if stop else 'killed'} rank {rank}{' while writing' * torn}: ended after {took:.2f} s; {lines[0]}"
        )

    @staticmethod
    def _until(reached: object, process: subprocess.Popen[bytes], said: Path) -> None:
        until = time.monotonic() + PATIENCE
        while not reached():  # type: ignore[operator]
            assert time.monotonic() < until and process.poll() is None, said.read_text()
            time.sleep(0.02)


def all_of_them(
    home: Path, ranks: int, kills: int, stops: int, seed: int, epochs: int, threads: bool = False
) -> Striker:
    """So many of each, in as many trainings as it takes; ``threads``: the one that nothing happens to has no mpiexec."""
    training, striker = Training(home, ranks, epochs), Striker(random.Random(seed))
    wanted = training.finish(home / "unbroken", threads)
    out, trainings = home / "out", 0
    for stop, count in ((False, kills), (True, stops)):
        what = "stops" if stop else "kills"
        while striker.struck[what] < count:
            before = striker.struck[what]
            striker.strike(training, out, stop)
            if striker.struck[what] > before and striker.struck[what] < count:
                continue
            found = training.finish(out)
            differ = [name for name in wanted if found.get(name) != wanted[name]]
            assert not differ, f"resumed, these are others than those of an unbroken training: {differ}"
            shutil.rmtree(out)
            trainings += 1
    print({**striker.struck, "trainings": trainings, "the others ended within": f"{striker.longest:.2f} s"})
    return striker


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("kills", 50), ("stops", 5), ("seed", 0), ("epochs", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        all_of_them(Path(folder), chosen.ranks, chosen.kills, chosen.stops, chosen.seed, chosen.epochs)
