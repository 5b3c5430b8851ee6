"""Optimizer state that is dealt out among ranks: the bits are those without, each rank holds a part, files are the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.runtime import shards
from amp_transpiler.runtime.collective.simulated import SimulatedEngine
from tests.helpers.sharded import Net

Result = TypeVar("Result")
CLIP = {"grad_clip": amp.optimizer.ClipGradByGlobalNorm(0.05)}
CASES: dict[str, dict[str, Any]] = {
    "fp32 momentum": {"mode": "fp32", "kind": "Momentum"},
    "fp32 lamb": {"mode": "fp32", "kind": "Lamb", "more": CLIP},
    "mixed adagrad": {"mode": "mixed", "kind": "Adagrad"},
    "mixed adamw groups": {"mode": "mixed", "kind": "AdamW", "groups": True, "more": CLIP},
    "pure sgd": {"kind": "SGD"},
    "pure adam, in a window": {"kind": "Adam", "more": {"weight_decay": 0.1}, "accumulate_steps": 2},
    "pure bf16 lars": {"kind": "Lars", "dtype": "bfloat16"},
    # more parameters than lie by themselves: gradients are checked, clipped and unscaled together
    "pure adam, many": {"kind": "AdamW", "layers": 32, "width": 4, "more": CLIP},
    "fewer parameters than ranks": {"kind": "Momentum", "layers": 0, "mode": "fp32"},
}


def on_ranks(ranks: int, call: Callable[[], Result]) -> list[Result]:
    return distributed.simulate(ranks, call) if ranks > 1 else [call()]


@pytest.mark.parametrize("ranks, case", [(2 if "many" in case else 4, case) for case in CASES])
def test_the_bits_are_those_without(case: str, ranks: int) -> None:
    """With a bad step of one rank among them."""

    def trained(shard: bool) -> Callable[[], tuple[str, dict[str, bytes], int]]:
        def run() -> tuple[str, dict[str, bytes], int]:
            net = Net(shard, **CASES[case])
            bad = CASES[case].get("mode") != "fp32" and distributed.rank() == 1
            losses = [net.step(number, np.inf if bad and number == 2 else 1.0) for number in range(4)]
            distributed.check_equal(net.main, net.scope)
            return repr(losses), net.state(), sum(map(net.scope.has_var, net.names()))

        return run

    whole, dealt_out = (on_ranks(ranks, trained(shard)) for shard in (False, True))
    assert [each[:2] for each in whole] == [each[:2] for each in dealt_out]
    assert all(held < len(state) == whole[0][2] for _, state, held in dealt_out)


def test_a_bad_step_leaves_every_part_and_the_scale_falls_once() -> None:
    def run() -> tuple[dict[str, bytes], dict[str, bytes], amp.LossScale]:
        net = Net(True)
        net.step(0)
        before = net.state()
        net.step(1, np.inf if distributed.rank() == 0 else 1.0)
        return before, net.state(), net.optimizer.get_loss_scale_state(net.scope)

    for before, after, scale in distributed.simulate(2, run):
        changed = {name.rstrip("_0123456789") for name in before if before[name] != after[name]}
        assert changed == {"loss_scaling", "num_good_steps"} and scale.scale == 800.0


def test_each_rank_holds_its_part_alone_from_the_first_moment_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of masters and moments: a fourth, also while the startup program runs."""
    most: dict[int, int] = {}
    hold = amp.Scope.hold

    def watched(scope: amp.Scope, values: Any) -> None:
        hold(scope, values)
        kept = sum(v.tensor_size_in_bytes() for name, v in scope.ort_values.items() if "master" in name)
        most[distributed.rank()] = max(kept, most.get(distributed.rank(), 0))

    def run() -> tuple[int, int, int]:
        net = Net(True, layers=4, width=32)
        net.step(0)
        net.step(1)
        estimate = net.main.memory_estimate({"x": (4, 6), "label": (4, 1)}, rank=distributed.rank())
        sizes = {v.name: int(np.prod(v.shape)) * 4 for v in net.main.variables if "master" in v.name and v.persistable}
        held = sum(size for name, size in sizes.items() if net.scope.has_var(name))
        assert abs(held - estimate.master_weights - estimate.moments) < 1024  # parts of flat buffers begin at 512 bytes
        return held, sum(sizes.values()), most[distributed.rank()]

    monkeypatch.setattr(amp.Scope, "hold", watched)
    found = distributed.simulate(4, run)
    whole = found[0][1]
    assert sum(held for held, _, _ in found) == whole
    assert all(held < 0.35 * whole and ever == held for held, _, ever in found)


def test_the_default_of_a_forecast_is_the_fullest_rank() -> None:
    net = distributed.simulate(3, lambda: Net(True))[0]
    feeds = {"x": (4, 6), "label": (4, 1)}
    sizes = [net.main.memory_estimate(feeds, rank=rank).moments for rank in range(3)]
    assert net.main.memory_estimate(feeds).moments == max(sizes) > min(sizes)


def test_parameters_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = list[int]()
    copied = SimulatedEngine.all_gather

    def counted(engine: SimulatedEngine, *given: Any, **more: Any) -> Any:
        pieces.append(engine.rank)
        return copied(engine, *given, **more)

    monkeypatch.setattr(SimulatedEngine, "all_gather", counted)

    def run() -> tuple[list[float], list[str]]:
        net = Net(True)
        losses = [net.step(number) for number in range(3)]
        distributed.check_equal(net.main, net.scope)
        assert distributed.step_report().exchanges[-1].name == "parameters"
        return losses, sorted(map(repr, net.state().items()))

    expected, whole = distributed.simulate(2, run), len(pieces)
    monkeypatch.setattr(shards, "_ROOM", 74)  # bytes: pieces that end within a parameter
    assert distributed.simulate(2, run) == expected
    assert len(pieces) - whole > 2 * whole > 0


def test_one_rank_alone_neither_saves_nor_trains_what_lies_on_others(tmp_path: Path) -> None:
    def run() -> Net:
        net = Net(True)
        net.step(0)
        return net

    net, _ = distributed.simulate(2, run)
    with pytest.raises(amp.AmpError, match="lies on another rank, which does not send it; call this on all ranks"):
        amp.save_checkpoint(tmp_path / "state", net.main, net.scope)
    assert not any(tmp_path.iterdir())
    with pytest.raises(amp.AmpError, match="8 more of its variables.* not in the scope"):
        net.step(1)


def test_averages_are_dealt_out_and_applied_everywhere() -> None:
    def run(shard: bool) -> Callable[[], tuple[dict[str, bytes], list[bytes], dict[str, bytes]]]:
        def go() -> tuple[dict[str, bytes], list[bytes], dict[str, bytes]]:
            net = Net(shard, ema=True)
            assert net.ema is not None
            net.step(0)
            net.step(1)
            state = net.state()
            with net.ema.applied(net.scope):
                averaged = [net.scope.find_var(v.name).tobytes() for v in net.main.parameters]
            assert shard != all(map(net.scope.has_var, (f"{v.name}_ema_0" for v in net.main.parameters)))
            net.ema.copy_to(net.scope)
            return state, averaged, net.state()

        return go

    assert distributed.simulate(2, run(True)) == distributed.simulate(2, run(False))


# -- files ---------------------------------------------------------------------------------------------------
def test_checkpoints_and_what_follows_are_the_same_in_any_mixture(tmp_path: Path) -> None:
    """1, 2, 4, 1 ranks, dealt out or not on each: the same files byte for byte, the same losses."""

    def leg(shard: bool, number: int, source: Path | None, target: Path) -> Callable[[], tuple[float, list[str]]]:
        def run() -> tuple[float, list[str]]:
            net = Net(shard)
            if source is not None:
                assert amp.load_checkpoint(source, net.main, net.scope).exact
            return net.step(number), net.saved(target)

        return run

    found = set()
    for pattern in ((False,) * 4, (True, True, False, True), (False, False, True, False)):
        source, seen = None, []
        for number, (ranks, shard) in enumerate(zip((1, 2, 4, 1), pattern, strict=True)):
            target = tmp_path / f"{pattern} {number}"
            seen.append(on_ranks(ranks, leg(shard, number, source, target)))
            source = target
        found.add(repr(seen))
    assert len(found) == 1


def test_a_write_that_fails_is_an_error_on_all_ranks_and_no_rank_waits(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def run() -> str:
        net = Net(True)
        with pytest.raises(amp.AmpError) as error:
            amp.save_checkpoint(tmp_path / "file", net.main, net.scope)
        assert net.step(0) > 0
        return str(error.value)

    first, second = distributed.simulate(2, run, timeout=10.0)
    assert "cannot be written" in first and second.startswith("rank 0 failed where the others waited for it: ")


@pytest.mark.parametrize(("ranks", "shard"), [(2, False), (4, True), (1, True)])
def test_an_open_window_goes_on_with_what_all_ranks_had_added_up(ranks: int, shard: bool, tmp_path: Path) -> None:
    """On as many ranks as before, on more, and on one."""

    def run(first: int, last: int, load: Path | None, save: Path | None) -> Callable[[], dict[str, np.ndarray]]:
        def go() -> dict[str, np.ndarray]:
            net = Net(shard, kind="Momentum", accumulate_steps=3)
            if load is not None:
                amp.load_checkpoint(load, net.main, net.scope)
            for number in range(first, last):
                net.step(number)
            if distributed.world_size() > 1:
                distributed.check_equal(net.main, net.scope)
            if save is not None:
                amp.save_checkpoint(save, net.main, net.scope)
            names = [name for name in net.names() if name.endswith("_fp32_master_0")]
            return {name: np.copy(distributed.find_var(name, net.scope)) for name in names}

        return go

    begun, whole = (on_ranks(2, run(0, last, None, save))[0] for last, save in ((5, tmp_path / "state"), (6, None)))
    for found in on_ranks(ranks, run(5, 6, tmp_path / "state", None)):
        for name, master in whole.items():
            np.testing.assert_allclose(found[name] - begun[name], master - begun[name], rtol=0.02, atol=2e-6)


def test_weights_of_a_file_reach_parameters_everywhere_and_masters_where_they_lie(tmp_path: Path) -> None:
    given = np.linspace(-1, 1, 72, dtype=np.float32).reshape(6, 12) / 3
    np.savez(tmp_path / "weights.npz", **{"fc_0.w_0": given})

    def run() -> tuple[bytes, bytes]:
        net = Net(True)
        loaded = amp.load_weights(tmp_path / "weights.npz", net.main, net.scope, strict=False)
        assert set(loaded.loaded) == {"fc_0.w_0", "fc_0.w_0_fp32_master_0"}
        return tuple(net.state()[name] for name in ("fc_0.w_0", "fc_0.w_0_fp32_master_0"))  # type: ignore[return-value]

    assert distributed.simulate(2, run) == [(given.astype(np.float16).tobytes(), given.tobytes())] * 2


def test_models_leave_as_ever_and_training_programs_say_where_state_is(tmp_path: Path) -> None:
    def run() -> bytes:
        net = Net(True, "mixed")
        net.step(0)
        with pytest.raises(amp.errors.ScopeError, match=r"lies in the scope of rank \d alone.*distributed.find_var"):
            net.main.to_onnx(scope=net.scope)
        again = amp.Program.from_onnx(net.main.to_onnx())
        owners = {v.name: v.owner for v in net.main.variables if v.owner is not None}
        assert owners == {v.name: v.owner for v in again.variables if v.owner is not None} and set(owners.values()) == {
            0,
            1,
        }
        return net.test.to_onnx(scope=net.scope).SerializeToString(deterministic=True)

    first, second = distributed.simulate(2, run)
    assert first == second


# -- the scope -----------------------------------------------------------------------------------------------
def test_a_scope_says_where_a_variable_lies_and_takes_what_is_set() -> None:
    def run() -> None:
        net = Net(True, mode="pure")
        master = "fc_0.w_0_fp32_master_0"
        owner = net.main.var(master).owner
        assert net.main.var("fc_0.w_0").owner == owner and owner is not None
        if distributed.rank() != owner:
            with pytest.raises(amp.errors.ScopeError, match=rf"'{master}' lies in the scope of rank {owner} alone"):
                net.scope.find_var(master)
        with pytest.raises(
            amp.errors.ScopeError, match=f"fetch_list: '{master}' lies in the scope of rank {owner} alone"
        ):
            net.exe.run(net.main, {}, [master], net.scope)
        for name, value in (("fc_0.w_0", 0.3), (master, 0.1)):
            wide = np.full((6, 12), value, np.float32)
            net.scope.set_var(name, wide)
            assert distributed.find_var(master, net.scope).tobytes() == wide.tobytes()
            assert net.scope.find_var("fc_0.w_0").tobytes() == wide.astype(np.float16).tobytes()
            assert net.scope.has_var(master) == (distributed.rank() == owner)
        distributed.check_equal(net.main, net.scope)
        with pytest.raises(amp.errors.ScopeError, match="no variable 'nothing'"):
            distributed.find_var("nothing", net.scope)

    distributed.simulate(3, run)


def test_steps_are_reported_and_run_again_as_ever(tmp_path: Path) -> None:
    def run(shard: bool) -> Callable[[], tuple[str, ...]]:
        def on_one() -> tuple[str, ...]:
            net = Net(shard, "mixed")
            feed = {
                "x": np.ones((4, 6), np.float32),
                "label": np.zeros((4, 1), np.int64),
                "boost": np.ones(1, np.float32),
            }
            (report,) = net.exe.run(net.main, feed, [amp.StepReports(net.main)], net.scope)
            file = tmp_path / f"{distributed.rank()}.npz"
            bad = feed | {"boost": np.full(1, 1e30, np.float32)}
            amp.save_step(file, net.main, bad, net.scope)
            found = (amp.find_culprit(net.main, bad, net.scope), amp.find_culprit(file))
            return str(report).partition(", sent")[0], *(str(each.operator) for each in found)

        return on_one

    first, second = distributed.simulate(2, run(True))
    assert [first, second] == distributed.simulate(2, run(False))
    assert first[1] == first[2] == "Cast -> multiply_0.tmp_0.cast_fp16"


def test_parameters_that_differ_are_found() -> None:
    def run() -> str:
        net = Net(True)
        if distributed.rank() == 1:
            net.scope.set_var("fc_0.b_0", np.ones(12, np.float16))
        with pytest.raises(amp.AmpError) as error:
            distributed.check_equal(net.main, net.scope)
        return str(error.value)

    assert all("other than rank 0 is 'fc_0.b_0' on rank 1." in said for said in distributed.simulate(2, run))


def test_one_rank_alone_keeps_all() -> None:
    alone, plain = Net(True), Net(False)
    assert [alone.step(n) for n in range(2)] == [plain.step(n) for n in range(2)]
    assert all(v.owner is None for v in alone.main.variables)
    assert {n: alone.scope.find_var(n).tobytes() for n in alone.names()} == {
        n: plain.scope.find_var(n).tobytes() for n in plain.names()
    }


def test_the_switch_takes_optimizers_before_they_are_built() -> None:
    both = [amp.optimizer.SGD(0.1), amp.optimizer.Adam(0.1)]
    assert distributed.shard_optimizer(both) is both and all(each.shard_state for each in both)
    assert distributed.shard_optimizer(amp.decorate(amp.optimizer.Adam(0.1))).optimizers[0].shard_state
    with pytest.raises(amp.errors.ArgumentTypeError, match="shard_optimizer: expected an optimizer or a list of them"):
        distributed.shard_optimizer("adam")
    with pytest.raises(amp.errors.OrderError, match="shard_state is built into program"):
        distributed.shard_optimizer(Net(False).optimizer)


def test_a_second_call_goes_on_where_the_first_left_off() -> None:
    """Of parameters that are applied in two calls each rank gets about as much."""

    def run() -> list[int]:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            x = amp.data("x", [2, 8], "float32")
            loss = amp.nn.functional.mean(amp.nn.fc(amp.nn.fc(x, 8, bias_attr=False), 8, bias_attr=False))
            optimizer = distributed.shard_optimizer(amp.decorate(amp.optimizer.Adam(0.1)))
            for pair in optimizer.backward(loss, startup):
                optimizer.apply_gradients([pair])
        return [p.owner for p in main.parameters]  # type: ignore[misc]

    assert sorted(itertools.chain(*distributed.simulate(2, run))) == [0, 0, 1, 1]
