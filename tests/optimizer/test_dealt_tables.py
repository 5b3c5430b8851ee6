"""Tables whose rows are dealt out among ranks, which are threads here, beside tables that every rank has whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training import initializers
from amp_transpiler.runtime import shards
from amp_transpiler.runtime.startup_run import startup_parts
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.dealt import BATCH, batch, dealing
from tests.helpers.sessions import session
from tests.helpers.tables import IDS, ROWS, Recommender, fewer_on_rank_1

STEPS = 3
State = dict[str, np.ndarray]
Run = Callable[[], tuple[list[float], State]]


def lazy_adam() -> Any:
    return amp.optimizer.Adam(0.01, lazy_mode=True, multi_precision=True)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "lazy adam": lazy_adam,
    "adamw": lambda: amp.optimizer.AdamW(0.01, weight_decay=0.1),
    "dealt out too": lambda: distributed.shard_optimizer(amp.optimizer.Adam(0.01)),
    "clipped": lambda: amp.optimizer.SGD(0.1, grad_clip=amp.optimizer.ClipGradByNorm(0.01)),
}


def whole(net: Recommender) -> State:
    """The state of the net, rows of all ranks together."""
    return {v.name: distributed.find_var(v.name, net.scope) for v in net.main.variables if v.persistable}


def trained(make: Callable[[], Any], dealt: bool, ids: Any = None, mode: str = "fp32", **options: Any) -> Run:
    rows = options.get("rows", ROWS)

    def run() -> tuple[list[float], State]:
        net = Recommender(dealing(make, dealt), mode, **options)
        losses = [float(net.run(batch(step, ids))) for step in range(STEPS)]
        held = net.scope.find_var("table")
        assert len(held) == (-(-rows // distributed.world_size()) + 1 if dealt else rows)
        return losses, whole(net)

    return run


def check_alike(ranks: int, make: Callable[[], Any], **options: Any) -> None:
    """The same losses and state on all ranks, bit for bit, dealt out or not."""
    expected = distributed.simulate(ranks, trained(make, False, **options))
    found = distributed.simulate(ranks, trained(make, True, **options))
    for (losses, state), (wanted, as_whole) in zip(found, expected, strict=True):
        assert losses == wanted
        assert state.keys() == as_whole.keys()
        assert [name for name in state if state[name].tobytes() != as_whole[name].tobytes()] == []


@pytest.mark.parametrize(
    "name, ranks", [("lazy adam", 2), ("lazy adam", 4), ("adamw", 2), ("dealt out too", 2), ("clipped", 2)]
)
def test_rows_take_the_steps_of_a_whole_table(name: str, ranks: int) -> None:
    check_alike(ranks, OPTIMIZERS[name])


@pytest.mark.parametrize("mode, dtype", [("mixed", "float32"), ("pure", "float16")])
def test_in_16_bit(mode: str, dtype: str) -> None:
    check_alike(2, lazy_adam, mode=mode, dtype=dtype, init_loss_scaling=128.0)


def twice_with_padding(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    first = F.embedding_bag(ids, table, mode="mean", padding_idx=3, sparse=sparse)
    return first + F.sum(F.embedding(ids[:, :2], table, sparse=sparse), axis=1)


@pytest.mark.parametrize(
    "ids",
    [
        lambda rng: rng.integers(-ROWS, ROWS, (BATCH, IDS)),  # counted from the end
        lambda rng: np.full((BATCH, IDS), 4),  # other ranks are asked for nothing
        lambda rng: np.zeros((0, IDS), np.int64),
    ],
    ids=["from the end", "one row", "none"],
)
def test_which_rows_are_looked_up(ids: Any) -> None:
    check_alike(2, lazy_adam, ids=ids)


def test_a_scope_forgets_what_lay_there_before() -> None:
    scope = amp.Scope()
    scope.deal({"table": 5, "other": 7}, ["table", "other"])
    scope.deal({"moment": 5}, ["table", "moment"])
    assert dict(scope.dealt) == {"other": 7, "moment": 5}


def test_bags_with_padding_and_a_second_lookup() -> None:
    check_alike(2, lazy_adam, forward=twice_with_padding)


def test_a_table_of_as_many_rows_as_a_rank_keeps_with_its_spare_one() -> None:
    check_alike(2, lazy_adam, rows=3, ids=lambda rng: rng.integers(0, 3, (BATCH, IDS)))


def test_a_norm_is_that_of_all_rows() -> None:
    def make() -> Any:
        return amp.optimizer.SGD(0.1, grad_clip=amp.optimizer.ClipGradByGlobalNorm(0.01))

    ((_, expected), _), ((_, found), _) = (distributed.simulate(2, trained(make, dealt)) for dealt in (False, True))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("row", [ROWS, -ROWS - 1])
def test_an_id_out_of_range_is_named_on_all_ranks(row: int) -> None:
    def run() -> str:
        net = Recommender(dealing(lazy_adam))
        before = net.state()
        feed = batch(0)
        if distributed.rank() == 1:
            feed["ids"][0, 0] = row
        with pytest.raises(amp.errors.FeedError) as error:
            net.run(feed)
        assert net.state() == before
        net.run(batch(1))  # the ranks go on
        return str(error.value)

    said = f"id {row} on rank 1 is out of range for table 'table', which has {ROWS} rows"
    assert distributed.simulate(2, run) == [said] * 2


def boosted(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    """A large ``boost`` times a scaled gradient is infinite, in the gradient of the table alone."""
    boost = amp.data("boost", [1], "float32")
    extra = F.mean(F.embedding(ids[:, :1], table, sparse=sparse), axis=1)
    return F.mean(F.embedding(ids, table, sparse=sparse), axis=1) + (extra * boost - extra * boost)


def test_other_lookups_on_another_rank_are_an_error_on_all() -> None:
    def run() -> str:
        net = Recommender(dealing(lazy_adam), forward=fewer_on_rank_1)
        with pytest.raises(amp.errors.FeedError) as error:
            net.run(batch(0))
        return str(error.value)

    said = distributed.simulate(2, run)
    assert (
        "rank 1 looks 12 ids up in table 'table', and rank 0 20; a table whose rows are dealt out is looked" in said[0]
    )
    assert "rank 0 looks 20 ids up in table 'table', and rank 1 12" in said[1]


def shared(make: Callable[[], Any], dealt: bool) -> Run:
    """Training on shares of batches that do not divide, each mean weighted by what its share counts."""

    def run() -> tuple[list[float], State]:
        def weighted(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
            amp.data("weight", [1], "float32")
            return boosted(ids, table, sparse)

        net, losses = Recommender(dealing(make, dealt), forward=weighted, scaled_by="weight"), []
        rank, ranks = distributed.rank(), distributed.world_size()
        for step, size in enumerate((6, 7, 4)):
            rng, mine = np.random.default_rng(step), slice(rank, None, ranks)
            feed = {"ids": rng.integers(0, ROWS, (size, IDS)), "label": rng.normal(size=(size, 1)).astype(np.float32)}
            feed = {name: array[mine] for name, array in feed.items()}
            weight = np.array([len(feed["ids"]) * ranks / size], np.float32)
            losses.append(float(net.run(feed | {"weight": weight, "boost": np.ones(1, np.float32)})))
        return losses, whole(net)

    return run


@pytest.mark.parametrize("name, ranks", [("lazy adam", 3), ("clipped", 2)])
def test_ranks_that_look_up_more_than_others_take_the_step_of_one(name: str, ranks: int) -> None:
    """Dealt out or not bit for bit; beside one rank's step of the whole batch."""
    losses, state = shared(OPTIMIZERS[name], False)()
    found = distributed.simulate(ranks, shared(OPTIMIZERS[name], True))
    expected = distributed.simulate(ranks, shared(OPTIMIZERS[name], False))
    for (dealt_losses, dealt_state), (whole_losses, whole_state) in zip(found, expected, strict=True):
        assert dealt_losses == whole_losses
        assert [n for n in whole_state if dealt_state[n].tobytes() != whole_state[n].tobytes()] == []
        for variable, value in state.items():
            np.testing.assert_allclose(dealt_state[variable], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.mean([each for each, _ in found], axis=0), losses, rtol=1e-5)


def test_an_overflow_on_the_rank_of_a_row_skips_on_all() -> None:
    """Rank 0 looks up rows that lie on rank 1, where the sum of their gradients is infinite."""

    def run() -> tuple[State, State]:
        net = Recommender(dealing(lazy_adam), "mixed", forward=boosted, init_loss_scaling=2.0**15)
        one = np.ones(1, np.float32)
        net.run(batch(0) | {"boost": one})
        before = whole(net)
        feed = batch(1, lambda rng: np.full((BATCH, IDS), 1))
        net.run(feed | {"boost": one * (1e38 if distributed.rank() == 0 else 1)})
        return before, whole(net)

    for before, after in distributed.simulate(2, run):
        changed = {name.rstrip("_0123456789") for name in before if before[name].tobytes() != after[name].tobytes()}
        assert changed == {"num_good_steps", "num_bad_steps"}


def test_a_test_program_looks_up_in_the_same_table() -> None:
    def run(dealt: bool) -> Callable[[], np.ndarray]:
        def evaluate() -> np.ndarray:
            net = Recommender(dealing(lazy_adam, dealt))
            test = net.main.clone(for_test=True)
            net.run(batch(0))
            return np.array(net.exe.run(test, batch(1), [net.loss.name], net.scope)[0])

        return evaluate

    for found, expected in zip(*(distributed.simulate(2, run(dealt)) for dealt in (True, False)), strict=True):
        assert found == expected


def test_what_cannot_be_dealt_out_is_refused() -> None:
    def run() -> None:
        main = Recommender(dealing(lazy_adam, False)).main
        with pytest.raises(amp.errors.OrderError, match="has gradients already"):
            distributed.shard_tables([main.var("table")])
        with pytest.raises(amp.errors.ArgumentError, match="'fc_0.w_0' is no parameter that lookups of rows alone"):
            distributed.shard_tables([main.var("fc_0.w_0")])
        with pytest.raises(amp.errors.ArgumentError, match="Lamb takes norms of whole parameters"):
            Recommender(dealing(lambda: amp.optimizer.Lamb(0.1)))
        with pytest.raises(amp.errors.ArgumentError, match="accumulate_steps"):
            Recommender(dealing(lazy_adam), accumulate_steps=2)

    distributed.simulate(2, run)


def test_files_say_that_rows_are_dealt_out(tmp_path: Path) -> None:
    def run() -> None:
        net = Recommender(dealing(lazy_adam), "mixed")
        path = tmp_path / f"{distributed.rank()}.onnx"
        net.main.to_onnx(path)
        read = amp.Program.from_onnx(path)
        dealt = {v.name for v in net.main.variables if v.dealt == 2}
        assert {v.name for v in read.variables if v.dealt == 2} >= {"table", "table_moment1_0"} <= dealt
        amp.check_step(read, amp.CPUPlace(), {"ids": (4, IDS), "label": (4, 1)})
        with pytest.raises(amp.errors.ScopeError, match="rows of 'table' are dealt out"):
            net.main.to_onnx(path, scope=net.scope)

    distributed.simulate(2, run)


def with_table(kind: Any, rows: int, dealt: bool) -> amp.Program:
    """The startup program of a table and its moments."""
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = 5
    with amp.program_guard(main, startup), amp.unique_name.guard():
        ids = amp.data("ids", [4], "int64")
        loss = F.mean(amp.nn.embedding(ids, [rows, 5], param_attr=amp.ParamAttr("table", initializer=kind)))
        optimizer = dealing(lambda: amp.optimizer.Adagrad(0.1, initial_accumulator_value=0.5), dealt)(main)
        optimizer.minimize(loss, startup)
    return startup


def drawn(kind: Any, rows: int, dealt: bool, more: Callable[[amp.Program], None] = lambda startup: None) -> Any:
    """What a rank has of a table and its moments when they are made, and what all have."""

    def run() -> tuple[State, State]:
        startup, scope = with_table(kind, rows, dealt), amp.Scope()
        more(startup)
        amp.Executor(amp.CPUPlace(), threads=1).run(startup, scope=scope)
        names = ["table", "table_moment_0"]
        return {n: scope.find_var(n) for n in names}, {n: distributed.find_var(n, scope) for n in names}

    return run


@pytest.mark.parametrize("rows", [301, 2])
@pytest.mark.parametrize("kind", ["Uniform", "Normal", "TruncatedNormal"])
def test_a_rank_draws_its_own_rows(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = getattr(amp.nn.initializer, kind)(*([-1.0, 3.0] if kind == "Uniform" else [1.0, 0.5]))
    wanted, _ = drawn(make, rows, dealt=False)()
    monkeypatch.setattr(initializers, "_CHUNK", 256)
    monkeypatch.setattr(shards, "deal_out", None)  # of whole tables
    for rank, (held, found) in enumerate(distributed.simulate(3, drawn(make, rows, dealt=True))):
        for name, values in held.items():
            mine = wanted[name][rank::3]
            assert found[name].tobytes() == wanted[name].tobytes(), name
            assert values[: len(mine)].tobytes() == mine.tobytes() and not values[len(mine) :].any()
            assert len(values) == -(-rows // 3) + 1


def test_a_rank_draws_its_own_rows_on_cuda() -> None:
    """At once, for CUDA runs no Scan; what is lowered for it is computed here."""
    make = amp.nn.initializer.Uniform(-1.0, 3.0)
    wanted, _ = drawn(make, 301, dealt=False)()

    def run() -> np.ndarray:
        parts = startup_parts(with_table(make, 301, dealt=True))
        rest, held = parts.rest, parts.held
        assert rest is not None and held
        model = rest.lower(amp.CUDAPlace(0), fetch_list=[rest.var("table")]).model
        assert not without_cuda_kernel(onnx.shape_inference.infer_shapes(model))
        scalars = {"@rank": distributed.rank(), "@zero": 0}
        fed = {i.name: np.array(scalars[i.name], np.float32) for i in model.graph.input}
        return next(a for a in session(model).run(None, fed) if a.ndim == 2)

    for rank, rows in enumerate(distributed.simulate(3, run)):
        mine = wanted["table"][rank::3]
        assert rows[: len(mine)].tobytes() == mine.tobytes()


def test_what_else_a_startup_program_makes_of_a_table() -> None:
    """It is made of all rows, on every rank."""

    def total(startup: amp.Program) -> None:
        made = startup.add_variable("total", "float32", (1, 1), persistable=True)
        startup.add_operator("ReduceSum", [startup.var("table")], [made])

    make = amp.nn.initializer.Normal(1, 0.5)
    wanted, _ = drawn(make, 31, dealt=False)()
    for _, found in distributed.simulate(2, drawn(make, 31, True, total)):
        assert found["table"].tobytes() == wanted["table"].tobytes()


def test_one_rank_keeps_all() -> None:
    net, plain = (Recommender(dealing(lazy_adam, dealt)) for dealt in (True, False))
    assert net.train() == plain.train() and net.state() == plain.state()


def test_a_program_is_of_its_number_of_ranks() -> None:
    nets = distributed.simulate(2, lambda: Recommender(dealing(lazy_adam)))
    with pytest.raises(amp.errors.DistributedError, match="dealt out among 2 ranks, and there are 1"):
        nets[0].train()


def test_checkpoints_are_those_of_whole_tables(tmp_path: Path) -> None:
    """1, 2, 4, 1 ranks, and 2 that have the table whole, each from the last: the files of those that never dealt it."""
    folders: dict[bool, Path] = {}
    for dealt in (True, False):
        source = None
        for number, ranks in enumerate((1, 2, 4, 1, 2)):
            target = folders[dealt] = tmp_path / f"{dealt}{number}"

            def leg(
                source: Path | None = source, target: Path = target, number: int = number, own: Any = dealt
            ) -> None:
                net = Recommender(dealing(lazy_adam, own and number < 4), "pure")
                if source is not None:
                    assert amp.load_checkpoint(source, net.main, net.scope).exact
                net.run(batch(number))
                amp.save_checkpoint(target, net.main, net.scope)

            distributed.simulate(ranks, leg)
            source = target
    first, second = ((folder / "state.safetensors").read_bytes() for folder in folders.values())
    assert first == second
