"""Memory, volume and time of a step with optimizer state that is dealt out among ranks, beside a step without.

    python -m tests.benchmarks.sharded_state [--ranks 1 2 4] [--width 2048] [--layers 8]

trains a net of square layers in pure float16 with AdamW under ``mpiexec`` and prints a table: what a rank holds of masters
and moments, and the most memory that its process took, beside the forecast; what it takes while it trains, beside the plan;
bytes and seconds of a step. Figures are of the rank that has most.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.nn import functional as F
from tests.tools.ranks_run import mpiexec

_MIB = 2**20
_BATCH, _STEPS = 16, 5


def resident(size: str = "VmRSS") -> int:
    """The memory that this process takes, bytes; with "VmHWM", the most that it took."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(size))


def rank(shard: bool, width: int, layers: int) -> dict[str, Any]:
    """What one rank measures."""
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = 1
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [_BATCH, width], "float32")
        h = x
        for _ in range(layers):
            h = amp.nn.fc(h, width, act="relu")
        loss = F.mean(h * h)
        optimizer = amp.optimizer.AdamW(1e-4, multi_precision=True)
        decorated = amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False, init_loss_scaling=1024.0)
        if shard:
            distributed.shard_optimizer(decorated)
        decorated.minimize(loss, startup)
    before = resident()
    scope, exe = amp.Scope(), amp.Executor(amp.CPUPlace(), threads=1)
    exe.run(startup, scope=scope)
    started = resident("VmHWM") - before
    decorated.amp_init(amp.CPUPlace(), scope=scope)
    data, seconds = np.random.default_rng(distributed.rank()).normal(size=(_BATCH, width)).astype(np.float32), []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        exe.run(main, {"x": data}, [loss], scope)
        seconds.append(time.perf_counter() - begun)
    estimate = main.memory_estimate(fetch_list=[loss], rank=distributed.rank())
    held = sum(v.tensor_size_in_bytes() for name, v in scope.ort_values.items() if "fp32_master" in name)
    several = distributed.world_size() > 1
    plan = distributed.plan(main, distributed.world_size(), bandwidth=10.0, step_time=1.0, fetch_list=[loss])
    return {
        "held": held,
        "forecast": estimate.master_weights + estimate.moments,
        "planned": plan[distributed.world_size()].memory,
        "startup": started,
        "peak": resident("VmHWM") - before,
        "training": resident() - before,
        "sent": distributed.step_report().sent if several else 0,
        "seconds": min(seconds[1:]),
    }


def row(ranks: int, shard: bool, width: int, layers: int) -> list[str]:
    """A line of the table."""
    launcher = mpiexec()
    assert launcher is not None, "mpi4py or an mpiexec is missing: pip install mpi4py mpich"
    options = ["--rank", "--width", str(width), "--layers", str(layers), *["--shard"] * shard]
    command = [launcher, "-n", str(ranks), sys.executable, "-m", "tests.benchmarks.sharded_state", *options]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(said.splitlines()[-1])
    most = {name: max(each[name] for each in found) for name in found[0]}
    sizes = ("held", "forecast", "startup", "peak", "training", "planned", "sent")
    return [
        str(ranks),
        "dealt out" if shard else "whole",
        *(f"{most[name] / _MIB:.0f}" for name in sizes),
        f"{most['seconds']:.2f}",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", action="store_true", help="be a rank")
    parser.add_argument("--shard", action="store_true")
    chosen = parser.parse_args()
    if chosen.rank:
        engine = distributed.init(timeout=300)
        measured = engine.all_gather_object(rank(chosen.shard, chosen.width, chosen.layers))
        if engine.rank == 0:
            print(json.dumps(measured), flush=True)
    else:
        head = [
            "ranks",
            "state",
            "held",
            "forecast",
            "startup",
            "peak",
            "training",
            "planned",
            "sent a step",
            "s a step",
        ]
        print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
        for ranks in chosen.ranks:
            for shard in (False, True) if ranks > 1 else (False,):
                print("| " + " | ".join(row(ranks, shard, chosen.width, chosen.layers)) + " |", flush=True)
