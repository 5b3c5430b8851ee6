"""Processor time to the first step on CPU: first_step.py [--layers 50 100 200] [--lengths 16].

A pre-norm residual MLP of width 32 in pure fp16 with Adam, by depth: building, the startup program, the first run (which
lowers the program and makes its sessions), a later run. Then what each further feed shape costs, and all of them
beyond their steps.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F


def residual(layers: int, width: int = 32) -> tuple[Any, Any, Any, Any]:
    """The program, its startup program, the loss and the optimizer."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        hidden, label = amp.data("x", [None, width], "float32"), amp.data("y", [None, 1], "int64")
        with amp.fp16_guard():
            for _ in range(layers):
                inner = amp.nn.fc(amp.nn.layer_norm(hidden), width, act="relu")
                hidden = hidden + amp.nn.fc(inner, width)
            logits = amp.nn.fc(hidden, 10)
        loss = F.cross_entropy(logits, label)
        optimizer = amp.decorate(amp.optimizer.Adam(1e-3, multi_precision=True), use_pure_fp16=True)
        optimizer.minimize(loss, startup)
    return main, startup, loss, optimizer


def feeds(batch: int) -> dict[str, np.ndarray]:
    """Rows for :func:`residual`."""
    return {"x": np.ones((batch, 32), np.float32), "y": np.zeros((batch, 1), np.int64)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--lengths", type=int, default=16)
    options = parser.parse_args()
    amp.Executor(threads=1).run(residual(1)[1], scope=amp.Scope())  # what the first program of a process costs besides
    for layers in options.layers:
        times = [time.process_time()]
        program, startup, loss, optimizer = residual(layers)
        times.append(time.process_time())
        exe, scope = amp.Executor(threads=1), amp.Scope()
        exe.run(startup, scope=scope)
        optimizer.amp_init(exe.place, scope)
        times.append(time.process_time())
        for _ in range(3):
            exe.run(program, feeds(8), [loss], scope)
            times.append(time.process_time())
        build, start, first, _, later = np.diff(times)
        print(
            f"{layers} layers: build {build:.2f} s, startup {start:.2f}, first step {first:.2f} "
            f"({first / layers * 1000:.1f} ms a layer), a later one {later:.3f}"
        )
    program, startup, loss, optimizer = residual(8)
    gc.collect()  # the deep programs take seconds to be found
    exe, scope = amp.Executor(threads=1), amp.Scope()
    exe.run(startup, scope=scope)
    optimizer.amp_init(exe.place, scope)
    exe.run(program, feeds(1), [loss], scope)
    times = [time.process_time()]
    for batches in (range(2, options.lengths + 1), [options.lengths] * (options.lengths - 1)):
        for batch in batches:
            exe.run(program, feeds(batch), [loss], scope)
            times.append(time.process_time())
    spent = np.diff(times)
    more, same = spent[: options.lengths - 1], spent[options.lengths - 1 :]
    print(
        f"8 layers: {np.mean(more):.3f} s for each further feed shape (the second {more[0]:.3f}, the last {more[-1]:.3f}); "
        f"{options.lengths} lengths take {sum(more) - sum(same):.2f} s more than as many steps at one"
    )


if __name__ == "__main__":
    main()
