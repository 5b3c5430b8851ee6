"""NCCL on real devices, in one command:

    mpiexec -n 2 python -m tests.tools.nccl_run

on a machine with a GPU for each rank and ``pip install '.[test,cuda,nccl,mpi]'``. Every call of the engine is compared
with the sum in memory, in the order of ranks. Then an MLP, a CNN, and one with batch normalisation over all ranks are
trained in fp32, mixed and pure 16 bit, with one step that overflows on the last rank, and their losses are compared with
those of the same ranks on CPU. Last come times: of all-reduces, and of the steps of a wide MLP, with sums that travel
beside the backward pass and with sums behind it. Exit status 1, on all ranks, where a result is wrong. ``--only``: one of
these three.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.passes.lowering import rounds
from amp_transpiler.runtime import device_tensors
from tests.helpers.rank_training import MODES, NETS, Trainer
from tests.helpers.ranks import TYPES, drawn

EPSILON = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}
#: Of losses on CUDA, relative to those on CPU, where the same is rounded at the same points: kernels add in other orders.
CLOSE = {"fp32": 1e-4, "mixed": 2e-2, "pure": 4e-2}
STEPS, BAD = 8, 3


def check(engine: amp.distributed.NcclEngine) -> None:
    """Every call, against the engine in memory."""
    place, ranks = engine.place, range(engine.size)

    def value(array: np.ndarray) -> Any:
        return device_tensors.from_array(array, place)

    for dtype, epsilon in EPSILON.items():
        for op in ("sum", "mean", "max"):
            mine = np.clip(drawn(engine.rank, 10_001, "float32"), -9e3, 9e3).astype(TYPES[dtype])
            exact = engine.beside.all_reduce(mine.astype(np.float64), op)
            found = device_tensors.to_array(engine.all_reduce(value(mine), op)).astype(np.float64)
            found *= engine.remaining_factor(dtype, op)
            np.testing.assert_allclose(found, exact, epsilon, atol=np.abs(exact).max() * epsilon)
    most = device_tensors.to_array(engine.all_reduce(value(np.full(1000, 65504, np.float16)), "mean"))
    np.testing.assert_allclose(most.astype(np.float64) * engine.remaining_factor("float16", "mean"), 65504, 1e-3)
    for sizes in ([7] * engine.size, [rank + 1 for rank in ranks]):
        whole = value(np.arange(sum(sizes), dtype=np.float32))
        engine.all_gather(engine.reduce_scatter(whole, sizes), sizes, whole)
        np.testing.assert_array_equal(device_tensors.to_array(whole), np.arange(sum(sizes)) * engine.size)
    received = engine.all_to_all([value(np.full((engine.rank + j, 2), 10 * engine.rank + j)) for j in ranks])
    found = [device_tensors.to_array(each).tolist() for each in received]
    assert found == [[[10 * j + engine.rank] * 2] * (j + engine.rank) for j in ranks], found
    sent = engine.broadcast(value(np.full(5, engine.rank)), engine.size - 1)
    assert device_tensors.to_array(sent).tolist() == [engine.size - 1] * 5
    each = [[value(np.full(3, 10 * engine.rank + root, np.float16))] * 2 for root in ranks]
    engine.broadcast_each(each)
    assert [device_tensors.to_array(first).tolist() for first, _ in each] == [[11 * root] * 3 for root in ranks]


def train(engine: amp.distributed.NcclEngine) -> None:
    """The nets on the devices and on CPU: losses, loss scales, the step that is skipped, equal state on all ranks."""
    for net in NETS:
        for mode in MODES:
            bad = (BAD, engine.size - 1)
            runs = []
            for place in (engine.place, amp.CPUPlace()):
                trainer = Trainer(net, mode, place)
                runs.append(trainer.train(range(STEPS), bad))
                amp.distributed.check_equal(trainer.main, trainer.scope)
            found, expected = runs
            if engine.rank == 0:
                pairs = " ".join(f"{a:.5f}/{b:.5f}" for a, b in zip(found.losses, expected.losses, strict=True))
                print(f"{net} {mode}: losses on CUDA/CPU {pairs}; skipped {found.skipped}", flush=True)
            np.testing.assert_allclose(found.losses, expected.losses, CLOSE[mode])
            assert found.scales == expected.scales, (found.scales, expected.scales)
            assert found.skipped == expected.skipped == [BAD] * (mode != "fp32"), found.skipped


def timed_calls(engine: amp.distributed.NcclEngine, elements: int) -> None:
    """Milliseconds of an all-reduce, the least of several."""
    for dtype in EPSILON:
        array = device_tensors.from_array(np.zeros(elements, TYPES[dtype]), engine.place)
        times = []
        for _ in range(10):
            engine.barrier()
            started = time.perf_counter()
            engine.all_reduce(array)
            times.append(time.perf_counter() - started)
        if engine.rank == 0:
            print(f"{dtype}: {elements} elements in {min(times) * 1e3:.2f} ms", flush=True)


def timed_steps(engine: amp.distributed.NcclEngine, width: int, batch: int, steps: int) -> None:
    """Milliseconds of a step, the median: gradients in several buckets beside the backward pass, or in one behind it."""
    for mode in MODES:
        trainers = []
        for most in (rounds.MOST, 1):
            rounds.MOST, kept = most, rounds.MOST
            trainers.append(Trainer("mlp", mode, engine.place, width))
            trainers[-1].train(range(2), batch=batch)  # sessions are made
            rounds.MOST = kept
        seconds: list[list[float]] = [[], []]
        for step in range(steps):  # in turns: what else the machine does is the same for both
            for times, trainer in zip(seconds, trainers, strict=True):
                engine.barrier()
                times += trainer.train(range(step, step + 1), batch=batch).seconds
        if engine.rank == 0:
            beside, behind = (1e3 * statistics.median(times) for times in seconds)
            print(
                f"mlp of {width}, {mode}, {batch} examples: {beside:.2f} ms a step with sums beside the backward pass, "
                f"{behind:.2f} behind it ({beside / behind:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 24, help="of the all-reduces that are timed")
    parser.add_argument("--width", type=int, default=4096, help="of the MLP that is timed")
    parser.add_argument("--batch", type=int, default=4096, help="its examples, on all ranks together")
    parser.add_argument("--steps", type=int, default=20, help="its steps")
    parser.add_argument("--only", choices=("calls", "training", "times"), help="this part alone")
    chosen = parser.parse_args()
    started = amp.distributed.init("nccl", timeout=60)
    assert isinstance(started, amp.distributed.NcclEngine)
    if chosen.only in (None, "calls"):
        check(started)
        print(f"rank {started.rank} of {started.size} on {started.place}: calls are as they should be", flush=True)
    if chosen.only in (None, "training"):
        train(started)
    if chosen.only in (None, "times"):
        timed_calls(started, chosen.elements)
        timed_steps(started, chosen.width, chosen.batch, chosen.steps)
    amp.distributed.shutdown()
