"""Training steps on a GPU beside torch's: BERT base and ResNet-50 in fp32, mixed and pure fp16, as a table.

    python -m tests.benchmarks.gpu --out TABLE.md [--torch-python PATH]
    python -m tests.benchmarks.gpu --place cpu --tiny --steps 1 --blocks 1      # whether all of it runs, without a GPU

Needs ``onnxruntime-gpu[cuda,cudnn]``, and a torch with CUDA in this environment or in that of PATH (without one its rows
say so). Every step is built, lowered for CUDA and forecast before the device is asked for. Then each side runs in a
process of its own, one after another: one block of steps to settle, then ``--blocks`` of ``--steps``. The table goes to
standard output as it grows, and to the file that ``--out`` names after each row.

- Time is wall clock, with feeds on the device; ours fetches the loss of each step, torch waits for the end of a block.
- "graph": ours captured as a CUDA graph, torch's through ``torch.compile``.
- Memory is what the device lacks at the end beyond what it lacked when the process had its context (on the processor:
  the peak of the process).
- The forecast is ``program.cost_estimate(...).forecast(DEVICE)``; DEVICE is found by the name of the card, or ``--device``.
- Costs are from onnxruntime's profile, each kernel waited for (CUDA_LAUNCH_BLOCKING=1).

A process answers ``block STEPS`` with milliseconds a step, ``memory`` with MiB, ``costs`` with a list, each a line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

import amp_transpiler as amp
from amp_transpiler.files import check_outputs, put, write_files
from amp_transpiler.lists.devices import devices
from amp_transpiler.runtime.missing import cuda_missing
from tests.benchmarks.profiled import largest_costs
from tests.helpers.benchmark_programs import MODES, training
from tests.helpers.where import ROOT

SIZES: dict[str, dict[str, Any]] = {
    "bert": {"batch": 32, "length": 128, "width": 768, "layers": 12, "heads": 12, "words": 30522},
    "resnet": {
        "batch": 64,
        "size": 224,
        "stem": 64,
        "stages": [[3, 64], [4, 128], [6, 256], [3, 512]],
        "classes": 1000,
    },
}
TINY: dict[str, dict[str, Any]] = {
    "bert": {"batch": 2, "length": 8, "width": 32, "layers": 1, "heads": 2, "words": 50},
    "resnet": {"batch": 2, "size": 32, "stem": 8, "stages": [[1, 8], [1, 16]], "classes": 10},
}
COLUMNS = ("step", "side", "samples/s", "ms/step", "spread", "memory MiB", "forecast ms", "largest costs")
#: torch's modes; pure fp16 it trains by hand alone.
_TORCH_MODES = ("fp32", "mixed")


@dataclass(frozen=True)
class Asked:
    """What one process runs. ``graph``: a captured step of ours, or a compiled one of torch's."""

    model: str
    mode: str
    graph: bool
    place: str
    sizes: dict[str, Any]
    tf32: bool


class SideFailed(Exception):
    """A process ended, and what it said last."""


class Side(Protocol):
    """One side of the comparison, wherever it runs."""

    def ask(self, what: str) -> Any: ...

    def close(self) -> None: ...


class Ours:
    """A training step of ours."""

    def __init__(self, asked: Asked) -> None:
        self.cuda = asked.place == "cuda"
        self.place = amp.CUDAPlace(0) if self.cuda else amp.CPUPlace()
        self.executor = amp.Executor(self.place, threads=1, tf32=asked.tf32, cuda_graph=asked.graph)
        self.before = used() if self.cuda else 0
        self.main, startup, self.loss, optimizer = training(asked.model, asked.mode, **asked.sizes)
        self.scope = amp.Scope()
        self.executor.run(startup, scope=self.scope)
        if asked.mode != "fp32":
            optimizer.amp_init(self.place, scope=self.scope)
        self.feed = feeds(self.main)
        self.staged = self.executor.stage(self.feed)

    def ask(self, what: str) -> Any:
        """The answer to a request."""
        word, *count = what.split()
        if word == "memory":
            return (used() - self.before) / 2**20 if self.cuda else _peak()
        if word == "costs":
            return largest_costs(self.main, self.loss, self.feed, self.scope, self.place)
        begin = time.perf_counter()
        for _ in range(int(count[0])):
            self.executor.run(self.main, self.staged, [self.loss], self.scope)
        return (time.perf_counter() - begin) * 1e3 / int(count[0])

    def close(self) -> None:
        """Free its sessions."""
        self.executor.close()


def feeds(program: amp.Program) -> dict[str, np.ndarray]:
    """A batch for a program whose sizes are fixed: random images and tokens, labels 0 or 1, nothing masked."""
    rng = np.random.default_rng(0)

    def one(variable: amp.Variable) -> np.ndarray:
        shape = tuple(variable.shape)
        if variable.dtype == "float32":
            return rng.standard_normal(shape).astype(np.float32)
        return np.ones(shape, np.int64) if variable.name == "mask" else rng.integers(0, 2, shape)

    return {variable.name: one(variable) for variable in program.inputs if not variable.persistable}


def used() -> float:
    """Bytes of the device that are taken, by whomever; NaN where no library of CUDA tells."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for name in ("libcudart.so.13", "libcudart.so.12", "cudart64_13.dll", "cudart64_12.dll"):
        try:
            status = ctypes.CDLL(name).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        except OSError:
            continue
        return float("nan") if status else float(total.value - free.value)
    return float("nan")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Process:
    """A side in a process of its own."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        try:
            self.ready = self._answer()["ready"]
        except SideFailed:
            self.close()
            raise

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:  # what a library prints
                continue
        status = self.process.wait()
        self.errors.seek(0)
        said = [line.strip() for line in self.errors if line.strip()]
        raise SideFailed(said[-1] if said else f"the process ended with status {status}")

    def ask(self, what: str) -> Any:
        """One request and its answer. SideFailed where the process ends instead."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()
        except OSError:  # it has ended; its last words tell
            pass
        return self._answer()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def serve(asked: Asked) -> None:
    """Answer requests until standard input ends."""
    side = Ours(asked)
    print(json.dumps({"ready": f"onnxruntime {ort.__version__}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(side.ask(line)), flush=True)


def start(asked: Asked, torch: str | None = None, profiled: bool = False) -> Side:
    """A side in a process: torch's in the interpreter ``torch``, else ours."""
    if torch is not None:
        return Process([torch, str(Path(__file__).with_name("torch_gpu.py")), json.dumps(asdict(asked))], {})
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--serve", json.dumps(asdict(asked))]
    return Process(command, {"CUDA_LAUNCH_BLOCKING": "1"} if profiled else {})


# -- the table ---------------------------------------------------------------------------------------------------------
def named_device(name: str) -> str | None:
    """The key of the device whose forecast a card of this name gets; None where there is none."""
    return next((key for key in devices() if re.search(rf"\b{re.escape(key)}\b", name, re.IGNORECASE)), None)


def card() -> str:
    """The name of the first card, "" where nvidia-smi does not tell."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


Estimates = dict[tuple[str, str], amp.CostEstimate]


def estimates(models: Sequence[str], modes: Sequence[str], sizes: dict[str, dict[str, Any]]) -> Estimates:
    """Build, lower for CUDA and count every step; nothing of it needs a device."""
    found: Estimates = {}
    for model in models:
        for mode in modes:
            main, _, loss, _ = training(model, mode, **sizes[model])
            estimate = found[model, mode] = main.cost_estimate(amp.CUDAPlace(0), fetch_list=[loss])
            print(
                f"built {model} {mode}: {estimate.kernels:,} kernels, {estimate.bytes / 2**30:.2f} GiB moved, "
                f"{estimate.peak / 2**20:,.0f} MiB forecast at the peak",
                flush=True,
            )
    return found


def measured(side: Side, batch: int, steps: int, blocks: int) -> list[str]:
    """The figures of a side, as the table has them: samples a second to memory."""
    side.ask(f"block {max(2, steps // 4)}")  # compiles, allocates, captures
    times = [float(side.ask(f"block {steps}")) for _ in range(blocks)]
    middle = statistics.median(times)
    spread = f"±{100 * (max(times) - min(times)) / 2 / middle:.1f} %"
    return [f"{batch * 1e3 / middle:,.1f}", f"{middle:.2f}", spread, f"{float(side.ask('memory')):,.0f}"]


def rows(
    options: argparse.Namespace, found: Estimates, device: str | None, begin: Callable[..., Side]
) -> Iterator[str]:
    """The rows of the table, as they are measured. What a side cannot do is said in its row."""
    sizes = TINY if options.tiny else SIZES
    cuda = options.place == "cuda"
    for model, mode in found:
        asked = Asked(model, mode, False, options.place, sizes[model], options.tf32)
        costs = _tried(lambda side: [", ".join(side.ask("costs"))], begin, asked, profiled=True)[0]
        for graph in (False, True) if cuda else (False,):
            forecast = "not known"
            if device is not None:
                seconds = found[model, mode].forecast(device, captured=graph, tf32=options.tf32).seconds
                forecast = f"{seconds * 1e3:.2f}"
            yield _row(options, asked, graph, begin, None, [forecast, costs])
        for graph in (False, True) if mode in _TORCH_MODES else ():
            yield _row(options, asked, graph, begin, options.torch_python, ["", ""])


def _row(
    options: argparse.Namespace,
    asked: Asked,
    graph: bool,
    begin: Callable[..., Side],
    torch: str | None,
    rest: list[str],
) -> str:
    asked = Asked(**{**asdict(asked), "graph": graph})
    engine = ("torch, compiled" if graph else "torch, eager") if torch else ("ours, graph" if graph else "ours")
    batch = asked.sizes["batch"]
    figures = _tried(lambda s: measured(s, batch, options.steps, options.blocks), begin, asked, torch=torch)
    figures += [""] * (4 - len(figures))
    return f"| {' | '.join([f'{asked.model} {asked.mode}, {batch}', engine, *figures, *rest])} |"


def _tried(use: Callable[[Side], list[str]], begin: Callable[..., Side], asked: Asked, **more: Any) -> list[str]:
    """What a side gives, or why it gives nothing."""
    try:
        side = begin(asked, **more)
        try:
            return use(side)
        finally:
            side.close()
    except (SideFailed, amp.AmpError, OSError) as error:
        return ["not run: " + " ".join(str(error).split()).replace("|", "/")[:300]]


def main(arguments: Sequence[str] | None = None, begin: Callable[..., Side] = start) -> int:
    """Run everything; 2 where there is no device to run on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="TABLE.md", help="file to write the table to")
    parser.add_argument("--torch-python", metavar="PATH", default=sys.executable, help="an interpreter that has torch")
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--place", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument(
        "--device", choices=list(devices()), help="whose forecast to give (default: by the card's name)"
    )
    parser.add_argument("--tf32", action="store_true", help="fp32 products in TF32, on both sides")
    parser.add_argument("--tiny", action="store_true", help="sizes that take no time")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=7, help="blocks that are measured (default: %(default)s)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(Asked(**json.loads(options.serve)))
        return 0
    if min(options.steps, options.blocks) < 1:
        parser.error("--steps and --blocks are at least 1")
    try:
        check_outputs({"--out": options.out}, {})
    except amp.AmpError as error:
        parser.error(str(error))
    found = estimates(options.models, options.modes, TINY if options.tiny else SIZES)
    missing = cuda_missing(0) if options.place == "cuda" else None
    if missing is not None:
        print(f"GPU benchmark not run: {missing}. Everything before the first call of CUDA was done.")
        return 2
    name = card() if options.place == "cuda" else "CPU"
    device = options.device or named_device(name)
    print(
        f"{name or 'a card that nvidia-smi does not name'}; forecasts for {device or 'no known device: name one, --device'}"
    )
    table = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    print("\n".join(table), flush=True)
    for row in rows(options, found, device, begin):
        table.append(row)
        print(row, flush=True)
        if options.out:
            write_files([(options.out, put(("\n".join(table) + "\n").encode()))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
