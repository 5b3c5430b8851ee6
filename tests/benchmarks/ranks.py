"""Training steps on several ranks of this machine: what exchanges cost, what overlap saves, and what the plan forecasts.

    python -m tests.benchmarks.ranks [--ranks 2 4] [--nets cnn mlp bert] [--rounds 15]

starts ``mpiexec -n RANKS``, each rank with one thread for its sessions and the same batch. In each round come in turn:
*one*, a step of rank 0 while the others wait; *alone*, a step of all ranks at the same time that exchanges nothing;
*overlapped*, with gradients in some four buckets, which travel during the backward pass; *at once*, in one bucket behind it;
and an all-reduce of as many bytes. Printed are medians of the processor time of rank 0, which other work on the machine
hardly changes, and the least times, which mean little where it is at work. The plan is given what *alone* takes, the bandwidth
of that all-reduce, and no overlap (of times also: all of it). Speed is examples a second beside *one*.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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


@contextmanager
def buckets_of(size: int) -> Iterator[None]:
    """Inside, gradients leave in buckets of about so many bytes."""
    before, rounds.BUCKET = rounds.BUCKET, size
    try:
        yield
    finally:
        rounds.BUCKET = before


class Net:
    """A training step of one rank, or, with ``alone``, of one that does not know of others."""

    def __init__(self, name: str, mode: str, precision: str, alone: bool = False, bucket: int = SMALL_BUCKET) -> None:
        engine = single_engine(60.0) if alone else distributed.get_engine()
        with distributed.use_engine(engine), buckets_of(bucket):
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
            self.run()

    def run(self) -> None:
        """A step."""
        self.exe.run(self.main, self.feed, [self.loss], self.scope)


def _drawn(rng: np.random.Generator, v: amp.Variable) -> np.ndarray:
    shape = [int(size) for size in v.shape or ()]
    if v.dtype == "float32":
        return rng.standard_normal(shape).astype(np.float32)
    return np.ones(shape, np.int64) if v.name == "mask" else rng.integers(0, 10, shape)


def measure(name: str, mode: str, precision: str, repeats: int) -> dict[str, Any]:
    """What rank 0 takes for each kind of step."""
    engine = distributed.get_engine()
    alone, overlapped = Net(name, mode, precision, alone=True), Net(name, mode, precision)
    once = Net(name, mode, precision, bucket=1 << 40)
    with buckets_of(SMALL_BUCKET):
        size = sum(distributed.plan(overlapped.main, 2, bandwidth=1, step_time=1).buckets)
    flat = np.zeros(size // (2 if precision == "float16" else 4), precision)
    calls: dict[str, Callable[[], object]] = {
        "one": lambda: alone.run() if engine.rank == 0 else None,
        "alone": alone.run,
        "overlapped": overlapped.run,
        "at once": once.run,
        "all-reduce": lambda: engine.all_reduce(flat, "mean"),
    }
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    work: dict[str, list[float]] = {kind: [] for kind in calls}
    overlaps = []
    for kind in [*calls] * repeats:
        engine.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        calls[kind]()
        times[kind].append(time.perf_counter() - begun)
        work[kind].append(time.process_time() - worked)
        if kind == "overlapped":
            overlaps.append(distributed.step_report().overlap)
    least = {kind: min(each) for kind, each in times.items()}
    middle = {kind: statistics.median(each) for kind, each in work.items()}

    def forecast(seconds: dict[str, float], overlap: float) -> float:
        rate = 2 * (engine.size - 1) / engine.size * size / seconds["all-reduce"]
        said: dict[str, Any] = {"bandwidth": rate / 1e9, "step_time": seconds["alone"], "latency": 0.0}
        with buckets_of(SMALL_BUCKET):
            return distributed.plan(overlapped.main, engine.size, **said, overlap=overlap).rows[0].step

    least |= {"hidden": forecast(least, 1.0), "exposed": forecast(least, 0.0)}
    middle |= {"exposed": forecast(middle, 0.0)}
    return {"wall": least, "work": middle, "bytes": size, "overlap": statistics.median(overlaps)}


def as_rank(options: argparse.Namespace) -> None:
    """Be a rank: measure, and let rank 0 print."""
    engine = distributed.init()
    for name in options.nets:
        for mode, precision in KINDS:
            found = measure(name, mode, precision, options.rounds)
            wall, work = ({kind: 1e3 * s for kind, s in found[which].items()} for which in ("wall", "work"))
            row = [
                f"{name}, {mode}, {precision}",
                f"{found['bytes'] / 1e6:.1f} MB",
                str(engine.size),
                *(f"{work[kind]:.1f}" for kind in ("alone", "at once", "exposed", "overlapped")),
                *(f"{wall[kind]:.1f}" for kind in ("one", "alone", "at once", "overlapped")),
                f"{wall['hidden']:.1f} to {wall['exposed']:.1f}",
                f"{engine.size * wall['one'] / min(wall['overlapped'], wall['at once']):.2f}",
                f"{found['overlap']:.0%}",
            ]
            if engine.rank == 0:
                print("| " + " | ".join(row) + " |", flush=True)
    distributed.shutdown()


def scaling(options: argparse.Namespace) -> None:
    """The table of what is measured."""
    print("| | | | processor time, ms | | | | time, ms | | | | | | |")
    print(
        "| net, mode, reduction | gradients | ranks | alone | at once | plan | overlapped | one | alone | at once | "
        "overlapped | plan | speed | overlap |\n|" + "---|" * 14,
        flush=True,
    )
    launcher = mpiexec()
    assert launcher is not None
    command = [sys.executable, "-m", "tests.benchmarks.ranks", "--rank", "--rounds", str(options.rounds)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for ranks in options.ranks:
        whole = [launcher, "-n", str(ranks), *command, "--nets", *options.nets]
        subprocess.run(whole, cwd=ROOT, env=environment, check=True)


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
    parser.add_argument("--rank", action="store_true", help="be a rank")
    chosen = parser.parse_args()
    if chosen.rank:
        as_rank(chosen)
    elif chosen.what == "published":
        published()
    else:
        scaling(chosen)
