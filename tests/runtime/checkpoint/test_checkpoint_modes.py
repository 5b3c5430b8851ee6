"""A checkpoint of one precision restored into a program of another."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import CheckpointMismatchError, PrecisionError
from amp_transpiler.ir.types import HALF as SIXTEEN
from amp_transpiler.runtime.checkpoint.state_slots import MASTER, state_slots
from amp_transpiler.warn import AmpWarning
from tests.helpers.checkpoints import HALF, MODES, Small, build, state

FP16_MODES = ("pure-fp16", "pure-bf16")


def trained(mode: str, folder: Path, optimizer: str = "Adam", **options: object) -> tuple[Small, amp.Scope]:
    """A net after some steps, saved in ``folder``."""
    net = build(optimizer, mode, "dynamic", **options)
    scope = net.start()
    net.train(scope, 0, HALF)
    amp.save_checkpoint(folder, net.main, scope)
    return net, scope


def values(net: Small, scope: amp.Scope) -> dict[tuple[str, str], np.ndarray]:
    """State by role and what it belongs to, whatever it is called."""
    return {(s.role, f"{s.of}{s.number or ''}"): scope.find_var(v.name) for v, s in state_slots(net.main).items()}


def best(found: dict[tuple[str, str], np.ndarray], name: str) -> np.ndarray:
    """The master weight of a parameter, or the parameter that is its own."""
    return found.get(("master", name), found["parameter", name])


@pytest.mark.parametrize("optimizer", ["Momentum", "Adam"])
@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("source", MODES)
def test_every_mode_into_every_mode(source: str, target: str, optimizer: str, tmp_path: Path) -> None:
    old, before = trained(source, tmp_path / "c", optimizer)
    net, scope = build(optimizer, target, "dynamic"), amp.Scope()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = amp.load_checkpoint(tmp_path / "c", net.main, scope)
    assert loaded.exact == (source == target)
    assert loaded.missing == loaded.unused == ()
    was, now, initial = values(old, before), values(net, scope), values(net, net.start())
    for (role, of), array in now.items():
        if role == MASTER:
            assert array.dtype == np.float32
            assert array.tobytes() == best(was, of).astype(np.float32).tobytes()
        elif role == "parameter":
            assert array.tobytes() == best(was, of).astype(array.dtype).tobytes()
        elif (role, of) in was:
            assert array.tobytes() == was[role, of].tobytes(), (role, of)
        else:
            assert role in ("loss_scaling", "unused")
            assert array == initial[role, of]
    net.train(scope, HALF, HALF + 1)


@pytest.mark.parametrize("mode", FP16_MODES)
def test_fp32_to_pure_and_back_keeps_masters(mode: str, tmp_path: Path) -> None:
    first, scope = trained("fp32", tmp_path / "a")
    half, there = build(mode=mode), amp.Scope()
    amp.load_checkpoint(tmp_path / "a", half.main, there)
    assert {v.dtype for v in half.main.parameters} & SIXTEEN
    amp.save_checkpoint(tmp_path / "b", half.main, there)
    back = amp.Scope()
    amp.load_checkpoint(tmp_path / "b", first.main, back)
    assert state(first.main, back) == state(first.main, scope)


def test_masters_are_never_stale(tmp_path: Path) -> None:
    """Neither from the scope, nor from a parameter that the checkpoint's master has left behind."""
    trained("fp32", tmp_path / "a")
    net = build(mode="pure-fp16")
    used = net.start()
    net.train(used, 0, 3)
    fresh = amp.Scope()
    for scope in (used, fresh):
        amp.load_checkpoint(tmp_path / "a", net.main, scope)
    scaling = {v.name for v, s in state_slots(net.main).items() if s.role == "loss_scaling"}
    one, other = state(net.main, used), state(net.main, fresh)
    assert {n: b for n, b in one.items() if n not in scaling} == {n: b for n, b in other.items() if n not in scaling}
    for variable, slot in state_slots(net.main).items():
        if slot.role == MASTER:
            parameter = fresh.find_var(slot.of)
            assert np.array_equal(fresh.find_var(variable.name).astype(parameter.dtype), parameter)


@pytest.mark.filterwarnings("ignore:Adam without multi_precision")
def test_without_masters(tmp_path: Path) -> None:
    """A 16-bit parameter without a master is widened, and rounded from fp32."""
    narrow, scope = trained("pure-fp16", tmp_path / "a", multi_precision=False)
    wide, there = build(mode="fp32"), amp.Scope()
    amp.load_checkpoint(tmp_path / "a", wide.main, there)
    again = amp.Scope()
    amp.save_checkpoint(tmp_path / "b", wide.main, there)
    amp.load_checkpoint(tmp_path / "b", narrow.main, again)
    for parameter in narrow.main.parameters:
        assert np.array_equal(there.find_var(parameter.name), scope.find_var(parameter.name).astype(np.float32))
        assert np.array_equal(again.find_var(parameter.name), scope.find_var(parameter.name))


@pytest.mark.parametrize("mode", MODES)
def test_test_program_is_the_same_after_a_restart(mode: str, tmp_path: Path) -> None:
    net = build(mode=mode)
    scope = amp.Scope()
    net.exe.run(net.startup, scope=scope)
    if mode != "fp32":
        net.optimizer.amp_init(net.exe.place, scope, net.test)
    net.train(scope, 0, HALF)

    feed = net.feed(1)["x"]
    before = net.exe.run(net.test, {"x": feed}, [net.output.name], scope=scope)[0]
    amp.save_checkpoint(tmp_path / "c", net.main, scope)
    for program in (net.main, net.test):  # a program that only infers takes what it has
        fresh = amp.Scope()
        amp.load_checkpoint(tmp_path / "c", program, fresh)
        after = net.exe.run(net.test, {"x": feed}, [net.output.name], scope=fresh)[0]
        assert np.isfinite(before.astype(np.float32)).all()
        assert before.tobytes() == after.tobytes()


def test_statistics_survive(tmp_path: Path) -> None:
    old, scope = trained("fp32", tmp_path / "a")
    net, there = build(mode="pure-fp16"), amp.Scope()
    amp.load_checkpoint(tmp_path / "a", net.main, there)
    names = [v.name for v, s in state_slots(old.main).items() if s.role == "statistics"]
    assert len(names) == 2
    for name in names:
        assert there.find_var(name).dtype == np.float32
        assert np.array_equal(there.find_var(name), scope.find_var(name))
        assert np.ptp(there.find_var(name)) > 0


def test_a_parameter_beyond_fp16(tmp_path: Path) -> None:
    net, scope = trained("fp32", tmp_path / "a")
    name = net.main.parameters[0].name
    large = scope.find_var(name)
    large.flat[0] = 70000
    scope.set_var(name, large)
    amp.save_checkpoint(tmp_path / "a", net.main, scope)
    half, there = build(mode="pure-fp16"), amp.Scope()
    there.set_var(name, np.zeros(3, np.float32))
    with pytest.raises(PrecisionError, match=rf"'{name}' does not fit float16: its largest value is 70000"):
        amp.load_checkpoint(tmp_path / "a", half.main, there)
    assert there.var_names() == [name]
    amp.load_checkpoint(tmp_path / "a", build(mode="pure-bf16").main, amp.Scope())


def test_another_optimizer(tmp_path: Path) -> None:
    """Strict names what is missing; otherwise it starts from the startup program, or stays as it is in the scope."""
    trained("fp32", tmp_path / "a", "SGD")
    net, scope = build("Adam", "pure-fp16"), amp.Scope()
    with pytest.raises(CheckpointMismatchError, match="moment1_0") as caught:
        amp.load_checkpoint(tmp_path / "a", net.main, scope)
    moments = {v.name for v, s in state_slots(net.main).items() if "moment" in s.role or "pow" in s.role}
    assert set(caught.value.missing) == moments and not caught.value.extra and not caught.value.wrong
    assert scope.var_names() == []
    loaded = amp.load_checkpoint(tmp_path / "a", net.main, scope, strict=False)
    assert set(loaded.missing) == moments
    fresh = net.start()
    for name in moments:
        assert np.array_equal(scope.find_var(name), fresh.find_var(name))
    net.train(scope, 0, 2)
    kept = {name: scope.find_var(name) for name in moments}
    amp.load_checkpoint(tmp_path / "a", net.main, scope, strict=False)
    assert all(np.array_equal(kept[name], scope.find_var(name)) for name in moments)


def test_accumulation_begins_anew(tmp_path: Path) -> None:
    """A window that is not stored starts at its beginning, with the running statistics that are; one is left, too."""
    plain, scope = trained("amp", tmp_path / "a")
    net = build(mode="pure-fp16", window=3)
    used = net.start()
    net.train(used, 0, 2)
    for target in (used, amp.Scope()):
        loaded = amp.load_checkpoint(tmp_path / "a", net.main, target)
        assert not loaded.exact and loaded.missing == ()
        for variable, slot in state_slots(net.main).items():
            if slot.role in ("accumulated", "micro_step"):
                assert not target.find_var(variable.name).any()
            if slot.role == "before_window":
                assert np.array_equal(target.find_var(variable.name), scope.find_var(slot.of))
    net.train(used, 0, 2)
    amp.save_checkpoint(tmp_path / "b", net.main, used)
    assert amp.load_checkpoint(tmp_path / "b", plain.main, scope).unused == ()


@pytest.mark.parametrize(("runs", "other"), [(5, 2), (2, 5), (3, None)])
def test_a_window_of_another_number_of_runs_begins_anew(runs: int, other: int | None, tmp_path: Path) -> None:
    net = build(mode="amp", window=runs)
    scope = net.start()
    net.train(scope, 0, runs - 1)
    amp.save_checkpoint(tmp_path / "a", net.main, scope)
    target = build(mode="amp", **{} if other is None else {"window": other})
    has = "none" if other is None else f"windows of {other}"
    with pytest.warns(AmpWarning, match=rf"after {runs - 1} of the {runs} runs of a window .* has {has}: the grad"):
        loaded = amp.load_checkpoint(tmp_path / "a", target.main, scope := amp.Scope())
    assert not loaded.exact and loaded.unused == ()
    kinds = [v.name for v, slot in state_slots(target.main).items() if slot.role in ("accumulated", "micro_step")]
    assert bool(kinds) == (other is not None) and not any(scope.find_var(name).any() for name in kinds)


@pytest.mark.parametrize("mode", ["amp", "pure-bf16"])
def test_a_fixed_scale_is_not_that_of_a_checkpoint_whose_scale_moves(mode: str, tmp_path: Path) -> None:
    net, scope = trained("amp", tmp_path / "a")
    assert net.optimizer.get_loss_scale_state(scope).scale != 4.0
    fixed = build(mode=mode, scaling=amp.LossScaler.fixed(4.0))
    loaded = amp.load_checkpoint(tmp_path / "a", fixed.main, scope := amp.Scope())
    assert not loaded.exact and fixed.optimizer.get_loss_scale_state(scope).scale == 4.0


LAYERS = (["fc_0*"], ["fc_1*"], ["batch_norm_0*"])


def parts(*rates: float) -> list[dict[str, object]]:
    """A group for each layer that has a rate: one part of the optimizer for each rate that there is."""
    return [{"params": names, "learning_rate": rate} for names, rate in zip(LAYERS, rates, strict=False)]


@pytest.mark.parametrize(("saved", "loaded"), [((1, 1, 1), (0.1, 1, 2)), ((0.1, 1, 2), (1, 1, 1))])
def test_other_parts_of_the_optimizer(saved: tuple[float, ...], loaded: tuple[float, ...], tmp_path: Path) -> None:
    """Rates of layers may change: every part goes on with the beta powers that all had."""
    _, scope = trained("pure-fp16", tmp_path / "a", parameter_list=parts(*saved))
    net, fresh = build(parameter_list=parts(*loaded)), amp.Scope()
    assert not amp.load_checkpoint(tmp_path / "a", net.main, fresh).exact
    powers = [v.name for v, slot in state_slots(net.main).items() if slot.role == "beta1_pow_acc"]
    assert len(powers) == len(set(loaded))
    for name in powers:
        assert fresh.find_var(name) == scope.find_var("adam_beta1_pow_acc_0") != np.float32(0.9)


def test_a_layer_that_trains_from_now_on_begins_its_counts(tmp_path: Path) -> None:
    """As its moments do, while the layer that was trained goes on, whatever the number of its part is now."""
    trained("pure-fp16", tmp_path / "a", parameter_list=[{"params": LAYERS[1]}])
    net, fresh = build(parameter_list=parts(0.1, 1)), amp.Scope()
    loaded = amp.load_checkpoint(tmp_path / "a", net.main, fresh, strict=False)
    first, second = (v.name for v, slot in state_slots(net.main).items() if slot.role == "beta1_pow_acc")
    assert first in loaded.missing and fresh.find_var(first) == np.float32(0.9)
    assert second not in loaded.missing and fresh.find_var(second) < np.float32(0.7)


def test_it_is_told_where_it_begins_beside_what_goes_on(tmp_path: Path) -> None:
    """With a rate of its own it has powers of its own; else it has those of many steps, and moments that begin."""
    trained("pure-fp16", tmp_path / "a", parameter_list=[{"params": LAYERS[1]}])
    net = build(parameter_list=[*LAYERS[0], *LAYERS[1]])
    with pytest.warns(UserWarning, match=r"'fc_0\.w_0'.* begin there beside parameters that go on.*'learning_rate'"):
        amp.load_checkpoint(tmp_path / "a", net.main, amp.Scope(), strict=False)
