"""``amp.distributed`` in one process: start and end, one rank alone, simulated ranks, shards of data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, DistributedError, MissingPackageError, OrderError
from amp_transpiler.runtime import device_tensors


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, no engine, before and after."""
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "AMP_DISTRIBUTED_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    distributed.shutdown()
    yield
    distributed.shutdown()


def test_one_rank_alone_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert not distributed.is_initialized() and (distributed.rank(), distributed.world_size()) == (0, 1)
    engine = distributed.init()
    assert distributed.is_initialized() and (engine.name, engine.rank, engine.size) == ("single", 0, 1)
    array = np.array([1.5, 2.5], np.float16)
    assert distributed.all_reduce(array) is array and array.tolist() == [1.5, 2.5]
    assert distributed.all_reduce([array.copy(), array], "sum")[1] is array
    assert distributed.broadcast(array) is array
    assert [each.tolist() for each in distributed.all_gather(array)] == [[1.5, 2.5]]
    assert distributed.all_gather_object({"a": 1}) == [{"a": 1}]
    assert engine.all_to_all([array])[0].tolist() == [1.5, 2.5]
    distributed.barrier()
    assert engine.remaining_factor("float16", "mean") == 1.0


def test_arrays_that_share_memory_are_not_reduced_twice() -> None:
    distributed.init()
    whole, other = np.ones(6), np.ones(2)
    distributed.all_reduce([whole[3:], other, whole[:3], whole[2:2]], "sum")
    for last in (whole[1:], device_tensors.from_array(whole)):
        with pytest.raises(ArgumentError, match="arrays 0 and 2 of the list share memory"):
            distributed.all_reduce([last, other, last], "sum")
    with pytest.raises(ArgumentError, match="arrays 1 and 2 of the list share memory"):
        distributed.all_reduce([other, whole[:4], whole[3:]], "sum")
    assert whole.tolist() == [1.0] * 6


def test_init_again_gives_the_same_engine_and_after_shutdown_another() -> None:
    first = distributed.init(timeout=5)
    assert distributed.init() is first and distributed.init(first) is first and first.timeout == 5
    with pytest.raises(OrderError, match=r"runs with the single engine; call shutdown\(\) before init\('mpi'\)"):
        distributed.init("mpi")
    distributed.shutdown()
    distributed.shutdown()
    with pytest.raises(OrderError, match=r"need amp.distributed.init\(\) first"):
        distributed.get_engine()
    assert distributed.init() is not first


def test_an_engine_of_ones_own() -> None:
    (engine,) = distributed.SimulatedEngine.group(1)
    assert distributed.init(engine) is engine and distributed.get_engine() is engine


def test_the_timeout_is_an_argument_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.init().timeout == 600
    distributed.shutdown()
    monkeypatch.setenv("AMP_DISTRIBUTED_TIMEOUT", "12.5")
    assert distributed.init().timeout == 12.5
    distributed.shutdown()
    monkeypatch.setenv("AMP_DISTRIBUTED_TIMEOUT", "soon")
    with pytest.raises(ArgumentError, match="AMP_DISTRIBUTED_TIMEOUT is 'soon'; expected seconds"):
        distributed.init()
    with pytest.raises(ArgumentError, match="timeout is 0"):
        distributed.init(timeout=0)
    with pytest.raises(ArgumentError, match="engine is 'gloo'; expected one of auto, mpi, nccl"):
        distributed.init("gloo")


@pytest.mark.parametrize("engine", ["mpi", "auto"])
def test_without_mpi4py_a_message_says_how_to_get_it(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMI_SIZE", "2" if engine == "auto" else "1")
    with pytest.raises(MissingPackageError, match=r"pip install 'amp-transpiler\[mpi\]'"):
        distributed.init(engine)
    assert not distributed.is_initialized()


def test_ranks_that_would_each_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(DistributedError, match="no mpiexec started this process.*mpiexec -n 4"):
        distributed.init()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(OrderError, match=r"init\(\) first"):
        distributed.rank()


def test_ranks_that_began_behind_minimize_are_told_that_each_trains_alone() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup):
        loss = amp.nn.functional.mean(amp.nn.fc(amp.data("x", [2, 3], "float32"), 1))
        amp.optimizer.SGD(0.1).minimize(loss, startup)

    def run() -> None:
        scope, exe = amp.Scope(), amp.Executor()
        exe.run(startup, scope=scope)
        exe.run(main, {"x": np.ones((2, 3), np.float32)}, [loss], scope)

    run()
    with pytest.warns(amp.warn.AmpWarning, match=r"exchanges nothing with the other ranks.*init\(\) before minimize"):
        distributed.simulate(2, run)


def test_simulated_ranks_are_ranks_of_their_threads() -> None:
    def run() -> tuple[int, int, float, list[Any], list[int]]:
        rank = distributed.rank()
        mean = float(distributed.all_reduce(np.full(3, rank, np.float32))[0])
        return rank, distributed.world_size(), mean, distributed.all_gather_object(rank), distributed.shard(6).tolist()

    found = distributed.simulate(3, run)
    assert [each[:4] for each in found] == [(rank, 3, 1.0, [0, 1, 2]) for rank in range(3)]
    assert sorted(index for each in found for index in each[4]) == list(range(6))
    assert not distributed.is_initialized()


def test_what_is_submitted_is_of_the_rank_that_submits() -> None:
    def run() -> tuple[int, float]:
        work = distributed.get_engine().submit(lambda: (distributed.rank(), distributed.all_reduce(np.ones(3), "sum")))
        rank, total = work.wait()
        return rank, float(total[0])

    assert distributed.simulate(3, run) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_all_gather_of_arrays_that_differ_in_length() -> None:
    def run() -> list[Any]:
        mine = np.full((distributed.rank(), 2), distributed.rank(), np.int16)
        return [(each.shape, each.dtype.name, each.sum()) for each in distributed.all_gather(mine)]

    assert distributed.simulate(3, run) == [[((rank, 2), "int16", 2 * rank * rank) for rank in range(3)]] * 3


# -- data ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 21, 100])
@pytest.mark.parametrize("drop", [False, True])
def test_shards_are_equal_and_hold_each_example_once(count: int, ranks: int, drop: bool) -> None:
    shards = [distributed.shard(count, 3, 7, rank, ranks, drop) for rank in range(ranks)]
    assert len({len(each) for each in shards}) == 1 and all(each.dtype == np.int64 for each in shards)
    seen = np.bincount(np.concatenate(shards), minlength=count)
    total = ranks * len(shards[0])
    if drop:
        assert count - ranks < total <= count and seen.max(initial=0) <= 1
    else:
        assert count <= total < count + ranks and (not count or seen.min() >= 1)
        if count >= ranks:
            assert seen.max() <= 2


def test_ranks_together_take_the_batches_of_one_with_the_n_fold_batch() -> None:
    alone = distributed.shard(24, 1, 5, 0, 1)
    shards = [distributed.shard(24, 1, 5, rank, 3) for rank in range(3)]
    for batch in range(4):
        together = np.concatenate([each[batch * 2 : batch * 2 + 2] for each in shards])
        assert sorted(together) == sorted(alone[batch * 6 : batch * 6 + 6])


def test_the_order_is_that_of_epoch_and_seed() -> None:
    one = distributed.shard(50, 0, 1, 0, 2)
    np.testing.assert_array_equal(one, distributed.shard(range(50), 0, 1, 0, 2))
    for epoch, seed in ((1, 1), (0, 2), (1, 0)):
        assert not np.array_equal(one, distributed.shard(50, epoch, seed, 0, 2))
    np.testing.assert_array_equal(distributed.shard(np.arange(50) * 10, 0, 1, 0, 2), one * 10)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"n_or_indices": -1}, ArgumentError),
        ({"n_or_indices": 2.5}, ArgumentTypeError),
        ({"n_or_indices": [0.5]}, ArgumentTypeError),
        ({"n_or_indices": 5, "epoch": -1}, ArgumentError),
        ({"n_or_indices": 5, "rank": 2, "world_size": 2}, ArgumentError),
        ({"n_or_indices": 5, "world_size": 0}, ArgumentError),
        ({"n_or_indices": 5, "drop_last": 1}, ArgumentTypeError),
    ],
)
def test_wrong_arguments_of_shard(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match="shard"):
        amp.distributed.shard(**arguments)


# -- batches ---------------------------------------------------------------------------------------------------------
def shares(count: int, size: int, ranks: int, **options: Any) -> list[list[distributed.Batch]]:
    return [list(distributed.batches(count, size, 2, 7, rank=r, world_size=ranks, **options)) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "size", "last"), [(24, 8, 8), (27, 8, 3), (25, 8, 1), (25, 7, 4), (3, 8, 3)])
def test_batches_are_the_same_on_any_number_of_ranks(count: int, size: int, last: int, ranks: int) -> None:
    """Their examples, and their means of any value, whatever the sizes of the shares are."""
    values = np.random.default_rng(0).normal(size=count)
    (alone,) = shares(count, size, 1)
    assert np.array_equal(np.sort(np.concatenate([each.rows for each in alone])), np.arange(count))
    assert alone[-1].size == last and all(each.weight == 1 for each in alone)
    for whole, *parts in zip(alone, *shares(count, size, ranks), strict=True):
        assert {each[0] for each in parts} == {whole.number} and {each.size for each in parts} == {whole.size}
        taken = np.concatenate([each.rows for each in parts if each.own])
        assert sorted(taken) == sorted(whole.rows) and all(len(each.rows) and each.weight < 2 for each in parts)
        mean = np.mean([values[each.rows].mean() * each.weight for each in parts])
        assert mean == pytest.approx(values[whole.rows].mean(), abs=1e-12)
        assert {each.weight for each in parts} == {1.0} or whole.size % ranks


def test_an_epoch_goes_on_in_the_middle_on_another_number_of_ranks() -> None:
    (whole,) = shares(50, 8, 1)
    for ranks in (2, 4):
        rest = shares(50, 8, ranks, start=4)
        assert [each.number for each in rest[0]] == [4, 5, 6]
        for number, batch in enumerate(whole[4:]):
            taken = np.concatenate([part[number].rows for part in rest if part[number].own])
            assert sorted(taken) == sorted(batch.rows)


def test_batches_in_order_and_without_the_last() -> None:
    (plain,) = shares(20, 8, 1, shuffle=False)
    assert [each.rows.tolist() for each in plain] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    assert [each.size for each in shares(20, 8, 2, drop_last=True)[1]] == [8, 8]
    order = np.concatenate([each.rows for each in shares(20, 8, 1)[0]])
    np.testing.assert_array_equal(order, distributed.shard(20, 2, 7, 0, 1))


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"batch_size": 0}, ArgumentError, "batch_size"),
        ({"batch_size": 3, "world_size": 4, "rank": 0}, ArgumentError, "batch_size is 3; expected .* the 4 ranks"),
        ({"batch_size": 3, "start": -1}, ArgumentError, "start"),
        ({"batch_size": 3, "shuffle": 0}, ArgumentTypeError, "shuffle"),
    ],
)
def test_wrong_arguments_of_batches(arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=f"batches: {said}"):
        amp.distributed.batches(10, **arguments)
