"""Updates from several threads: programs whose state after n steps is exactly known, and a loop that takes the steps.

As a script, ``python -m tests.tools.threads_run [UPDATES] [THREADS]`` takes so many steps (default 10,000 from 8 threads)
through one cold executor, and through one executor for each thread on one scope, and prints what was lost.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

TIMEOUT = 120.0  # seconds; a thread that does not end until then waits for ever


@dataclass
class Counting:
    """A training program; each of its steps, of ``runs`` runs, takes exactly 1 from every element of ``w``."""

    main: amp.Program
    startup: amp.Program
    loss: object
    optimizer: object
    runs: int = 1

    def started(self) -> amp.Scope:
        """A scope in which ``w`` is 0."""
        scope = amp.Scope()
        amp.Executor(threads=1).run(self.startup, scope=scope)
        if hasattr(self.optimizer, "amp_init"):
            self.optimizer.amp_init(amp.CPUPlace(), scope)
        return scope


def counting(mode: str = "fp32", width: int = 4, runs: int = 1, rule: Callable[..., object] | None = None) -> Counting:
    """The mean of x w, fed x = 1: its gradient is exactly 1 whatever the batch (a power of two); SGD(1.0) or ``rule``."""
    main, startup = amp.Program("counting"), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard(), amp.fp16_guard():
        x = amp.data("x", ["N", width], "float32")
        w = amp.create_parameter([width, 1], "float32", name="w", initializer=amp.nn.initializer.Constant(0.0))
        loss = F.mean(x @ w)
        optimizer = (rule or amp.optimizer.SGD)(1.0, multi_precision=mode == "pure-fp16")
        if mode != "fp32" or runs > 1:
            optimizer = amp.decorate(
                optimizer,
                use_pure_fp16=mode == "pure-fp16",
                init_loss_scaling=16.0,
                incr_every_n_steps=1500,
                decr_ratio=0.5,
                accumulate_steps=runs,
            )
        optimizer.minimize(loss, startup)
    return Counting(main, startup, loss, optimizer, runs)


def ones(batch: int, width: int = 4) -> dict[str, np.ndarray]:
    """The feed of ``counting``."""
    return {"x": np.ones((batch, width), np.float32)}


def together(tasks: Sequence[Callable[[], None]], timeout: float = TIMEOUT) -> None:
    """Run every task in a thread of its own, begun at once; raises what one raised, and where one does not end."""
    start, errors = threading.Barrier(len(tasks)), list[BaseException]()

    def run(task: Callable[[], None]) -> None:
        try:
            start.wait(timeout)
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"{sum(t.is_alive() for t in threads)} threads wait"


def train(
    net: Counting, executors: Sequence[object], scope: amp.Scope, updates: int, batches: Sequence[int] = (4,)
) -> None:
    """``updates`` steps of ``net``, shared out among one thread for each of ``executors``."""
    share = updates * net.runs // len(executors)

    def task(number: int) -> Callable[[], None]:
        def run() -> None:
            feeds = [ones(batch, net.main.var("w").shape[0]) for batch in batches]
            for step in range(share):
                executors[number].run(net.main, feeds[(step + number) % len(feeds)], [net.loss], scope)

        return run

    together([task(number) for number in range(len(executors))])


def main(updates: int = 10_000, threads: int = 8) -> None:
    """Print what is lost of so many updates."""
    for mode in ("fp32", "pure-fp16"):
        for what in ("one cold executor", f"{threads} executors"):
            net = counting(mode)
            scope = net.started()
            one = amp.Executor(threads=1)
            executors = [one if what.startswith("one") else amp.Executor(threads=1) for _ in range(threads)]
            start = time.monotonic()
            train(net, executors, scope, updates)
            seconds = time.monotonic() - start
            w = scope.find_var("w_fp32_master_0" if mode == "pure-fp16" else "w")
            lost = float(updates + w.min())
            print(f"{mode}, {threads} threads, {what}, one scope: {updates} updates in {seconds:.1f} s, {lost:g} lost")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
