"""Tables that stay in host memory beside a device: the same bits as a table on the place, and rows alone go there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.partition.host_rows import host_tables, with_rows
from tests.helpers.placement import needs_placement_tool, place
from tests.helpers.tables import BATCH, IDS, ROWS, WIDTH, Recommender


def lazy_adam(_: Any) -> Any:
    return amp.optimizer.Adam(0.01, lazy_mode=True, multi_precision=True)


def beside(net: Recommender) -> Recommender:
    net.exe = amp.Executor(amp.CPUPlace(), host_tables=["table"])
    return net


def computed_ids(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    """Two lookups, one of ids that the program computes, and padding."""
    first = F.embedding_bag(ids, table, mode="mean", padding_idx=3, sparse=sparse)
    return first + F.sum(F.embedding(F.cast(ids[:, :2] * 2, "int32"), table, sparse=sparse), axis=1)


def recomputed(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    """The lookups, of ids that are fed and of ids that are computed, made again for the backward pass."""
    parts = [F.mean(F.tanh(F.embedding(some, table, sparse=sparse)), axis=1) for some in (ids, ids[:, :2] * 2)]
    both = parts[0] + parts[1]
    amp.recompute(ids.program, [both])
    return both


@pytest.mark.parametrize(
    "optimizer, mode, options",
    [
        (lambda _: amp.optimizer.SGD(0.1), "fp32", {}),
        (lambda _: amp.optimizer.Adagrad(0.1, row_wise=True), "fp32", {}),
        (lazy_adam, "fp32", {"forward": computed_ids}),
        (lazy_adam, "fp32", {"forward": recomputed}),
        (lazy_adam, "mixed", {}),
        (lazy_adam, "pure", {"dtype": "float16"}),
    ],
    ids=["sgd", "row-wise adagrad", "computed ids", "recomputed", "mixed", "16 bit"],
)
def test_the_bits_are_those_of_a_table_on_the_place(optimizer: Any, mode: str, options: dict[str, Any]) -> None:
    plain, net = Recommender(optimizer, mode, **options), beside(Recommender(optimizer, mode, **options))
    for step, ids in enumerate(
        [None, np.full((BATCH, IDS), 4), np.arange(-10, 10).reshape(4, 5), np.zeros((0, IDS), int)]
    ):
        losses = [each.run(each.feed(step, ids)) for each in (plain, net)]
        np.testing.assert_array_equal(*losses)
    assert net.state() == plain.state()
    test = net.main.clone(for_test=True)
    found = [each.exe.run(test, plain.feed(9), [plain.loss.name, "table"], each.scope) for each in (plain, net)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_alone_go_to_the_place_and_the_table_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    net = beside(Recommender(lazy_adam, rows=5000))
    net.train(range(1))
    at = net.scope.ort_values["table"].data_ptr()
    sizes: list[Any] = []
    hold = amp.Scope.hold

    def watched(scope: amp.Scope, values: Any) -> None:
        if scope is not net.scope:
            sizes.extend(value.shape() for value in values.values())
        hold(scope, values)

    monkeypatch.setattr(amp.Scope, "hold", watched)
    net.run(net.feed(1, np.arange(3 * IDS).reshape(3, IDS)))
    assert net.scope.ort_values["table"].data_ptr() == at
    assert [3 * IDS, WIDTH] in sizes and not any(5000 in size for size in sizes)


def test_a_bad_step_writes_nothing_back() -> None:
    def forward(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
        return F.mean(F.embedding(ids, table, sparse=sparse), axis=1) * amp.data("boost", [1], "float32")

    net = beside(Recommender(lazy_adam, "mixed", forward=forward, init_loss_scaling=64.0))
    one = np.ones(1, np.float32)
    net.run(net.feed(0) | {"boost": one})
    before, table = net.state(), net.scope.ort_values["table"]
    net.run(net.feed(1) | {"boost": one * np.inf})
    changed = {name.rstrip("_0123456789") for name, value in net.state().items() if value != before[name]}
    assert changed == {"num_good_steps", "num_bad_steps"} and net.scope.ort_values["table"] is table


def test_checkpoints_are_those_of_a_plain_run(tmp_path: Path) -> None:
    files = []
    for name, make in (("plain", lambda net: net), ("host", beside)):
        net = make(Recommender(lazy_adam, "mixed"))
        net.train(range(2))
        amp.save_checkpoint(tmp_path / name, net.main, net.scope)
        files.append((tmp_path / name / "state.safetensors").read_bytes())
    assert files[0] == files[1]
    assert amp.load_checkpoint(tmp_path / "plain", net.main, net.scope).exact
    plain = Recommender(lazy_adam, "mixed")
    amp.load_checkpoint(tmp_path / "host", plain.main, plain.scope)
    assert net.train(range(2, 4)) == plain.train(range(2, 4))


def test_a_recomputed_lookup_waits_for_the_backward_pass_as_it_did() -> None:
    main = Recommender(lazy_adam, forward=recomputed).main
    copy = with_rows(main, host_tables(main, {"table"}), {"table": 2 * BATCH * IDS})
    ids = [op.input(1) for op, slot in copy.var("table").readers if op.type == "Gather" and slot == 0]
    late = [v.producer for v in ids if v is not None and v.producer is not None]
    assert len(ids) == 4 and [op.type for op in late] == ["RecomputeInput"] * 2
    assert {op.input(0) for op in late} <= {op.output(0) for op in copy.operators if op.type == "RecomputeToken"}


def test_ids_of_a_recomputed_lookup_may_be_computed_of_one_thing_along_many_paths() -> None:
    def hashed(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
        some = ids
        for _ in range(40):  # 2^80 paths
            some = some + some - some
        made = F.mean(F.tanh(F.embedding(some, table, sparse=sparse)), axis=1)
        amp.recompute(ids.program, [made])
        return made

    main = Recommender(lazy_adam, forward=hashed).main
    (table,) = host_tables(main, {"table"})
    first, again = (op.input(1) for op, slot in main.var("table").readers if op.type == "Gather" and slot == 0)
    assert first is not None and first is not again and list(table.lookups) == [first.name]
    late = [op.input(1) for op, _ in with_rows(main, [table], {"table": BATCH * IDS}).var("table").readers][1]
    assert late is not None and late.producer is not None and late.producer.type == "RecomputeInput"


def test_an_average_of_a_table_needs_all_of_it() -> None:
    net = beside(Recommender(lazy_adam))
    amp.optimizer.ExponentialMovingAverage(0.9).update(net.main, net.main.startup)
    with pytest.raises(amp.errors.ArgumentError, match="all of table 'table' is read by .*ExponentialAverage.*Leave"):
        net.train(range(1))


def test_what_does_not_go_is_said() -> None:
    net = beside(Recommender(lazy_adam))
    with pytest.raises(
        amp.errors.FeedError, match=f"id {ROWS} is out of range for table 'table', which has {ROWS} rows"
    ):
        net.train(range(1), [[0, 1, 2, 3, ROWS]])
    for optimizer, sparse in ((lambda _: amp.optimizer.Adam(0.01), True), (lazy_adam, False)):
        with pytest.raises(
            amp.errors.ArgumentError, match="all of table 'table' is read or written by .*lazy_mode=True"
        ):
            beside(Recommender(optimizer, sparse=sparse)).train(range(1))

    def several() -> None:
        net = beside(Recommender(lazy_adam))
        for _ in range(2):
            with pytest.raises(amp.errors.ArgumentError, match="shard_tables"):
                net.train(range(1))

    amp.distributed.simulate(2, several)


@needs_placement_tool
@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_the_step_lands_on_cuda_without_the_table(mode: str, tmp_path: Path) -> None:
    main = Recommender(lazy_adam, mode, rows=5000).main
    step = with_rows(main, host_tables(main, {"table"}), {"table": BATCH * IDS})
    shapes = {"ids": (BATCH, IDS), "ids@IN@table": (BATCH, IDS), "label": (BATCH, 1)}
    model = step.lower(amp.CUDAPlace(0), feed_shapes=shapes).model
    done = place(model, tmp_path / "step.onnx")
    assert done.status == 0, done.said
    graph = model.graph
    assert not any(
        d.dim_value == 5000 for info in (*graph.input, *graph.output) for d in info.type.tensor_type.shape.dim
    )
