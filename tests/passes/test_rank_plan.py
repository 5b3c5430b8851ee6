"""Plans of ranks: exchanges counted rank by rank, beside what ranks really send, and beside published runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.errors import ArgumentError
from amp_transpiler.lists.devices import find_device
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering import rounds
from amp_transpiler.passes.lowering.exchange_cost import Network
from amp_transpiler.passes.lowering.planning import Assumed, Planner
from amp_transpiler.runtime.collective.headers import SIZE
from tests.helpers import benchmark_programs, sharded
from tests.helpers.tables import BATCH, IDS, WIDTH, Recommender
from tests.helpers.where import ROOT

ALL = [1, 2, 4, 8, 16, 64, 512, 4096]


# -- the formula ---------------------------------------------------------------------------------------------
def sent_by_hand(ranks: int, node: int, size: int) -> tuple[float, float, float]:
    """Of an all-reduce in which ranks send shares to one another, twice: the bytes of a rank, the most of one that
    stay in a node, and of a node that leave it."""
    of_rank, inside, outside = [0.0] * ranks, [0.0] * ranks, [0.0] * math.ceil(ranks / node)
    for _ in ("scatter", "gather"):
        for source in range(ranks):
            for target in range(ranks):
                if source != target:
                    of_rank[source] += size / ranks
                    if source // node == target // node:
                        inside[source] += size / ranks
                    else:
                        outside[source // node] += size / ranks
    return of_rank[0], max(inside), max(outside)


@pytest.mark.parametrize(("ranks", "node"), [(2, 1), (4, 1), (4, 4), (8, 4), (16, 4), (32, 8)])
def test_an_all_reduce_costs_what_its_slowest_link_carries(ranks: int, node: int) -> None:
    size = ranks * 1000
    of_rank, inside, outside = sent_by_hand(ranks, node, size)
    mpi = Network("mpi", 3.0, 40.0, 0.0, node).all_reduce(size, ranks)
    assert mpi.sent == of_rank and mpi.seconds == pytest.approx(max(inside / 40.0, outside / 3.0))
    nccl = Network("nccl", 3.0, 40.0, 0.0, node).all_reduce(size, ranks)
    link = 40.0 if node >= ranks else 3.0  # a ring crosses each link once with all that a rank sends
    assert nccl.sent == of_rank and nccl.seconds == pytest.approx(of_rank / link)


def test_messages_cost_their_latency() -> None:
    """Of shares to every other rank, or of the levels of a tree; none of a rank alone."""
    for engine, messages in (("mpi", 2 * 63), ("nccl", 2 * 6)):
        network = Network(engine, 1e9, 1e9, 1.0, 1)
        assert network.all_reduce(64_000, 64).seconds == pytest.approx(messages, abs=1e-3)
        assert network.all_reduce(64_000, 1) == (0, 0.0)
    large = Network("mpi", math.inf, math.inf, 1.0, 1).all_reduce(5 * 2**24, 2)
    assert large.seconds == 2 * 5  # segments


# -- what is planned is what runs ------------------------------------------------------------------------------
def net(name: str, mode: str) -> Any:
    main, _, loss, _ = benchmark_programs.training(name, mode)
    return distributed.plan(main, [2, 8, 64], bandwidth=1.0, step_time=0.1, fetch_list=[loss])


def recommender() -> Any:
    made = Recommender(lambda _: amp.optimizer.Adam(0.01), "fp32", True)
    feed = {name: array.shape for name, array in made.feed(0).items()}
    return distributed.plan(made.main, [2, 8, 64], bandwidth=1.0, step_time=0.1, feed_shapes=feed)


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_a_program_of_one_rank_is_planned_as_that_of_several(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BUCKET", 1 << 19)
    alone, (real, _) = net("mlp", mode), distributed.simulate(2, lambda: net("mlp", mode))
    assert alone.buckets == real.buckets and len(alone.buckets) == 2
    for one, other in zip(alone.rows, real.rows, strict=True):
        assert (one.ranks, one.sent, one.exchange) == (other.ranks, other.sent, other.exchange)
        assert one.exposed == pytest.approx(other.exposed, rel=1e-4 if mode == "fp32" else 0.2)
        assert one.memory == pytest.approx(other.memory, rel=0.05)


def test_sparse_tables_send_the_rows_that_are_looked_up() -> None:
    alone, (real, _) = recommender(), distributed.simulate(2, recommender)
    assert alone.buckets == real.buckets
    for one, other in zip(alone.rows, real.rows, strict=True):
        assert (one.sent, one.exposed) == (other.sent, pytest.approx(other.exposed))
    gathered = BATCH * IDS * (8 + WIDTH * 4)  # ids are int64, rows float32
    dense = sum(alone.buckets) - gathered
    for row in alone.rows:  # every rank sends its rows to every other one
        assert row.sent == (row.ranks - 1) * gathered + 2 * (dense * (row.ranks - 1) // row.ranks)


def test_ranks_send_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BUCKET", 1 << 12)

    def run() -> tuple[Any, Any]:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            h = amp.data("x", [4, 64], "float32")
            for _ in range(4):
                h = amp.nn.fc(h, 64, act="relu", bias_attr=False)
            loss = F.mean(h)
            amp.decorate(amp.optimizer.Adam(0.01), allreduce_precision="bfloat16").minimize(loss, startup)
        exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        exe.run(startup, scope=scope)
        exe.run(main, {"x": np.ones((4, 64), np.float32)}, [loss], scope)
        return distributed.step_report(), distributed.plan(main, 4, bandwidth=1.0, step_time=0.1, fetch_list=[loss])

    for step, plan in distributed.simulate(4, run):
        assert tuple(each.bytes for each in step.exchanges) == plan.buckets == (2 * 64 * 64,) * 4
        assert step.sent == plan[4].sent + 4 * 3 * SIZE


def test_exchanges_of_the_forward_pass_are_planned_too() -> None:
    """Statistics of batches of all ranks: each layer waits for its own, forward and backward."""

    def run() -> tuple[Any, Any]:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            h = amp.data("x", [4, 3, 8, 8], "float32")
            for _ in range(2):
                h = amp.nn.batch_norm(amp.nn.conv2d(h, 8, 3, padding=1, bias_attr=False), synchronized=True)
            loss = F.mean(h)
            amp.optimizer.SGD(0.1).minimize(loss, startup)
        exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        exe.run(startup, scope=scope)
        exe.run(main, {"x": np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)}, [loss], scope)
        said = {"bandwidth": 1e6, "latency": 1000.0, "step_time": 0.1, "fetch_list": [loss]}
        return distributed.step_report(), distributed.plan(main, 2, **said)

    for step, plan in distributed.simulate(2, run):
        assert len(step.exchanges) == len(plan.buckets) == 5
        row = plan[2]
        assert row.exposed == pytest.approx(row.exchange) and row.limit == "latency"  # nothing to compute meanwhile


def test_tables_that_are_dealt_out_send_what_is_asked_for() -> None:
    """Their volume does not grow with the ranks, where that of rows that all ranks get does."""

    def run(dealt: bool) -> tuple[Any, Any]:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            x = amp.nn.embedding(amp.data("ids", [64, 5], "int64"), [1000, 16], is_sparse=True)
            loss = F.mean(amp.nn.fc(F.mean(x, axis=[1]), 4))
            if dealt:
                distributed.shard_tables(amp.split_embedding_parameters(main)[0])
            amp.optimizer.Adam(0.01, lazy_mode=True).minimize(loss, startup)
        exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        exe.run(startup, scope=scope)
        ids = np.random.default_rng(distributed.rank()).integers(0, 1000, (64, 5))
        exe.run(main, {"ids": ids}, [loss], scope)
        said = {"bandwidth": 1.0, "step_time": 0.1, "fetch_list": [loss]}
        return distributed.step_report(), distributed.plan(main, [4, 1024], **said)

    (whole, gathered), *_ = distributed.simulate(4, lambda: run(False))
    (asked, dealt), *_ = distributed.simulate(4, lambda: run(True))
    assert whole.sent == pytest.approx(gathered[4].sent, rel=0.05)
    assert asked.sent == pytest.approx(dealt[4].sent, rel=0.15)  # less where a rank asks for a row twice
    assert dealt[1024].sent < 1.4 * dealt[4].sent and gathered[1024].sent > 300 * gathered[4].sent


# -- rows ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bert() -> Planner:
    main, _, loss, _ = benchmark_programs.training("bert", "mixed", batch=1)
    assumed = Assumed(Network("nccl", 1e9, 1e10, 1e-6, 8), find_device("V100"), False, None, None, False, 1.0)
    return Planner(main, assumed, fetch_list=[loss])


def rows(planner: Planner, **changed: Any) -> list[Any]:
    before = planner.assumed
    links = {name: changed.pop(name) for name in ("bandwidth", "within", "latency", "node") if name in changed}
    planner.assumed = replace(before, network=replace(before.network, **links), **changed)
    planner.sharded = planner.assumed.shard_state
    try:
        return [planner.row(ranks) for ranks in ALL]
    finally:
        planner.assumed, planner.sharded = before, before.shard_state


def test_rows_say_how_a_step_scales(bert: Planner) -> None:
    found = rows(bert, node=1, bandwidth=1e10)
    assert [row.ranks for row in found] == ALL and found[0].efficiency == 1.0 and found[0].sent == 0
    for fewer, more in pairwise(found):
        assert more.sent > fewer.sent and more.efficiency < fewer.efficiency and more.speedup > fewer.speedup
    for row in found:
        assert row.step == row.compute + row.exposed and row.exposed <= row.exchange * (1 + 1e-9)
        assert row.efficiency == pytest.approx(found[0].step / row.step)
    assert all(row.exposed == pytest.approx(row.exchange) for row in rows(bert, overlap=0.0))
    assert [row.limit for row in rows(bert, bandwidth=1e13, within=1e13, latency=0.0)] == ["compute"] * len(ALL)


def test_a_bucket_is_hidden_by_what_is_computed_behind_it(bert: Planner) -> None:
    """By hand, of two parts of the backward pass, an update, and two buckets."""
    bert_parts, waits, leaves, sends = bert.parts, bert.waits, bert.leaves, bert.sends
    try:
        bert.parts, bert.waits, bert.leaves = [4.0, 2.0, 1.0], [set(), set(), {0, 1}], {0: [0], 1: [1]}
        assert bert._exposed([1.0, 0.5]) == 0.5
        assert bert._exposed([3.0, 0.5]) == 1.5  # the second waits for the first
        assert bert._exposed([0.0, 0.0]) == 0.0
    finally:
        bert.parts, bert.waits, bert.leaves, bert.sends = bert_parts, waits, leaves, sends


def test_what_limits_is_said(bert: Planner) -> None:
    narrow, slow = rows(bert, bandwidth=1e8, latency=0.0)[-1], rows(bert, bandwidth=1e12, latency=1e-3)[-1]
    assert narrow.limit == "bandwidth" and "at 0.1 GB/s between nodes let ranks wait for " in narrow.because
    assert slow.limit == "latency" and "messages of 1000 us" in slow.because
    assert "within a node" in rows(bert, within=1e7, latency=0.0)[2].because
    table = recommender()
    assert table[64].limit == "compute"
    made = Recommender(lambda _: amp.optimizer.Adam(0.01), "fp32", True)
    feed = {name: (4096, *array.shape[1:]) for name, array in made.feed(0).items()}
    said = {"feed_shapes": feed, "step_time": 0.01, "bandwidth": 1.0, "latency": 0.0}
    assert distributed.plan(made.main, 64, **said)[64].limit == "rows"
    main, _, loss, _ = benchmark_programs.training("mlp", "fp32", batch=2**21)
    (row,) = distributed.plan(main, 8, bandwidth=10, device="T4", fetch_list=[loss]).rows
    assert row.limit == "memory" and "of the 14.9 GiB that there are; sharded state would take" in row.because


def test_sharded_state_takes_a_share(bert: Planner) -> None:
    whole, shared = rows(bert), rows(bert, shard_state=True)
    kept = bert.counted.memory
    for one, other in zip(whole, shared, strict=True):
        if one.ranks <= 4:  # beyond that the largest tensor is a rank's share
            spared = (kept.master_weights + kept.moments) * (1 - 1 / one.ranks)
            assert one.memory - other.memory == pytest.approx(spared, rel=0.1)
        assert other.compute <= one.compute and other.sent >= one.sent
    assert shared[3].sent - whole[3].sent == pytest.approx(7 / 8 * kept.parameters, rel=0.01)


def test_sharded_state_is_planned_as_it_is_dealt_out() -> None:
    ranks = 3

    def run(shard: bool) -> tuple[Any, Any, int]:
        made = sharded.Net(shard, "fp32", layers=2, width=32)
        made.step(0)
        feeds = {"x": (4, 6), "label": (4, 1), "boost": (1,)}
        said = {"feed_shapes": feeds, "fetch_list": [made.loss], "bandwidth": 1.0, "step_time": 0.1}
        plan = distributed.plan(made.main, [ranks, 64], **said, shard_state=not shard)
        return distributed.step_report(), plan, made.main.memory_estimate(feeds, fetch_list=[made.loss]).moments

    of_ranks, planned = distributed.simulate(ranks, lambda: run(True)), distributed.simulate(ranks, lambda: run(False))
    _, real, moments = of_ranks[0]
    _, asked, all_moments = planned[0]
    others = ranks - 1
    most = max(step.exchanges[-1].sent for step, _, _ in of_ranks) - others * SIZE
    assert {step.exchanges[-1].name for step, _, _ in of_ranks} == {"parameters"}
    assert real[ranks].sent == asked[ranks].sent == 2 * others * sum(real.buckets) // ranks + most
    for one, other in zip(real.rows, asked.rows, strict=True):
        assert one.exposed == pytest.approx(other.exposed) and one.memory == pytest.approx(other.memory, rel=0.04)
    assert 0 < moments < all_moments


def test_gradients_that_accumulate_are_exchanged_once() -> None:
    def planned(runs: int) -> Any:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            loss = F.mean(amp.nn.fc(amp.data("x", [64, 256], "float32"), 256))
            amp.decorate(amp.optimizer.SGD(0.1), accumulate_steps=runs).minimize(loss, startup)
        return distributed.plan(main, 8, bandwidth=0.1, step_time=0.1, fetch_list=[loss])[8]

    one, four = planned(1), planned(4)
    assert one.sent == four.sent and one.exposed == pytest.approx(four.exposed)
    assert 3.5 * one.compute < four.compute < 4 * one.compute  # three of the runs update nothing
    assert one.efficiency < four.efficiency == pytest.approx(four.compute / four.step)


def test_a_plan_is_a_table(bert: Planner) -> None:
    plan = bert.table(ALL)
    lines = str(plan).splitlines()
    assert "the forecast for V100; nccl, 10 GB/s within nodes of 8 ranks, 1 GB/s between them" in lines[0]
    assert [int(line.split()[0]) for line in lines[3 : 3 + len(ALL)]] == ALL
    record = json.loads(json.dumps(plan.to_dict()))
    assert [row["ranks"] for row in record["rows"]] == ALL and record["rows"][3]["efficiency"] == plan[8].efficiency
    with pytest.raises(ArgumentError, match="the plan has no row for 3 ranks"):
        plan[3]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks": 0}, "plan: ranks is 0"),
        ({"ranks": []}, "names no number"),
        ({"ranks": [2, "8"]}, "ranks is '8'"),
        ({"bandwidth": 0}, "bandwidth is 0"),
        ({"latency": -1}, "latency is -1"),
        ({"overlap": 1.5}, "overlap is 1.5"),
        ({"step_time": None}, "name a device .*or give the step_time"),
        ({"device": "V1000"}, "there is no device 'V1000'"),
        ({"engine": "gloo"}, "engine is 'gloo'"),
        ({"allreduce_precision": "int8"}, "allreduce_precision is 'int8'"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"feed_shapes": {}}, "feed 'x'"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_wrong_arguments(wrong: dict[str, Any], said: str) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = F.mean(amp.nn.fc(amp.data("x", [None, 3]), 2))
        with pytest.raises(ArgumentError, match="makes no gradients"):
            distributed.plan(main, 2, bandwidth=1, step_time=1, feed_shapes={"x": (4, 3)})
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    given: dict[str, Any] = {"ranks": 2, "bandwidth": 1.0, "step_time": 1.0, "feed_shapes": {"x": (4, 3)}} | wrong
    with pytest.raises(amp.AmpError, match=said):
        distributed.plan(main, **given)


# -- published runs --------------------------------------------------------------------------------------------
def test_published_runs_of_32_ranks_are_forecast_from_one_of_16() -> None:
    """BERT-Base on nodes of eight V100: the bandwidth that two nodes reached forecasts four, and another batch."""
    data = json.loads((ROOT / "tests" / "data" / "published_scaling.json").read_text(encoding="utf-8"))
    runs = {run["batch"]: run for run in data["runs"] if "OneFlow" in run["name"] and run["net"] == "bert"}
    assert set(runs) == {32, 96}
    network = data["networks"][runs[32]["network"]]
    links = Network("nccl", 7.4e9, 1e9 * network["within"], 1e-6 * network["latency_us"], network["ranks_per_node"])
    main, _, loss, _ = benchmark_programs.training("bert", "fp32", **runs[32]["sizes"])
    planner = None
    for batch, run in runs.items():
        speeds = {int(ranks): speed for ranks, speed in run["examples_per_second"].items()}
        assumed = Assumed(links, find_device(network["device"]), False, batch / speeds[1], "float32", False, 1.0)
        planner = planner or Planner(main, assumed, fetch_list=[loss])
        compute = batch / speeds[1]  # shares of parts as for the other batch
        planner.parts = [seconds * compute / planner.compute for seconds in planner.parts]
        planner.compute = planner.alone = compute
        for ranks in (16, 32):
            assert planner.row(ranks).efficiency == pytest.approx(speeds[ranks] / ranks / speeds[1], abs=0.015)
