"""What engines compute, on ranks that are threads: every call, uneven sizes, empty arrays, segments."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective import ordered
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.simulated import SimulatedEngine
from tests.helpers.ranks import TYPES, drawn, rounded_once, words

RANKS = [1, 2, 3, 4, 64]
#: Elements: none, fewer than ranks, one exchange, two exchanges with a remainder.
LENGTHS = [0, 1, 5, 1000, 3001]
#: Of many ranks, each of which talks to every other: fewer elements than ranks, and shares of unlike sizes.
FEW_LENGTHS = [5, 3001]


def on(ranks: int, function: Callable[[Engine], Any]) -> list[Any]:
    return SimulatedEngine.run(ranks, function, timeout=20)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", TYPES)
def test_all_reduce(ranks: int, dtype: str) -> None:
    lengths = LENGTHS if ranks < 64 else FEW_LENGTHS

    def run(engine: Engine) -> list[np.ndarray]:
        found = []
        for length in lengths:
            for op in ("sum", "mean"):
                array = drawn(engine.rank, length, dtype)
                assert engine.all_reduce(array, op) is array
                found.append(array)
        return found

    results = on(ranks, run)
    for index, (length, op) in enumerate(product(lengths, ("sum", "mean"))):
        expected = words(rounded_once([drawn(rank, length, dtype) for rank in range(ranks)], op))
        for result in results:
            np.testing.assert_array_equal(words(result[index]), expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_segments_change_nothing(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "SEGMENT", 512)
    monkeypatch.setattr(ordered, "_SHARE", 1)
    sizes = [7, 3000, 0][:ranks]

    def run(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
        whole = drawn(engine.rank, 5000, "float16").reshape(50, 100)
        engine.all_reduce(whole)
        return whole, engine.reduce_scatter(drawn(engine.rank, sum(sizes), "float16"), sizes).copy()

    expected = rounded_once([drawn(rank, 5000, "float16") for rank in range(ranks)], "sum")
    scattered = rounded_once([drawn(rank, sum(sizes), "float16") for rank in range(ranks)], "sum")
    results = on(ranks, run)
    for whole, _ in results:
        np.testing.assert_array_equal(words(whole.reshape(-1)), words(expected))
    np.testing.assert_array_equal(words(np.concatenate([part for _, part in results])), words(scattered))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_reduce_scatter_and_all_gather_are_one_all_reduce(ranks: int, op: str) -> None:
    sizes = [(rank * 37) % 101 for rank in range(ranks)]

    def run(engine: Engine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        array, apart = drawn(engine.rank, sum(sizes), "bfloat16"), np.empty(sum(sizes), TYPES["bfloat16"])
        own = engine.reduce_scatter(array, sizes, op)
        assert own.size == sizes[engine.rank] and (own.size == 0 or np.shares_memory(own, array))
        engine.all_gather(own, sizes, apart)
        engine.all_gather(own, sizes, array)
        whole = drawn(engine.rank, sum(sizes), "bfloat16")
        return engine.all_reduce(whole, op), array, apart

    for whole, array, apart in on(ranks, run):
        np.testing.assert_array_equal(words(array), words(whole))
        np.testing.assert_array_equal(words(apart), words(whole))


@pytest.mark.parametrize("ranks", RANKS)
def test_all_to_all_with_lengths_that_only_the_sender_knows(ranks: int) -> None:
    def part(source: int, target: int) -> np.ndarray:
        return np.full(((source * 3 + target) % 5, 2), 100 * source + target, np.int32)

    def run(engine: Engine) -> list[np.ndarray]:
        return engine.all_to_all([part(engine.rank, target) for target in range(engine.size)])

    for rank, received in enumerate(on(ranks, run)):
        for source, found in enumerate(received):
            np.testing.assert_array_equal(found, part(source, rank))
            assert found.dtype == np.int32 and found.flags.writeable


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("length", [0, 3, 200_000])
def test_broadcast(ranks: int, length: int) -> None:
    length = length if ranks < 64 else min(length, 20_000 * 8)
    root = ranks - 1

    def run(engine: Engine) -> tuple[bool, np.ndarray]:
        array = np.arange(length, dtype=np.uint8) * 3 if engine.rank == root else np.zeros(length, np.uint8)
        array.flags.writeable = engine.rank != root
        return engine.broadcast(array, root) is array, array

    for same, array in on(ranks, run):
        assert same
        np.testing.assert_array_equal(array, np.arange(length, dtype=np.uint8) * 3)


@pytest.mark.parametrize("ranks", RANKS)
def test_objects_barrier_and_bool(ranks: int) -> None:
    def run(engine: Engine) -> tuple[list[Any], bool]:
        engine.barrier()
        found = engine.all_gather_object({"rank": engine.rank, "text": "ü" * engine.rank, "loss": 0.1})
        overflow = np.array(engine.rank == engine.size - 1)
        return found, bool(engine.all_reduce(overflow, "max"))

    expected = [{"rank": rank, "text": "ü" * rank, "loss": 0.1} for rank in range(ranks)]
    assert on(ranks, run) == [(expected, True)] * ranks


def test_sixty_four_ranks_at_the_largest_finite_gradients() -> None:
    """float16's own sum is infinite from two ranks on."""
    most = np.float16(65504)
    assert on(64, lambda e: e.all_reduce(np.full(2000, most), "mean").tolist()) == [[65504.0] * 2000] * 64


def test_submitted_calls_run_in_order_while_the_caller_goes_on() -> None:
    def run(engine: Engine) -> list[float]:
        order: list[int] = []
        arrays = [np.full(5000, engine.rank + step, np.float32) for step in range(5)]

        def reduce(step: int) -> np.ndarray:
            order.append(step)
            return engine.all_reduce(arrays[step])

        works = [engine.submit(lambda step=step: reduce(step)) for step in range(5)]  # type: ignore[misc]
        found = [float(work.wait()[0]) for work in works]
        assert order == [0, 1, 2, 3, 4] and all(work.done() for work in works)
        assert engine.submit(lambda: 1 / 2).wait() == 0.5
        with pytest.raises(ZeroDivisionError):
            engine.submit(lambda: 1 / 0).wait()
        return found

    assert on(3, run) == [[3.0, 6.0, 9.0, 12.0, 15.0]] * 3


@pytest.mark.parametrize("dtype", TYPES)
def test_values_of_onnxruntime_in_memory_are_reduced_where_they_lie(dtype: str) -> None:
    def run(engine: Engine) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        value = device_tensors.from_array(drawn(engine.rank, 3000, dtype).reshape(30, 100))
        assert engine.all_reduce(value, "mean") is value
        received = engine.all_to_all([value, value])
        return device_tensors.to_array(value).reshape(-1), [each.shape for each in received]

    expected = rounded_once([drawn(rank, 3000, dtype) for rank in range(2)], "mean")
    for found, shapes in on(2, run):
        np.testing.assert_array_equal(words(found), words(expected))
        assert shapes == [(30, 100)] * 2


def test_an_engine_in_its_own_thread_calls_itself() -> None:
    def run(engine: Engine) -> float:
        def both() -> float:
            array = np.ones(4, np.float32)
            engine.all_reduce(array)
            return float(engine.all_reduce(array)[0])

        return engine.submit(both).wait()

    assert on(2, run) == [4.0, 4.0]


READ_ONLY = np.zeros(3, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda e: e.all_reduce([1.0]), amp.errors.ArgumentTypeError, "numpy array or a value on CPU, got list"),
        (lambda e: e.all_reduce(np.zeros((4, 4), np.float32)[:, ::2]), amp.errors.ArgumentError, "not contiguous"),
        (lambda e: e.all_reduce(READ_ONLY), amp.errors.ArgumentError, "read-only"),
        (lambda e: e.all_reduce(np.zeros(3, np.complex64)), amp.errors.ArgumentTypeError, "complex64 cannot be sent"),
        (lambda e: e.all_reduce(np.zeros(3, ">f4")), amp.errors.ArgumentTypeError, "cannot be sent"),
        (lambda e: e.all_reduce(np.zeros(3, np.float32), "prod"), amp.errors.ArgumentError, "one of sum, mean, max"),
        (lambda e: e.all_reduce(np.zeros(3, np.int32), "mean"), amp.errors.ArgumentError, "int32 has no mean"),
        (lambda e: e.all_reduce(np.zeros(3, bool)), amp.errors.ArgumentError, "op='max'"),
        (lambda e: e.reduce_scatter(np.zeros(3, np.int32), [1, 1]), amp.errors.ArgumentError, "add up to 2"),
        (lambda e: e.reduce_scatter(np.zeros(3, np.int32), [3]), amp.errors.ArgumentError, "1 sizes for 2 ranks"),
        (lambda e: e.reduce_scatter(np.zeros(3, np.int32), [4, -1]), amp.errors.ArgumentError, "from 0 on"),
        (
            lambda e: e.all_gather(np.zeros(2, np.int32), [1, 1], np.zeros(2, np.int32)),
            amp.errors.ArgumentError,
            r"is int32\[2\]; sizes and out say int32\[1\]",
        ),
        (
            lambda e: e.all_to_all([np.zeros(2), np.zeros((2, 2))]),
            amp.errors.ArgumentError,
            "differ in type or in shape",
        ),
        (lambda e: e.all_to_all([np.zeros(2)]), amp.errors.ArgumentError, "1 parts for 2 ranks"),
        (lambda e: e.broadcast(np.zeros(2), 2), amp.errors.ArgumentError, "none of 0 to 1"),
        (lambda e: e.all_gather_object(object()), amp.errors.ArgumentTypeError, "JSON"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_sent(
    call: Callable[[Engine], object], kind: type[Exception], said: str
) -> None:
    def run(engine: Engine) -> float:
        if engine.rank == 0:
            with pytest.raises(kind, match=said):
                call(engine)
        return float(engine.all_reduce(np.ones(2))[0])  # both ranks still are at their first call

    assert on(2, run) == [2.0, 2.0]
