"""Training step time beside torch eager, and the time to build a BERT-12 training program.

    python -m tests.benchmarks.run --torch-python PATH   # PATH: a python that has torch

Both sides run in turn, block by block, in one run, fp32, one thread, batch 64, SGD; what is compared is
process time, and the figure is the median over blocks of the ratio. Without a torch the ratio is left out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers import programs

BAR = {"mlp": 0.90, "cnn": 1.00}


def cnn_layers() -> tuple[object, object, object]:
    """The two-convolution network of demo/mnist.py."""
    x = amp.data("image", [None, 1, 28, 28], "float32")
    label = amp.data("label", [None, 1], "int64")
    h = F.max_pool2d(amp.nn.conv2d(x, 32, 3, padding=1, act="relu"), 2, 2)
    h = F.max_pool2d(amp.nn.conv2d(h, 64, 3, padding=1, act="relu"), 2, 2)
    logits = amp.nn.fc(h, 10)
    return logits, F.cross_entropy(logits, label), x


class Ours:
    """A training step of ours."""

    def __init__(self, name: str, mode: str = "fp32") -> None:
        programs.LAYERS["cnn"] = cnn_layers
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            _, self.loss, _ = programs.LAYERS[name]()
            optimizer = amp.optimizer.SGD(0.01, multi_precision=mode == "pure-fp16")
            if mode != "fp32":
                optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure-fp16", use_fp16_guard=False)
            optimizer.minimize(self.loss, startup)
        self.main, self.scope = main, amp.Scope()
        self.executor = amp.Executor(amp.CPUPlace(), threads=1)
        self.executor.run(startup, scope=self.scope)
        if mode != "fp32":
            optimizer.amp_init(amp.CPUPlace(), scope=self.scope)
        rng = np.random.default_rng(0)
        shape = (64, 784) if name == "mlp" else (64, 1, 28, 28)
        self.feed = {"image": rng.standard_normal(shape).astype(np.float32), "label": rng.integers(0, 10, (64, 1))}

    def block(self, steps: int) -> float:
        """Process time per step in ms."""
        start = time.process_time()
        for _ in range(steps):
            self.executor.run(self.main, feed=self.feed, fetch_list=[self.loss], scope=self.scope)
        return (time.process_time() - start) * 1e3 / steps


def compare(name: str, worker: subprocess.Popen[str] | None, blocks: int) -> None:
    """Print the medians of one network and the ratio."""
    steps = 30 if name == "mlp" else 6
    nets = {mode: Ours(name, mode) for mode in ("fp32", "pure-fp16")}
    for net in nets.values():
        net.block(3)
    times: dict[str, list[float]] = {mode: [] for mode in nets}
    torch_times: list[float] = []
    if worker is not None:
        _ask(worker, name, 3)
    for _ in range(blocks):
        for mode, net in nets.items():
            times[mode].append(net.block(steps))
        if worker is not None:
            torch_times.append(_ask(worker, name, steps))
    ours = statistics.median(times["fp32"])
    faithful = statistics.median(f / t for f, t in zip(times["pure-fp16"], times["fp32"], strict=True))
    line = f"{name}: fp32 {ours:.2f} ms/step; pure fp16 (CPU, bit-faithful) x{faithful:.2f}"
    if torch_times:
        ratio = statistics.median(a / b for a, b in zip(times["fp32"], torch_times, strict=True))
        line += f"; torch eager {statistics.median(torch_times):.2f} ms; ratio {ratio:.2f} (goal <= {BAR[name]:.2f})"
    print(line, flush=True)


def _ask(worker: subprocess.Popen[str], name: str, steps: int) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{name} {steps}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def bert12() -> None:
    """Print how long building, rewriting and lowering a 12-layer BERT training program takes."""
    for mode in ("fp32", "amp", "pure-fp16"):
        start = time.perf_counter()
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            _, loss, _ = programs.transformer_layers(layers=12, hidden=768, heads=12, seq=128, vocab=30522)
            optimizer = amp.optimizer.Adam(1e-4, multi_precision=mode == "pure-fp16")
            if mode != "fp32":
                optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure-fp16")
            optimizer.minimize(loss, startup)
        built = time.perf_counter()
        lowered = main.lower(amp.CPUPlace(), fetch_list=[loss])
        done = time.perf_counter()
        print(
            f"BERT-12 {mode}: build {built - start:.2f} s, lower {done - built:.2f} s, total {done - start:.2f} s "
            f"(goal <= 3), {len(main.operators)} operators -> {len(lowered.model.graph.node)} nodes",
            flush=True,
        )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="a python interpreter that has torch")
    parser.add_argument("--blocks", type=int, default=9, help="blocks of steps per side")
    options = parser.parse_args()
    worker = None
    if options.torch_python:
        script = Path(__file__).with_name("torch_worker.py")
        worker = subprocess.Popen(
            [options.torch_python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        print(worker.stdout.readline().strip())
    for name in ("mlp", "cnn"):
        compare(name, worker, options.blocks)
    if worker is not None and worker.stdin is not None:
        worker.stdin.close()
        worker.wait()
    bert12()


if __name__ == "__main__":
    main()
