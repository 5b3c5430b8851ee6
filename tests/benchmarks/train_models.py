"""Training steps of exported models beside torch, eager and compiled: time, peak memory, and where the time goes.

    python -m tests.benchmarks.train_models --torch-python PATH   # PATH: a python with torch, timm and transformers

All sides train the same weights on the same batch with Adam (compiled: fused), one thread, in processes of their own that
take turns, block by block; figures are medians over blocks, of process time. Peak memory is that of the whole process,
interpreters, libraries and our import included. ``--place cuda``: wall-clock time of
blocks of steps, each of which fetches the loss; torch's memory is then that of the device, ours still the process's.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.benchmarks.profiled import largest_costs

#: Steps in a block.
STEPS = {"mlp": 40, "bert": 1, "short_bert": 3, "resnet50": 1, "vit": 1, "lstm": 4, "mixture": 4}


def serve(folder: str, name: str, mode: str, place_name: str) -> None:
    """Our side; the protocol is that of torch_models.py, and "costs" gives the three largest ones."""
    start = time.perf_counter()
    place = amp.CUDAPlace(0) if place_name == "cuda" else amp.CPUPlace()
    clock = time.perf_counter if place_name == "cuda" else time.process_time
    program = amp.Program.from_onnx(f"{folder}/{name}.onnx")
    amp.prepare_training(program, restore=False)
    feed = dict(np.load(f"{folder}/{name}.npz"))
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        out = program.outputs[0]
        loss = F.mse_loss(out, amp.data("target", out.shape, "float32"))
        optimizer: Any = amp.optimizer.Adam(1e-5, multi_precision=mode != "fp32")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(place, threads=1)
    executor.run(program.startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(place, scope=scope)
    built = time.perf_counter() - start
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "peak":
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)
        elif line.strip() == "costs":
            print(
                json.dumps({"built": built, "costs": largest_costs(program, loss, feed, scope, amp.CPUPlace())}),
                flush=True,
            )
        else:
            begin = clock()
            for _ in range(int(line)):
                executor.run(program, feed=feed, fetch_list=[loss], scope=scope)
            print((clock() - begin) * 1e3 / int(line), flush=True)


class Worker:
    """A side of the comparison, in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while (line := self._line()) != "ready":
            print(line)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker stopped")
        return line.strip()

    def ask(self, what: object) -> str:
        """One request and its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._line()


def main() -> None:
    """Compare every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(STEPS))
    parser.add_argument("--torch", nargs="*", default=["eager", "compiled"])
    parser.add_argument("--modes", nargs="+", default=["fp32", "pure-fp16"])
    parser.add_argument("--place", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    if "--serve" in sys.argv:
        serve(*sys.argv[sys.argv.index("--serve") + 1 :])
        return
    options = parser.parse_args()
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            theirs = [options.torch_python, str(Path(__file__).with_name("torch_models.py")), folder, name]
            subprocess.run([*theirs, options.place, "export"], check=True, stdout=subprocess.DEVNULL)
            sides = {form: Worker([*theirs, options.place, form]) for form in options.torch}
            sides |= {
                mode: Worker(
                    [
                        sys.executable,
                        "-m",
                        "tests.benchmarks.train_models",
                        "--serve",
                        folder,
                        name,
                        mode,
                        options.place,
                    ]
                )
                for mode in options.modes
            }
            compare(name, sides, options.blocks)
            for side in sides.values():
                side.process.kill()


def compare(name: str, sides: dict[str, Worker], blocks: int) -> None:
    """Print the figures of one model."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(blocks + 1):
        for side, worker in sides.items():
            spent = float(worker.ask(STEPS[name]))
            if block:  # the first compiles
                times[side].append(spent)
    peaks = {side: float(worker.ask("peak")) for side, worker in sides.items()}
    facts = json.loads(sides["fp32"].ask("costs"))
    middle = {side: statistics.median(found) for side, found in times.items()}

    def ratio(side: str, other: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(times[side], times[other], strict=True)):.2f}"

    print(f"{name}: import to startup {facts['built']:.1f} s; costs of fp32: {', '.join(facts['costs'])}")
    for side in sides:
        others = ", ".join(f"{ratio(side, other)} of {other}" for other in sides if other != side)
        print(f"  {side}: {middle[side]:.1f} ms a step ({others}); peak {peaks[side]:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
