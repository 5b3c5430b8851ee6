"""Training steps on several ranks of this machine: what exchanges cost, what overlap saves, and what the plan forecasts.

    python -m tests.benchmarks.ranks [--ranks 2] [--nets cnn mlp bert] [--rounds 15]

starts one rank, and then ``mpiexec -n RANKS``, each with one thread for its sessions and the same batch. In each round
every rank runs each kind of step once, in turns: *alone*, without exchanges, though all ranks compute at the same time;
*overlapped*, with gradients in four buckets that travel during the backward pass; and *at once*, in one bucket behind it.
Printed are the least times of rank 0; ratios are against *alone* on as many ranks.
The plan is given the least time of *alone* and the bandwidth of an all-reduce of all gradients, timed in the same rounds.

    python -m tests.benchmarks.ranks published

forecasts published runs on GPUs (tests/data/published_scaling.json) from their throughput on one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.lists.devices import find_device
from amp_transpiler.passes.lowering import rounds
from amp_transpiler.passes.lowering.exchange_cost import Network
from amp_transpiler.passes.lowering.planning import Assumed, Planner
from amp_transpiler.runtime.collective.simulated import single_engine
from tests.helpers import benchmark_programs
from tests.helpers.where import ROOT
from tests.tools.ranks_run import mpiexec

PUBLISHED = ROOT / "tests" / "data" / "published_scaling.json"
#: Program, mode, and what gradients travel in.
KINDS = [("fp32", "float32"), ("mixed", "float32"), ("mixed", "float16")]
#: Bytes of a bucket in which even these small nets have four.
SMALL_BUCKET = 1 << 19


class Net:
    """A training step of one rank, or, with ``alone``, of one that does not know of others."""

    def __init__(self, name: str, mode: str, precision: str, alone: bool = False, bucket: int = SMALL_BUCKET) -> None:
        engine = single_engine(60.0) if alone else distributed.get_engine()
        with distributed.use_engine(engine):
            self.main, startup = amp.Program(name), amp.Program("startup")
            startup.seed = 1
            with amp.program_guard(self.main, startup), amp.unique_name.guard():
                self.loss = benchmark_programs.PROGRAMS[name]()
                optimizer: Any = amp.optimizer.Adam(1e-4)
                if mode != "fp32":
                    optimizer = amp.decorate(optimizer, allreduce_precision=precision)
                optimizer.minimize(self.loss, startup)
            self.exe, self.scope = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope()
            self.exe.run(startup, scope=self.scope)
            rng = np.random.default_rng(distributed.rank())
            self.feed = {v.name: _drawn(rng, v) for v in self.main.inputs if v.readers}
            before, rounds.BUCKET = rounds.BUCKET, bucket
            self.run()
            rounds.BUCKET = before

    def run(self) -> float:
        """Seconds of a step."""
        begun = time.perf_counter()
        self.exe.run(self.main, self.feed, [self.loss], self.scope)
        return time.perf_counter() - begun


def _drawn(rng: np.random.Generator, v: amp.Variable) -> np.ndarray:
    shape = [int(size) for size in v.shape or ()]
    if v.dtype == "float32":
        return rng.standard_normal(shape).astype(np.float32)
    return np.ones(shape, np.int64) if v.name == "mask" else rng.integers(0, 10, shape)


def measure(name: str, mode: str, precision: str, repeats: int) -> dict[str, Any]:
    """The least times of one kind on this rank, all ranks at work at the same time."""
    engine = distributed.get_engine()
    nets = {"alone": Net(name, mode, precision, alone=True)}
    if engine.size > 1:
        nets |= {"overlapped": Net(name, mode, precision), "at once": Net(name, mode, precision, bucket=1 << 40)}
    planned = distributed.plan(nets["alone"].main, 2, bandwidth=1, step_time=1, allreduce_precision=precision)
    size = sum(planned.buckets)
    flat = np.zeros(size // (2 if precision == "float16" else 4), precision)
    calls: dict[str, Callable[[], object]] = {kind: net.run for kind, net in nets.items()}
    calls["all-reduce"] = lambda: engine.all_reduce(flat, "mean")
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    work: dict[str, list[float]] = {kind: [] for kind in calls}
    steps = {}
    for kind in [*calls] * (repeats + 1):
        engine.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        calls[kind]()
        times[kind].append(time.perf_counter() - begun)
        work[kind].append(time.process_time() - worked)
        if kind in nets and kind != "alone":
            steps.setdefault(kind, []).append(distributed.step_report())
    found: dict[str, Any] = {"bytes": size, "times": {k: min(t[1:]) for k, t in times.items()}}
    found["work"] = {kind: statistics.median(t[1:]) for kind, t in work.items()}
    found["overlap"] = {kind: statistics.median(s.overlap for s in each[1:]) for kind, each in steps.items()}
    found["waited"] = {kind: min(s.waited for s in each[1:]) for kind, each in steps.items()}
    if engine.size > 1:
        reduced = 2 * (engine.size - 1) / engine.size * size / found["times"]["all-reduce"]
        said = {"bandwidth": reduced / 1e9, "step_time": found["times"]["alone"], "latency": 50.0}
        forecast = {o: distributed.plan(nets["overlapped"].main, engine.size, **said, overlap=o) for o in (0.0, 1.0)}
        found["forecast"] = {str(o): plan[engine.size].step for o, plan in forecast.items()}
        found["bandwidth"] = reduced
    return found


def as_rank(options: argparse.Namespace) -> None:
    """Be a rank: measure, and let rank 0 write what it found."""
    distributed.init()
    found = {
        f"{name}, {mode}, {precision}": measure(name, mode, precision, options.rounds)
        for name in options.nets
        for mode, precision in KINDS
    }
    if distributed.rank() == 0:
        Path(options.out).write_text(json.dumps(found), encoding="utf-8")
    distributed.shutdown()


def started(ranks: int, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """What rank 0 of so many found."""
    command = [sys.executable, "-m", "tests.benchmarks.ranks", "--out", str(out), "--rounds", str(options.rounds)]
    command += ["--nets", *options.nets]
    if ranks > 1:
        launcher = mpiexec()
        assert launcher is not None
        command = [launcher, "-n", str(ranks), *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return found


def scaling(options: argparse.Namespace) -> None:
    """The table of what was measured."""
    out = Path(options.folder) / "ranks.json"
    single = started(1, options, out)
    print(
        "| net, mode, reduction | MB | ranks | one rank | alone | overlapped | at once | forecast | speed-up | overlap |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        for kind, found in started(ranks, options, out).items():
            times, one = found["times"], single[kind]["times"]["alone"]
            alone, over, once = (1e3 * times[each] for each in ("alone", "overlapped", "at once"))
            least, most = (1e3 * found["forecast"][each] for each in ("1.0", "0.0"))
            print(
                f"| {kind} | {found['bytes'] / 1e6:.1f} | {ranks} | {1e3 * one:.1f} ms | {alone:.1f} ms | "
                f"{over:.1f} ms, {over / alone:.3f} | {once:.1f} ms, {once / alone:.3f} | {least:.1f} to {most:.1f} ms | "
                f"{ranks * one / times['overlapped']:.2f} | {found['overlap']['overlapped']:.0%} |",
                flush=True,
            )


def published() -> None:
    """Forecasts beside published runs."""
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    print("| run | ranks | published | forecast | forecast, bandwidth of two nodes |")
    print("|---|---|---|---|---|")
    for run in data["runs"]:
        for row in forecasts(run, data["networks"][run["network"]]):
            print("| " + " | ".join([run["name"], *row]) + " |", flush=True)


def forecasts(run: dict[str, Any], network: dict[str, Any]) -> list[list[str]]:
    """Rows of one run: ranks, the efficiency that was published, forecast, and forecast with a fitted bandwidth."""
    main, _, loss, _ = benchmark_programs.training(run["net"], run["mode"], **run["sizes"])
    speeds = {int(ranks): speed for ranks, speed in run["examples_per_second"].items()}
    many = [ranks for ranks in speeds if ranks > 1]
    node, rate = network["ranks_per_node"], 1e9 * network["bandwidth"]
    links = Network("nccl", rate, 1e9 * network["within"], 1e-6 * network["latency_us"], node)
    step_time = run["batch"] / speeds[1]
    assumed = Assumed(links, find_device(network["device"]), False, step_time, run["reduction"], False, 1.0)
    planner = Planner(main, assumed, fetch_list=[loss])

    def efficiency(ranks: int, bandwidth: float) -> float:
        planner.assumed = replace(assumed, network=replace(links, bandwidth=bandwidth))
        return planner.row(ranks).efficiency

    rows = [[str(n), f"{speeds[n] / n / speeds[1]:.3f}", f"{efficiency(n, rate):.3f}", ""] for n in many]
    if 2 * node in speeds and max(many) > 2 * node:
        target, low, high = speeds[2 * node] / 2 / node / speeds[1], 1e8, rate
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if efficiency(2 * node, middle) < target else (low, middle)
        for row, n in zip(rows, many, strict=True):
            row[3] = f"{efficiency(n, high):.3f} at {high / 1e9:.1f} GB/s" if n >= 2 * node else ""
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["scaling", "published"], default="scaling")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--nets", nargs="+", default=["cnn", "mlp", "bert"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--out", help="be a rank, and write what was found there")
    chosen = parser.parse_args()
    if chosen.out:
        as_rank(chosen)
    elif chosen.what == "published":
        published()
    else:
        scaling(chosen)
