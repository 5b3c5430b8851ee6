"""What looking at training steps costs: a step with reports, and watched, as ratios to the plain step of the same run.

    python -m tests.benchmarks.monitor_cost [--steps 150] [--threads 1]

Every variant has a program, session and scope of its own; they take turns, step by step and in turning order, and the
ratio is the median over the steps of a variant's time to the plain one's beside it. "off" is a program that has been
given the operators of a report and is run without one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import amp_transpiler as amp
from tests.helpers import programs

VARIANTS = ("plain", "plain again", "off", "watched", "report, not read", "report, one line")


def step_of(variant: str, name: str, mode: str, threads: int) -> Callable[[], None]:
    """One step of a variant, as a function."""
    net = programs.build(name, mode)
    exe, scope = amp.Executor(amp.CPUPlace(), threads=threads), amp.Scope()
    exe.run(net.startup, scope=scope)
    net.optimizer.amp_init(amp.CPUPlace(), scope)
    fetches = [net.loss]
    if variant == "watched":
        exe = amp.watch(exe, on_bad="raise")
    elif "report" in variant or variant == "off":
        reports = amp.StepReports(net.main)
        fetches += [] if variant == "off" else [reports]

    def step() -> None:
        results = exe.run(net.main, net.feeds, fetches, scope)
        if variant == "report, one line":
            str(results[1])

    return step


def measure(name: str, mode: str, options: argparse.Namespace) -> None:
    made = {variant: step_of(variant, name, mode, options.threads) for variant in VARIANTS}
    for step in made.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    order = list(VARIANTS)
    for _ in range(options.steps):
        for variant in order:
            start = time.perf_counter()
            made[variant]()
            times[variant].append(time.perf_counter() - start)
        order.append(order.pop(0))
    plain = np.array(times["plain"])
    ratios = {variant: float(np.median(np.array(times[variant]) / plain)) for variant in VARIANTS[1:]}
    line = ", ".join(f"{variant} {ratio:.3f}" for variant, ratio in ratios.items())
    print(f"{name} {mode}: step {1000 * statistics.median(times['plain']):.2f} ms; {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    programs.LAYERS["larger transformer"] = lambda: programs.transformer_layers(layers=2, hidden=128, heads=4)
    for name in ("mlp", "transformer", "larger transformer", "resnet", "use_case"):
        for mode in ("amp", "pure-fp16"):
            measure(name, mode, options)


if __name__ == "__main__":
    main()
