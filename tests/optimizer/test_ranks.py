"""Training by several ranks, which are threads here: beside one rank with the whole batch, and beside one another."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.nn import functional as F
from tests.helpers.tables import Recommender, fewer_on_rank_1

BATCH, STEPS = 8, 5
State = dict[str, np.ndarray]


class Net:
    """A small classifier as one rank trains it; ``explicit`` reduces its gradients itself."""

    def __init__(self, mode: str, dropout: bool = False, boost: bool = False, seed: int = 5, **decorated: Any) -> None:
        self.main, startup, self.seed = amp.Program(), amp.Program("startup"), seed
        startup.seed = seed
        with amp.program_guard(self.main, startup), amp.unique_name.guard():
            x, label = amp.data("x", [None, 6], "float32"), amp.data("label", [None, 1], "int64")
            h = amp.nn.fc(x * amp.data("boost", [1], "float32") if boost else x, 16, act="relu")
            h = F.dropout(h, 0.5) if dropout else h
            self.hidden = h
            self.loss = F.mean(F.cross_entropy(amp.nn.fc(h, 4), label))
            optimizer: Any = amp.optimizer.Adam(0.05, multi_precision=True)
            if mode != "fp32":
                optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False, **decorated)
            optimizer.minimize(self.loss, startup)
        self.exe, self.scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        self.exe.run(startup, scope=self.scope)
        if mode != "fp32":
            optimizer.amp_init(amp.CPUPlace(), scope=self.scope)

    def step(self, number: int, **feeds: Any) -> float:
        """The loss on this rank's share of the batch."""
        rng = np.random.default_rng([self.seed, number])
        feed = {"x": rng.normal(size=(BATCH, 6)).astype(np.float32), "label": rng.integers(0, 4, (BATCH, 1))}
        mine = slice(distributed.rank(), None, distributed.world_size())
        feed = {name: np.ascontiguousarray(array[mine]) for name, array in feed.items()} | feeds
        return float(self.exe.run(self.main, feed=feed, fetch_list=[self.loss], scope=self.scope)[0])

    def state(self) -> State:
        return {v.name: np.array(self.scope.find_var(v.name)) for v in self.main.variables if v.persistable}


def trained(mode: str, **options: Any) -> Callable[[], tuple[list[float], State]]:
    def run() -> tuple[list[float], State]:
        net = Net(mode, **options)
        return [net.step(number) for number in range(STEPS)], net.state()

    return run


@cache
def by_itself(mode: str, seed: int) -> tuple[list[float], State]:
    return trained(mode, seed=seed)()


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("seed", [5, 6, 7])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode, close", [("fp32", 1e-6), ("mixed", 5e-3), ("pure", 1e-2)])
def test_ranks_learn_what_one_learns_of_the_whole_batch(mode: str, close: float, ranks: int, seed: int) -> None:
    losses, state = by_itself(mode, seed)
    found = distributed.simulate(ranks, trained(mode, seed=seed))
    assert all(same(found[0][1], other) for _, other in found)
    np.testing.assert_allclose(np.mean([each for each, _ in found], axis=0), losses, rtol=close)
    again = distributed.simulate(ranks, trained(mode, seed=seed))
    assert [each for each, _ in again] == [each for each, _ in found] and same(again[0][1], found[0][1])
    assert found[0][1].keys() == state.keys()
    for name in ("fc_0.w_0", "fc_1.w_0"):
        np.testing.assert_allclose(found[0][1][name], state[name], rtol=0, atol=10 * close)


@pytest.mark.parametrize("precision", [None, "float32", "bfloat16"])
def test_gradients_travel_in_the_precision_that_is_asked_for(precision: str | None) -> None:
    def run() -> set[str]:
        net = Net("mixed", allreduce_precision=precision)
        net.step(0)
        model = net.main.lower(amp.CPUPlace(), feed_shapes={"x": (4, 6), "label": (4, 1)}).model
        from amp_transpiler.passes.lowering.exchanges import taken_apart

        return {each.sent[0].dtype for each in taken_apart(model)[2]}

    assert distributed.simulate(2, run) == [{precision or "float16"}] * 2


def test_another_precision_is_an_error() -> None:
    with pytest.raises(amp.AmpError, match="allreduce_precision is 'int8'; expected 'float16'"):
        amp.decorate(amp.optimizer.SGD(0.1), allreduce_precision="int8")


def test_an_overflow_on_one_rank_skips_on_all() -> None:
    def run() -> tuple[State, State, float]:
        net = Net("mixed", boost=True, init_loss_scaling=64.0, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        one = np.ones(1, np.float32)
        net.step(0, boost=one)
        before = net.state()
        net.step(1, boost=one * np.inf if distributed.rank() == 1 else one)
        after = net.state()
        net.step(2, boost=one)
        distributed.check_equal(net.main, net.scope)
        return before, after, float(next(v for k, v in net.state().items() if k.startswith("loss_scaling"))[0])

    for before, after, scale in distributed.simulate(3, run):
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert {name.rstrip("_0123456789") for name in changed} <= {"loss_scaling", "num_good_steps", "num_bad_steps"}
        assert scale == 32.0


def test_each_rank_draws_masks_of_its_own() -> None:
    def run() -> np.ndarray:
        net = Net("fp32", dropout=True)
        feed = {"x": np.ones((4, 6), np.float32), "label": np.zeros((4, 1), np.int64)}
        return net.exe.run(net.main, feed=feed, fetch_list=[net.hidden], scope=net.scope)[0] == 0

    masks = distributed.simulate(3, run)
    assert all((masks[a] != masks[b]).any() for a, b in ((0, 1), (0, 2), (1, 2)))
    assert (run() == masks[0]).all()  # alone it is rank 0


def test_state_that_differs_is_named() -> None:
    def run() -> str:
        net = Net("fp32")
        if distributed.rank() == 2:
            net.scope.set_var("fc_1.b_0", np.ones(4, np.float32))
        with pytest.raises(amp.AmpError) as error:
            distributed.check_equal(net.main, net.scope)
        return str(error.value)

    for said in distributed.simulate(3, run):
        assert "other than rank 0 is 'fc_1.b_0' on rank 2." in said


def test_checkpoints_go_from_one_number_of_ranks_to_another(tmp_path: Path) -> None:
    """1, 2, 4, 1 ranks; the last one ends where a run without a stop ends, as near as the sums allow."""

    def leg(first: int, source: Path | None, target: Path) -> Callable[[], State]:
        def run() -> State:
            net = Net("pure")
            if source is not None:
                assert amp.load_checkpoint(source, net.main, net.scope).exact
            net.step(first)
            amp.save_checkpoint(target, net.main, net.scope)
            return net.state()

        return run

    source = None
    for number, ranks in enumerate((1, 2, 4, 1)):
        target = tmp_path / str(number)
        run = leg(number, source, target)
        states = distributed.simulate(ranks, run) if ranks > 1 else [run()]
        assert all(same(states[0], other) for other in states)
        source = target
    whole = Net("pure")
    for number in range(4):
        whole.step(number)
    for name, value in whole.state().items():
        np.testing.assert_allclose(states[0][name].astype(np.float64), value.astype(np.float64), atol=2e-2)


def test_a_training_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Batches of 8 of 28 examples on 2 ranks; after the second one a checkpoint, and 1, 2 or 4 ranks from there on."""
    rng = np.random.default_rng(3)
    x, label = rng.normal(size=(28, 6)).astype(np.float32), rng.integers(0, 4, (28, 1))

    def epoch(start: int, stop: int) -> State:
        net = Net("fp32")
        if start:
            loaded = amp.load_checkpoint(tmp_path / "saved", net.main, net.scope)
            assert loaded.data_position == {"epoch": 1, "batch": start - 1}
        for batch in distributed.batches(28, BATCH, 1, seed=5, start=start, drop_last=True):
            if batch.number == stop:
                break
            feed = {"x": x[batch.rows], "label": label[batch.rows]}
            net.exe.run(net.main, feed=feed, fetch_list=[net.loss], scope=net.scope)
            position = {"epoch": 1, "batch": batch.number}
        if stop < 3:
            amp.save_checkpoint(tmp_path / "saved", net.main, net.scope, data_position=position)
        return net.state()

    unbroken = distributed.simulate(2, lambda: epoch(0, 3))[0]
    distributed.simulate(2, lambda: epoch(0, 2))
    assert same(distributed.simulate(2, lambda: epoch(2, 3))[0], unbroken)
    for ranks in (1, 4):
        for name, value in distributed.simulate(ranks, lambda: epoch(2, 3))[0].items():
            np.testing.assert_allclose(value, unbroken[name], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_that_rank_0_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def run() -> str:
        net = Net("fp32")
        with pytest.raises(amp.AmpError) as error:
            amp.save_checkpoint(tmp_path / "file", net.main, net.scope)
        return f"{distributed.rank()} {error.value}"

    first, second = distributed.simulate(2, run)
    assert second.startswith("1 rank 0 failed where the others waited for it: ") and "file" in first


# -- sparse gradients ----------------------------------------------------------------------------------------
def with_a_table(name: str, mode: str, sparse: bool) -> Callable[[], tuple[list[float], dict[str, bytes], set[str]]]:
    def run() -> tuple[list[float], dict[str, bytes], set[str]]:
        makers = {
            "sgd": lambda _: amp.optimizer.SGD(0.02),
            "adam": lambda _: amp.optimizer.Adam(0.01),
            "lazy adam": lambda _: amp.optimizer.Adam(0.01, lazy_mode=True),
        }
        scaling = {} if mode == "fp32" else {"init_loss_scaling": 128.0}  # the scaled gradients travel in 16 bit
        net = Recommender(makers[name], mode, sparse, **scaling)
        mine = slice(distributed.rank(), None, distributed.world_size())
        losses = [float(net.run({k: v[mine] for k, v in net.feed(step).items()})) for step in range(4)]
        return losses, net.state(), {op.type for op in net.main.operators}

    return run


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["fp32", "mixed"])
@pytest.mark.parametrize("name", ["sgd", "adam", "lazy adam"])
def test_tables_take_the_rows_of_all_ranks(name: str, mode: str, ranks: int) -> None:
    found = distributed.simulate(ranks, with_a_table(name, mode, True))
    assert all(state == found[0][1] for _, state, _ in found)
    assert "AllGatherRows" in found[0][2] and ("SparseSGD" in found[0][2]) == (name == "sgd")
    losses, state, _ = with_a_table(name, mode, True)()
    np.testing.assert_allclose(
        np.mean([each for each, _, _ in found], axis=0), losses, rtol=1e-5 if mode == "fp32" else 2e-2
    )
    table = np.frombuffer(state["table"], np.float32)
    close = 1e-5 if mode == "fp32" else 2e-2
    np.testing.assert_allclose(np.frombuffer(found[0][1]["table"], np.float32), table, atol=close)
    if mode == "fp32" and name != "lazy adam":
        dense = distributed.simulate(ranks, with_a_table(name, mode, False))
        assert [(each, state) for each, state, _ in dense] == [(each, state) for each, state, _ in found]


@pytest.mark.parametrize("sparse", [True, False])
def test_batches_of_several_sizes(sparse: bool) -> None:
    def run() -> tuple[list[float], np.ndarray]:
        net = Recommender(lambda _: amp.optimizer.SGD(0.02), "fp32", sparse)
        mine, losses = slice(distributed.rank(), None, distributed.world_size()), []
        for step, size in enumerate((4, 8, 12, 4, 16)):
            rng = np.random.default_rng(step)
            ids, label = rng.integers(0, 9, (size, 5)), rng.normal(size=(size, 1)).astype(np.float32)
            losses.append(float(net.run({"ids": ids[mine], "label": label[mine]})))
        return losses, net.table().copy()

    losses, table = run()
    (first, of_first), (second, of_second) = distributed.simulate(2, run)
    np.testing.assert_allclose(np.mean([first, second], axis=0), losses, rtol=1e-5)
    np.testing.assert_allclose(of_first, table, atol=1e-6)
    assert np.array_equal(of_first, of_second)


def test_a_table_that_ranks_look_up_in_other_numbers_is_named() -> None:
    def run() -> str:
        net = Recommender(lambda _: amp.optimizer.SGD(0.02), forward=fewer_on_rank_1)
        with pytest.raises(amp.errors.DistributedError) as caught:
            net.run({"ids": np.zeros((4, 5), np.int64), "label": np.zeros((4, 1), np.float32)})
        return str(caught.value)

    for said in distributed.simulate(2, run):
        assert "table 'table', whose gradients are sparse, is looked up by one program on each rank" in said


def test_ranks_that_are_fed_other_inputs_say_so() -> None:
    def run() -> str:
        net, rank = Recommender(lambda _: amp.optimizer.SGD(0.02)), distributed.rank()
        feed = {"ids": np.zeros((4, 5), np.int64), "label": np.zeros((4, 1), np.float32)}
        if rank:
            with amp.program_guard(net.main):
                net.loss = net.loss + F.sum(amp.data("beside", [1]))
            feed["beside"] = np.zeros(1, np.float32)
        with pytest.raises(amp.errors.FeedError) as caught:
            net.run(feed)
        return str(caught.value)

    said = distributed.simulate(2, run)
    assert "rank 1 is fed {'beside': [1], 'ids': [4, 5], 'label': [4, 1]}, and rank 0 {'ids': [4, 5]," in said[0]
    assert "rank 0 is fed {'ids': [4, 5], 'label': [4, 1]}, and rank 1 {'beside': [1], 'ids'" in said[1]


def test_the_culprit_of_a_bad_step_is_found_on_the_rank_that_made_it() -> None:
    """The step is run again by one rank, without the others."""

    def run() -> str:
        net = Net("mixed", boost=True, init_loss_scaling=64.0)
        x = np.full((4, 6), 1.0, np.float32)
        feed = {"x": x, "label": np.zeros((4, 1), np.int64), "boost": np.full(1, 1e30, np.float32)}
        return str(amp.find_culprit(net.main, feed, net.scope).operator) if distributed.rank() else ""

    assert distributed.simulate(2, run, timeout=5.0)[1].startswith("Cast")
