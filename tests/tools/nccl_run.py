"""The NCCL engine on real devices, in one command:

    mpiexec -n 2 python -m tests.tools.nccl_run [--elements 16777216]

on a machine with a GPU for each rank and ``pip install '.[test,cuda,nccl,mpi]'``. Every call is compared with the sum in
memory, in the order of ranks; then times of all-reduces are printed. Exit status 1, on all ranks, where a result is wrong.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.runtime import device_tensors
from tests.helpers.ranks import TYPES, drawn

EPSILON = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}


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


def timed(engine: amp.distributed.NcclEngine, elements: int) -> None:
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 24)
    chosen = parser.parse_args()
    started = amp.distributed.init("nccl", timeout=60)
    assert isinstance(started, amp.distributed.NcclEngine)
    check(started)
    print(f"rank {started.rank} of {started.size} on {started.place}: all is as it should be", flush=True)
    timed(started, chosen.elements)
    amp.distributed.shutdown()
