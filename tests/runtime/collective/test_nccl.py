"""The NCCL engine against a stand-in with nccl4py's signatures: order of calls, buffers, scaling, aborts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, DistributedError, MissingPackageError
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective import nccl
from amp_transpiler.runtime.collective.nccl import NcclEngine
from tests.helpers.fake_nccl import Fake, memory, on_devices
from tests.helpers.ranks import TYPES, drawn

PLACE = amp.CPUPlace()


def on(ranks: int, function: Callable[[NcclEngine, Fake], Any], timeout: float = 20) -> list[Any]:
    return on_devices(ranks, function, timeout, PLACE)


def value(array: np.ndarray) -> Any:
    return device_tensors.from_array(array, PLACE)


def test_start_hands_out_the_id_of_rank_0_and_the_end_destroys() -> None:
    def run(engine: NcclEngine, fake: Fake) -> list[Any]:
        engine.barrier()
        engine.close()
        engine.close()
        return fake.log

    unique = b"unique" * 3
    for rank, log in enumerate(on(2, run)):
        start = [("get_unique_id",)] if rank == 0 else []
        assert log == [*start, ("from_bytes", unique), ("init", 2, rank, unique), ("destroy",)]


def test_the_calls_their_buffers_and_their_order() -> None:
    sizes = [3, 0, 5]

    def run(engine: NcclEngine, fake: Fake) -> list[Any]:
        fake.log.clear()
        a = fake.watch("a", value(np.ones(6, np.float16)))
        b = fake.watch("b", value(np.ones(8, np.float32)))
        engine.all_reduce(a)
        engine.all_reduce(a, "mean")
        engine.all_reduce(b)
        engine.reduce_scatter(a, [2, 2, 2], "max")
        own = engine.reduce_scatter(b, sizes)
        assert memory(own)[0] == 9.0 or engine.rank == 1
        engine.broadcast(a, 2)
        engine.all_gather(engine.reduce_scatter(a, [2, 2, 2], "max"), [2, 2, 2], a)
        return fake.log

    scaled = (0.25, "FLOAT16")
    for rank, log in enumerate(on(3, run)):
        own = f"a[{2 * rank}:+2]"
        assert log == [
            ("create_pre_mul_sum", *scaled),
            ("allreduce", "a[0:+6]", "a[0:+6]", scaled, 77),
            ("allreduce", "a[0:+6]", "a[0:+6]", scaled, 77),
            ("allreduce", "b[0:+8]", "b[0:+8]", "SUM", 77),
            ("reduce_scatter", "a[0:+6]", own, "MAX", 77),
            ("group",),
            ("reduce", "b[0:+3]", "b[0:+3]", "SUM", 0, 77),
            ("reduce", "b[3:+5]", "b[3:+5]", "SUM", 2, 77),
            ("broadcast", "a[0:+6]", "a[0:+6]", 2, 77),
            ("reduce_scatter", "a[0:+6]", own, "MAX", 77),
            ("allgather", own, "a[0:+6]", 77),
        ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_what_comes_times_the_remaining_factor_is_the_result(ranks: int, dtype: str, op: str) -> None:
    """At the largest finite values too: fp16's own sum of two is infinite."""
    most = 65504.0 if dtype == "float16" else 1e30

    def run(engine: NcclEngine, fake: Fake) -> tuple[np.ndarray, np.ndarray]:
        large = value(np.full(4, most).astype(TYPES[dtype]))
        other = value(np.clip(drawn(engine.rank, 50, "float32"), -9e3, 9e3).astype(TYPES[dtype]))
        factor = engine.remaining_factor(dtype, op)
        return tuple(memory(engine.all_reduce(each, op)).astype(np.float64) * factor for each in (large, other))

    parts = [np.clip(drawn(rank, 50, "float32"), -9e3, 9e3).astype(TYPES[dtype]).astype(float) for rank in range(ranks)]
    expected = np.sum(parts, axis=0) / (ranks if op == "mean" else 1)
    epsilon = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}[dtype]
    for large, other in on(ranks, run):
        np.testing.assert_allclose(
            large, np.full(4, float(TYPES[dtype].type(most))) * (ranks if op == "sum" else 1), epsilon
        )
        np.testing.assert_allclose(other, expected, epsilon, atol=np.abs(parts).max() * epsilon)


def test_remaining_factors() -> None:
    def run(engine: NcclEngine, fake: Fake) -> list[float]:
        kinds = [("float16", "sum"), ("float16", "mean"), ("float32", "sum"), ("float32", "mean"), ("bfloat16", "max")]
        return [engine.remaining_factor(*kind) for kind in kinds]

    assert on(1, run) == [[1.0] * 5]
    assert on(2, run) == [[2.0, 1.0, 1.0, 1.0, 1.0]] * 2
    assert on(3, run) == [[4.0, 4 / 3, 1.0, 1.0, 1.0]] * 3


def test_a_factor_that_is_left_is_not_lost_in_silence() -> None:
    def run(engine: NcclEngine, fake: Fake) -> float:
        with amp.distributed.use_engine(engine):
            whole = value(np.ones(4, np.float16))
            with pytest.raises(amp.errors.OrderError, match="leaves a factor in sums of float16 over 2 ranks"):
                amp.distributed.all_reduce(whole, "sum")
            return float(memory(amp.distributed.all_reduce(whole, "mean"))[0])  # of two ranks nothing is left

    assert on(2, run) == [1.0, 1.0]


def test_parts_of_any_length_and_numpy_beside() -> None:
    def run(engine: NcclEngine, fake: Fake) -> tuple[list[list[int]], float, list[int], Any]:
        parts = [value(np.full((engine.rank + j, 2), 10 * engine.rank + j, np.int64)) for j in range(engine.size)]
        found = [memory(each).tolist() for each in engine.all_to_all(parts)]
        numpy = float(engine.all_reduce(np.ones(3, np.float32))[0])
        return found, numpy, engine.all_to_all([np.array([engine.rank])] * engine.size)[-1].tolist(), fake.log[-1]

    for rank, (found, numpy, last, log) in enumerate(on(3, run)):
        assert found == [[10 * j + rank] * (2 * (j + rank)) for j in range(3)]
        assert numpy == 3.0 and last == [2]
        assert log[0] in ("send", "recv"), "numpy's arrays do not go through NCCL"


def test_uneven_parts_are_gathered_root_by_root() -> None:
    def run(engine: NcclEngine, fake: Fake) -> tuple[list[float], list[Any]]:
        fake.log.clear()
        out = fake.watch("out", value(np.zeros(4, np.float32)))
        engine.all_gather(value(np.full([1, 3][engine.rank], engine.rank + 1, np.float32)), [1, 3], out)
        return memory(out).tolist(), fake.log

    for found, log in on(2, run):
        assert found == [1.0, 2.0, 2.0, 2.0]
        assert [entry[0] for entry in log] == ["group", "broadcast", "broadcast"] and log[2][2] == "out[1:+3]"


def test_ranks_that_make_different_calls_abort_before_nccl_sees_them() -> None:
    logs: dict[int, list[Any]] = {}

    def run(engine: NcclEngine, fake: Fake) -> None:
        logs[engine.rank] = fake.log
        engine.all_reduce(value(np.ones(4 + engine.rank, np.float16)))

    with pytest.raises(DistributedError, match=r"all_reduce sum float16\[4\].*all_reduce sum float16\[5\]"):
        on(2, run)
    assert all(log[-1] == ("abort",) and not any(e[0] == "allreduce" for e in log) for log in logs.values())


def test_a_stream_that_never_ends_is_a_fault_in_time_and_aborts() -> None:
    logs: dict[int, list[Any]] = {}

    def run(engine: NcclEngine, fake: Fake) -> None:
        logs[engine.rank], fake.stuck = fake.log, True
        engine.all_reduce(value(np.ones(4, np.float16)))

    with pytest.raises(DistributedError, match="all ranks wait at it, and nothing comes through"):
        on(2, run, timeout=0.5)
    assert all(log[-1] == ("abort",) for log in logs.values())


def test_an_error_of_nccl_on_one_rank_ends_all() -> None:
    stay = threading.Event()

    def run(engine: NcclEngine, fake: Fake) -> None:
        fake.stuck = True
        fake.error = 2 if engine.rank == 1 else 0
        try:
            engine.all_reduce(value(np.ones(4, np.float16)))
        finally:
            assert fake.log[-1] == ("abort",)
            stay.set()

    with pytest.raises(DistributedError, match="rank 1 .*cannot communicate: NCCL says unhandled system error"):
        on(2, run)


def test_what_cannot_be_used_is_refused() -> None:
    def run(engine: NcclEngine, fake: Fake) -> None:
        with pytest.raises(ArgumentTypeError, match="onnxruntime value or a numpy array, got list"):
            engine.all_reduce([1.0])
        with pytest.raises(ArgumentTypeError, match="NCCL does not know bool"):
            engine.all_reduce(value(np.ones(2, bool)), "max")
        with pytest.raises(ArgumentError, match="int32 has no mean"):
            engine.all_reduce(value(np.ones(2, np.int32)), "mean")
        with pytest.raises(ArgumentError, match=r"part of rank 0 is float32\[3\]; sizes and out say float32\[2\]"):
            engine.all_gather(value(np.ones(3, np.float32)), [2], value(np.ones(2, np.float32)))
        with pytest.raises(ArgumentError, match="expected 1 parts"):
            engine.all_to_all([value(np.ones(3, np.float32))] * 2)
        engine.place = amp.CUDAPlace(0)
        with pytest.raises(ArgumentError, match="the value is on cpu"):
            engine.broadcast(value(np.ones(2, np.float32)))

    on(1, run)


def test_without_nccl4py_a_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nccl", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'amp-transpiler\[nccl,mpi\]'"):
        nccl.imported()
    with pytest.raises(MissingPackageError):
        amp.distributed.init("nccl")
    assert not amp.distributed.is_initialized()


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        (lambda engine, array: engine.all_reduce(array), 32),
        (lambda engine, array: engine.reduce_scatter(array, [2, 2, 2]), 16),
        (lambda engine, array: engine.all_gather(device_tensors.view(array, 2 * engine.rank, [2]), [2] * 3, array), 16),
    ],
    ids=["all_reduce", "reduce_scatter", "all_gather"],
)
def test_bytes_are_counted_as_rings_send_them(call: Callable[[NcclEngine, Any], Any], sent: int) -> None:
    """Six numbers of 4 bytes on three ranks: each sends and receives 2/3 of them, or twice that."""

    def run(engine: NcclEngine, fake: Fake) -> tuple[int, int]:
        array = fake.watch("a", value(np.ones(6, np.float32)))
        before = engine.sent, engine.received
        call(engine, array)
        return engine.sent - before[0], engine.received - before[1]

    assert on(3, run) == [(2 * 40 + sent,) * 2] * 3
