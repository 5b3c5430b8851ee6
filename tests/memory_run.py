"""Run in a process of its own: how much the resident memory of one training step grows over that of its state.

Prints forecast and measurement in MiB, state and feeds not counted. The arguments are a program of PROGRAMS, a mode, and a pattern to recompute.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

Feeds = dict[str, np.ndarray]


def mlp() -> tuple[object, Feeds]:
    """Six layers whose activations are much larger than their weights."""
    x, label = amp.data("x", ["N", 256], "float32"), amp.data("label", ["N", 1], "int64")
    for number in range(6):
        with amp.name_scope(f"block_{number // 2}"):
            x = F.gelu(amp.nn.fc(x, 256))
    loss = F.cross_entropy(amp.nn.fc(x, 10), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.standard_normal((8192, 256)).astype(np.float32), "label": rng.integers(0, 10, (8192, 1))}


def cnn() -> tuple[object, Feeds]:
    """Convolutions with batch normalisation."""
    x, label = amp.data("x", ["N", 3, 32, 32], "float32"), amp.data("label", ["N", 1], "int64")
    for number in range(4):
        with amp.name_scope(f"block_{number}"):
            x = amp.nn.batch_norm(amp.nn.conv2d(x, 32, 3, padding=1), act="relu")
    loss = F.cross_entropy(amp.nn.fc(F.global_avg_pool2d(x), 10), label)
    rng = np.random.default_rng(0)
    return loss, {"x": rng.standard_normal((64, 3, 32, 32)).astype(np.float32), "label": rng.integers(0, 10, (64, 1))}


PROGRAMS: dict[str, Callable[[], tuple[object, Feeds]]] = {"mlp": mlp, "cnn": cnn}


def status(key: str) -> float:
    """A size of this process in MiB, as Linux reports it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def main(name: str, mode: str, pattern: str = "") -> None:
    """Build, forecast, run one step."""
    main_, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main_, startup), amp.unique_name.guard(), amp.fp16_guard():
        loss, feed = PROGRAMS[name]()
        if pattern:
            amp.recompute(main_, [pattern])
        optimizer = amp.optimizer.SGD(0.01, multi_precision=mode != "fp32")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=True)
        optimizer.minimize(loss)
    estimate = main_.memory_estimate({"x": feed["x"].shape}, fetch_list=[loss])
    held = estimate.parameters + estimate.master_weights + estimate.moments + estimate.other_state + estimate.feeds
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    for value in scope._values.values():  # a page of zeros that was never written does not count as resident yet
        copy = value.numpy().copy()
        ctypes.memmove(value.data_ptr(), copy.ctypes.data, copy.nbytes)
    small = {key: array[:1] for key, array in feed.items()}
    executor.run(main_, feed=small, fetch_list=[loss], scope=scope)  # libraries are read in
    before = status("VmRSS")
    executor.run(main_, feed=feed, fetch_list=[loss], scope=scope)
    print((estimate.peak - held) / 2**20, status("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
