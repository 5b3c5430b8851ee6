"""Feeds that are staged ahead: the same results, in order, from copies, by a thread that ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import amp_transpiler as amp
from tests.helpers.running import FEED, ROW, X, linear, program_of


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert threads() == []


def test_a_staged_feed_is_the_feed(exe: amp.Executor) -> None:
    results = []
    for stage in (dict, exe.stage):
        program, scope = linear(), amp.Scope()
        exe.run(program.startup, scope=scope)
        fed = [stage({"x": X * n, "row": ROW.tolist()}) for n in (1, 2, 3)]
        fetched = [exe.run(program, feed, ["y", "picked"], scope) for feed in fed]
        results.append([array.tobytes() for step in fetched for array in step])
    assert results[0] == results[1]


def test_tensors_of_every_kind_are_staged(exe: amp.Executor) -> None:
    scalar, half = np.array(3.0), X.astype(ml_dtypes.bfloat16)
    feed = {"a": X.T, "b": X.astype(">f4"), "c": scalar, "d": half, "e": X > 3, "f": X.astype(np.int8)}
    staged = exe.stage(feed)
    for name, array in feed.items():
        value = staged[name]
        assert (value.device_name(), tuple(value.shape())) == (exe.place.kind, array.shape)
        np.testing.assert_array_equal(amp.runtime.device_tensors.to_array(value), array)
    assert exe.stage(staged)["a"] is not staged["a"], "a copy, of a value too"


def test_what_is_no_array_is_left_to_the_run(exe: amp.Executor) -> None:
    feed = {"a": 3, "b": [1.5, 2], "c": "text", "d": np.array(["a", "b"]), "e": None, "f": [X, X]}
    staged = exe.stage(feed)
    assert all(staged[name] is value for name, value in feed.items())
    with pytest.raises(amp.AmpError, match="feed is a dictionary"):
        exe.stage([X])  # type: ignore[arg-type]


def test_the_run_checks_what_is_staged(cpu: amp.Executor) -> None:
    program, scope = linear(), amp.Scope()
    cpu.run(program.startup, scope=scope)
    for wrong, error in (
        ({"x": X.astype(np.float64), "row": ROW}, "feed 'x' .* is float64; it is declared as float32"),
        ({"x": X[:, :1], "row": ROW}, "feed 'x' .* has shape"),
        ({"z": X, "row": ROW}, "has no input 'z'"),
    ):
        with pytest.raises(amp.AmpError, match=error):
            cpu.run(program, cpu.stage(wrong), ["y"], scope)


def test_batches_come_in_order_and_may_be_written_over(exe: amp.Executor) -> None:
    buffer = np.zeros_like(X)

    def batches() -> Iterator[dict[str, Any]]:
        for n in range(6):
            buffer[:] = X * n
            yield {"x": buffer, "row": ROW}

    program = program_of(
        '<ir_version: 10, opset_import: ["" : 21]> sums (float[4, 2] x, int64[4] row) => (float[4, 2] y) { y = Add(x, x) }'
    )
    found = [exe.run(program, {"x": feed["x"]}, ["y"])[0] for feed in exe.prefetch(batches(), ahead=3)]
    np.testing.assert_array_equal(found, [2 * n * X for n in range(6)])


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_is_staged_than_was_asked_for(ahead: int, cpu: amp.Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[int] = []
    waits = threading.Semaphore(0)
    real = amp.Executor.stage

    def stage(self: amp.Executor, feed: dict[Any, Any]) -> dict[Any, Any]:
        staged.append(feed["n"])
        waits.release()
        return real(self, feed)

    monkeypatch.setattr(amp.Executor, "stage", stage)
    with cpu.prefetch(({"n": n} for n in range(9)), ahead) as feeds:
        for n in range(5):
            for _ in range(ahead if n == 0 else 1):
                assert waits.acquire(timeout=20)
            assert not waits.acquire(timeout=0.02) and staged == list(range(n + ahead))
            assert next(feeds) == {"n": n}


def test_an_error_comes_where_its_batch_would(cpu: amp.Executor) -> None:
    def batches() -> Iterator[Any]:
        yield {"x": X}
        yield {"x": X}
        raise ZeroDivisionError("in the loader")

    feeds = cpu.prefetch(batches(), ahead=2)
    assert next(feeds) and next(feeds)
    with pytest.raises(ZeroDivisionError, match="in the loader"):
        next(feeds)
    assert threads() == []
    with pytest.raises(StopIteration):
        next(feeds)
    wrong = cpu.prefetch([FEED, 3])  # type: ignore[list-item]
    assert next(wrong)
    with pytest.raises(amp.AmpError, match="feed is a dictionary"):
        next(wrong)


def test_a_loop_that_is_left_ends_the_thread(cpu: amp.Executor) -> None:
    closed: list[bool] = []

    def batches() -> Iterator[dict[str, Any]]:
        try:
            while True:
                yield {"x": X}
        finally:
            closed.append(True)

    source = batches()
    with cpu.prefetch(source, ahead=4) as feeds:
        next(feeds)
    assert threads() == []
    with pytest.raises(StopIteration):
        next(feeds)
    source.close()
    assert closed == [True]


def test_a_loop_that_is_left_without_a_word_ends_the_thread(cpu: amp.Executor) -> None:
    thread: Any = None
    for _ in cpu.prefetch({"n": n} for n in range(1000)):
        (thread,) = (each for each in threading.enumerate() if each.name == "prefetch")
        break
    thread.join(20)
    assert not thread.is_alive()


def test_the_thread_stands_where_its_caller_does(cpu: amp.Executor) -> None:
    where: ContextVar[str] = ContextVar("where", default="nowhere")
    where.set("inside")
    assert list(cpu.prefetch({"x": where.get()} for _ in range(1))) == [{"x": "inside"}]


@pytest.mark.parametrize("ahead", [0, -1, 1.5, True, None])
def test_ahead_is_a_number(ahead: Any, cpu: amp.Executor) -> None:
    with pytest.raises(amp.AmpError, match="ahead is .*; expected a whole number"):
        cpu.prefetch([], ahead)
