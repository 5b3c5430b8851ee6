"""Training by ranks with a device each, over a stand-in for NCCL and CUDA streams: beside the sums in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.errors import DistributedError, PlaceError
from amp_transpiler.ir import opdef
from amp_transpiler.ops.training.all_reduce import ALL_GATHER, ALL_REDUCE
from amp_transpiler.passes.lowering import rounds
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import buckets, chain, device_tensors, executor
from amp_transpiler.runtime.collective.nccl import NcclEngine
from amp_transpiler.runtime.collective.simulated import SimulatedEngine
from tests.helpers.fake_nccl import Fake, FakeDevice, Wire, on_devices
from tests.helpers.rank_training import Run, Trainer
from tests.helpers.tables import Recommender

STEPS, BAD = 4, (2, 1)


@pytest.fixture(autouse=True)
def two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BUCKET", 1 << 9)
    monkeypatch.setattr(rounds, "MOST", 2)


def trained(net: str, mode: str, here: Any = lambda: distributed.get_engine().place) -> Callable[..., Run]:
    return lambda *_: Trainer(net, mode, here()).train(range(STEPS), BAD)


def close(found: list[Run], expected: list[Run], tolerance: float) -> None:
    for run, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(run.losses, other.losses, rtol=tolerance)
        assert run.scales == other.scales and run.skipped == other.skipped
        assert all(np.array_equal(run.state[name], value) for name, value in found[0].state.items())
        for name, value in other.state.items():
            np.testing.assert_allclose(run.state[name].astype(float), value.astype(float), tolerance, tolerance)


@pytest.mark.parametrize(
    ("net", "mode", "ranks", "tolerance"),
    [
        ("mlp", "fp32", 2, 1e-6),
        ("mlp", "mixed", 2, 2e-3),
        ("mlp", "pure", 4, 5e-3),
        ("cnn", "fp32", 4, 1e-6),
        ("cnn", "mixed", 3, 2e-3),  # NCCL's sum is 3 / 4 of the mean
        ("mlp", "pure", 3, 5e-3),
        ("normed", "mixed", 2, 2e-3),
    ],
)
def test_ranks_on_devices_learn_what_ranks_in_memory_do(net: str, mode: str, ranks: int, tolerance: float) -> None:
    """With a step that overflows on one rank, and is skipped on all."""
    found = on_devices(ranks, trained(net, mode))
    close(found, distributed.simulate(ranks, trained(net, mode)), tolerance)
    overflows = mode != "fp32"
    assert all(run.skipped == [BAD[0]] * overflows for run in found)
    assert found[0].scales[-1] == (32.0 if overflows else 1.0)


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_parts_lowered_for_cuda_learn_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = distributed.simulate(2, trained("mlp", mode))
    monkeypatch.setattr(executor, "lower", lambda program, _, *rest, **named: lower(program, "cuda", *rest, **named))
    close(on_devices(2, trained("mlp", mode)), expected, 1e-6 if mode == "fp32" else 2e-3)


def test_what_is_fed_and_fetched_goes_through_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where host and device are apart: what several parts read is copied once, a loss when the step is over."""
    expected = distributed.simulate(2, trained("mlp", "fp32"))
    copied = list[Any]()

    def copy_to(value: Any, place: Any) -> Any:
        copied.append(value.shape())
        return device_tensors.copy_to(value, place)

    monkeypatch.setattr(chain, "lies_on", lambda value, _: value._numpy_obj is None)  # what numpy made is on the host
    monkeypatch.setattr(chain, "device_tensors", SimpleNamespace(**vars(device_tensors) | {"copy_to": copy_to}))
    close(on_devices(2, trained("mlp", "fp32")), expected, 1e-6)
    assert copied == [[4, 16]] * 2 * STEPS


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_tables_come_from_all_ranks(ranks: int) -> None:
    def run(*_: Any) -> tuple[float, dict[str, bytes]]:
        net = Recommender(lambda _: amp.optimizer.Adam(0.01), "mixed", init_loss_scaling=128.0)
        net.exe = amp.Executor(distributed.get_engine().place)
        feeds = (
            {k: v.repeat(2, 0)[distributed.rank() :: ranks] for k, v in net.feed(step).items()} for step in range(3)
        )
        losses = [float(net.run({k: v[:2] for k, v in feed.items()})) for feed in feeds]
        return losses[-1], net.state()

    found, expected = on_devices(ranks, run), distributed.simulate(ranks, run)
    np.testing.assert_allclose([loss for loss, _ in found], [loss for loss, _ in expected], rtol=1e-3)
    assert all(state == found[0][1] for _, state in found)


@pytest.mark.parametrize(("ranks", "after"), [(2, 1), (3, 3)])
def test_rows_of_ranks_are_added_in_one_order_on_cuda(ranks: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a scatter adds what goes to one row in any order; a rank has it once, and two sums commute."""

    def feeds(net: Recommender) -> dict[str, np.ndarray]:
        return {name: np.concatenate([array] * 3)[distributed.rank() :: 3] for name, array in net.feed(0).items()}

    def run() -> dict[str, bytes]:
        net = Recommender(lambda _: amp.optimizer.SGD(0.02), "fp32")
        net.run(feeds(net))
        return net.state()

    def adding() -> tuple[int, int]:
        net = Recommender(lambda _: amp.optimizer.SGD(0.02), "fp32")
        model = lower(net.main, "cuda", {name: array.shape for name, array in feeds(net).items()}, [net.loss]).model
        found = [node for node in model.graph.node if node.op_type == "ScatterND" and node.attribute]
        return len(found), sum("@REDUCED" in node.output[0] for node in found)

    assert distributed.simulate(ranks, adding) == [(1 + after, after)] * ranks
    expected = distributed.simulate(ranks, run)
    monkeypatch.setattr(executor, "lower", lambda program, _, *rest, **named: lower(program, "cuda", *rest, **named))
    assert distributed.simulate(ranks, run) == expected


def test_an_exchange_that_computes_on_the_host_is_brought_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And waits until the device has made what it sends."""

    def run(engine: NcclEngine, fake: Fake) -> tuple[dict[str, bytes], list[str]]:
        net = Recommender(lambda _: amp.optimizer.SGD(0.02), "fp32")
        net.exe = amp.Executor(engine.place)
        net.run({name: array[distributed.rank() :: 2] for name, array in net.feed(0).items()})
        return net.state(), [entry[0] for entry in fake.log]

    expected = on_devices(2, run)
    for type_ in (ALL_GATHER, ALL_REDUCE):
        operator = opdef.entry(opdef.own(type_))
        assert operator.exchange is not None
        monkeypatch.setattr(operator, "exchange", replace(operator.exchange, on_device=False))
    for (state, log), (before, earlier) in zip(on_devices(2, run), expected, strict=True):
        assert state == before and "allgather" in earlier and "sync" not in earlier
        assert "sync" in log and not {"allgather", "allreduce"} & set(log)


@pytest.mark.parametrize("mode", ["mixed", "pure"])
def test_state_that_is_dealt_out_stays_the_same_to_the_bit(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the parameters come from the ranks that have updated them in one call."""

    def run(engine: NcclEngine, fake: Fake) -> tuple[Run, list[str]]:
        trainer = Trainer("mlp", mode, engine.place)
        run = Run([trainer.run(step, np.inf if (step, engine.rank) == BAD else 1.0) for step in range(STEPS)])
        run.state = trainer.parameters()
        return run, [entry[0] for entry in fake.log]

    expected = on_devices(3, run)
    plain = amp.optimizer.Momentum
    monkeypatch.setattr(amp.optimizer, "Momentum", lambda *a, **k: distributed.shard_optimizer(plain(*a, **k)))
    found = on_devices(3, run)
    for (dealt, log), (whole, before) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(dealt.losses, whole.losses)
        assert all(np.array_equal(value, whole.state[name]) for name, value in dealt.state.items())
        assert "broadcast" not in before and log.count("broadcast") == 6 * STEPS and log.count("group") == STEPS


# -- streams ---------------------------------------------------------------------------------------------------------
class Logged:
    """A session of a part that writes down when it is given to the device, and how."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        goes_on = options.get_run_config_entry("disable_synchronize_execution_providers")
        log_of[distributed.rank()].append(("part", goes_on))
        self.real.run_with_iobinding(binding, options)


log_of: dict[int, list[tuple[Any, ...]]] = {}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = chain.Chain.__init__

    def made(self: Any, parts: Any, sessions: Any, *rest: Any) -> None:
        real(self, parts, [Logged(session) for session in sessions], *rest)

    monkeypatch.setattr(chain.Chain, "__init__", made)
    yield
    log_of.clear()


@pytest.mark.usefixtures("logged")
def test_sums_travel_beside_the_next_part_and_the_update_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sum begins once the second part is given to the device: were it waited for before, nothing went on."""
    given: dict[int, threading.Event] = {rank: threading.Event() for rank in range(2)}
    travel: Callable[..., None] = buckets._Call.run

    def late(self: buckets._Call, engine: Any, mark: Any) -> None:
        if not any(entry[0] == "allreduce" for entry in log_of[engine.rank]):
            assert given[engine.rank].wait(20)
        travel(self, engine, mark)

    def run(engine: NcclEngine, fake: Fake) -> list[tuple[Any, ...]]:
        log_of[engine.rank] = fake.log
        real = engine.mark

        def mark() -> Any:
            made = real()
            if made.number == 2:
                given[engine.rank].set()
            return made

        engine.mark = mark  # type: ignore[method-assign]
        trainer = Trainer("mlp", "mixed", engine.place)
        fake.log.clear()
        trainer.train(range(1))
        return fake.log

    monkeypatch.setattr(buckets._Call, "run", late)
    scaled = (0.5, "FLOAT16")
    for log in on_devices(2, run):
        mine = [entry for entry in log if entry[0] in ("part", "mark", "finish")]
        part = ("part", "1")
        assert mine == [part, ("mark", 1), part, ("mark", 2), part, ("finish",)]
        travel = [entry for entry in log if entry not in mine]
        sizes = [entry[1] for entry in travel if entry[0] == "allreduce"]
        assert travel == [
            ("follow", 1),
            ("create_pre_mul_sum", *scaled),
            ("allreduce", sizes[0], sizes[0], scaled, 77),
            ("follow", 2),
            ("allreduce", sizes[1], sizes[1], scaled, 77),
        ]
        assert sum(int(size[len("float16[") : -1]) for size in sizes) >= 3 * 16 * 16
        assert log.index(("mark", 2)) < log.index(travel[2]) and log[-2:] == [part, ("finish",)]


def test_no_copy_is_made_of_what_travels() -> None:
    """The sum is where the part that made the gradients wrote them, and where the next one reads them."""

    def run(engine: NcclEngine, fake: Fake) -> bool:
        trainer = Trainer("mlp", "pure", engine.place)
        trainer.train(range(1))
        plan = next(iter(trainer.exe._tables.programs[trainer.main].plans.values()))
        held = plan.last.idle[0].binding.buckets  # type: ignore[union-attr]
        travelling = {name: value.data_ptr() for name, value in held.views.items()}
        flats = [flat for calls in held._calls.values() for call in calls for flat in call.sent]
        spans = [range(flat.data_ptr(), flat.data_ptr() + flat.tensor_size_in_bytes()) for flat in flats]
        inside = [any(at in span for span in spans) for at in travelling.values()]
        return len(travelling) == 6 > len(flats) and all(inside)

    assert on_devices(2, run) == [True, True]


# -- faults ----------------------------------------------------------------------------------------------------------
def test_a_rank_that_is_gone_aborts_the_others_and_leaves_their_state() -> None:
    logs: dict[int, list[Any]] = {}
    kept: dict[int, bool] = {}

    def run(engine: NcclEngine, fake: Fake) -> None:
        trainer = Trainer("mlp", "mixed", engine.place)
        trainer.train(range(2))
        logs[engine.rank], before = fake.log, trainer.state()
        if engine.rank == 1:
            raise ValueError("out of data")
        try:
            trainer.train(range(2, 3))
        finally:
            kept[engine.rank] = all(np.array_equal(value, before[name]) for name, value in trainer.state().items())

    with pytest.raises(ValueError, match="out of data"):
        on_devices(2, run)
    assert kept == {0: True} and ("abort",) in logs[0] and logs[0][-1] == ("finish",)


def test_a_sum_that_never_comes_is_a_fault_in_time_and_updates_nothing() -> None:
    kept: list[bool] = []

    def run(engine: NcclEngine, fake: Fake) -> None:
        trainer = Trainer("mlp", "mixed", engine.place)
        trainer.train(range(1))
        before, fake.stuck = trainer.state(), True
        try:
            trainer.train(range(1, 2))
        finally:
            kept.append(all(np.array_equal(value, before[name]) for name, value in trainer.state().items()))

    with pytest.raises(DistributedError, match=r"all_reduce mean float16\[.*all ranks wait at it, and nothing comes"):
        on_devices(2, run, timeout=0.7)
    assert kept == [True, True]


# -- places ----------------------------------------------------------------------------------------------------------
def test_on_the_processor_the_engine_beside_carries_the_gradients() -> None:
    def run(engine: NcclEngine, fake: Fake) -> tuple[Run, bool]:
        run = trained("mlp", "fp32", amp.CPUPlace)()
        return run, any(entry[0] == "allreduce" for entry in fake.log)

    found = on_devices(2, run)
    close([each for each, _ in found], distributed.simulate(2, trained("mlp", "fp32")), 0.0)
    assert not any(travelled for _, travelled in found)


def test_a_program_that_exchanges_nothing_runs_where_the_engine_carries_nothing() -> None:
    def run(engine: NcclEngine, fake: Fake) -> bool:
        program = amp.Program()
        with amp.program_guard(program, amp.Program()):
            doubled = amp.data("x", [2], "float32") * 2
        engine.place = amp.CUDAPlace(1)
        feed, exe = {"x": np.ones(2, np.float32)}, amp.Executor(FakeDevice())
        engine.on = None  # type: ignore[method-assign, assignment]
        return float(exe.run(program, feed, [doubled])[0][0]) == 2.0

    assert on_devices(2, run) == [True, True]


def test_steps_on_the_processor_are_reported_as_those_of_the_rank() -> None:
    def run(engine: NcclEngine, fake: Fake) -> int:
        Trainer("mlp", "fp32", amp.CPUPlace()).train(range(1))
        report = distributed.step_report()
        return 0 if report is None else report.bytes

    assert min(on_devices(2, run)) > 0


def test_other_places_are_refused_with_the_way_out() -> None:
    def on_memory(place: Place) -> str:
        with pytest.raises(PlaceError) as error:
            distributed.get_engine().on(place)
        return str(error.value)

    def on_device(engine: NcclEngine, fake: Fake) -> str:
        with pytest.raises(PlaceError) as error:
            engine.on(amp.CUDAPlace(1))
        return str(error.value)

    ways: dict[Place, str] = {
        amp.CUDAPlace(0): "CUDAPlace(0) need amp.distributed.init('nccl')",
        amp.WebGPUPlace(0): "WebGPUPlace(0): no engine carries what lies there. Train them on CPUPlace()",
    }
    for place, way in ways.items():
        assert all(way in said for said in distributed.simulate(2, partial(on_memory, place)))
    for rank, said in enumerate(on_devices(2, on_device)):
        assert said.startswith(f"rank {rank} of the nccl engine is on FakeDevice()") and "get_engine().place" in said


def test_a_step_with_exchanges_is_not_captured() -> None:
    def run(engine: NcclEngine, fake: Fake) -> str:
        trainer = Trainer("mlp", "fp32", engine.place)
        trainer.exe.settings = replace(trainer.exe.settings, cuda_graph=True)
        with pytest.raises(PlaceError) as error:
            trainer.train(range(1))
        return str(error.value)

    assert all("its gradients are exchanged between ranks" in said for said in on_devices(2, run))


def test_each_rank_takes_the_device_of_its_number_on_the_host() -> None:
    """The stand-in has two devices; a rank that sees fewer than there are ranks counts round."""
    wire = Wire(3)

    def run(beside: SimulatedEngine) -> tuple[Any, int]:
        fake = Fake(wire, beside.rank)
        engine = NcclEngine(beside, None, (fake.nccl, fake.cuda))
        with distributed.use_engine(engine):
            return engine.place, distributed.local_rank()

    assert SimulatedEngine.run(3, run) == [(amp.CUDAPlace(0), 0), (amp.CUDAPlace(1), 1), (amp.CUDAPlace(0), 2)]
    assert distributed.simulate(2, lambda: distributed.get_engine().place) == [amp.CPUPlace()] * 2


def test_a_device_that_is_not_there_is_an_error() -> None:
    def beyond(beside: SimulatedEngine) -> None:
        fake = Fake(Wire(1), 0)
        with pytest.raises(PlaceError, match=r"rank 0 of the nccl engine is to be on CUDAPlace\(5\), and finds 2 CUDA"):
            NcclEngine(beside, amp.CUDAPlace(5), (fake.nccl, fake.cuda))
        fake.cuda.Device.get_all_devices = None
        with pytest.raises(PlaceError, match="rank 0 of the nccl engine finds no CUDA device: 'NoneType' object"):
            NcclEngine(beside, None, (fake.nccl, fake.cuda))

    SimulatedEngine.run(1, beyond)


@pytest.mark.parametrize(("engine", "place"), [("mpi", amp.CUDAPlace(0)), ("nccl", amp.CPUPlace())])
def test_a_place_is_for_nccl(engine: str, place: Any) -> None:
    with pytest.raises(amp.errors.ArgumentError, match=r"place is .*; expected a CUDAPlace, with init\('nccl'\) alone"):
        distributed.init(engine, place=place)
