"""Training that goes on from a checkpoint gives the bits of training that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import amp_transpiler as amp
from tests.helpers.checkpoints import BAD, CASES, HALF, MODES, OPTIMIZERS, SCALINGS, STEPS, build, digest, state
from tests.helpers.scaler_rules import PRESETS
from tests.helpers.where import ROOT


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.checkpoints", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("mode", "scaling"), [("fp32", "none"), *((mode, scaling) for mode in MODES[1:] for scaling in SCALINGS)]
)
def test_resume_is_bit_for_bit(optimizer: str, mode: str, scaling: str, tmp_path: Path) -> None:
    net = build(optimizer, mode, scaling)
    scope = net.start()
    before = net.train(scope, 0, HALF)
    saved = state(net.main, scope)
    amp.save_checkpoint(tmp_path / "saved", net.main, scope)
    assert state(net.main, scope) == saved
    rest = net.train(scope, HALF, STEPS)

    fresh = amp.Scope()
    loaded = amp.load_checkpoint(tmp_path / "saved", net.main, fresh)
    assert loaded.exact
    assert state(net.main, fresh) == saved
    assert net.train(fresh, HALF, STEPS) == rest
    assert state(net.main, fresh) == state(net.main, scope)
    if net.checked and scaling == "dynamic":  # the run was worth the test
        scale = net.optimizer.get_loss_scaling().name
        assert saved[scale] != state(net.main, scope)[scale]
        assert BAD[0] < HALF <= BAD[1] < STEPS
    assert len(set(before + rest)) >= STEPS - 2  # two steps are bad, and two losses in bfloat16 may be one number


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("saved_at", [HALF, HALF + 1])
def test_schedule_average_and_window(mode: str, saved_at: int, tmp_path: Path) -> None:
    """Also in the middle of a window of accumulation (which only decorated optimizers have)."""
    windowed = {} if mode == "fp32" else {"window": 3}
    net = build("Adam", mode, "dynamic", True, average=True, **windowed)
    scope = net.start()
    net.train(scope, 0, saved_at)
    amp.save_checkpoint(tmp_path / "saved", net.main, scope)
    rest = net.train(scope, saved_at, STEPS + 4)
    again, fresh = build("Adam", mode, "dynamic", True, average=True, **windowed), amp.Scope()
    assert amp.load_checkpoint(tmp_path / "saved", again.main, fresh).exact
    assert again.train(fresh, saved_at, STEPS + 4) == rest
    assert state(again.main, fresh) == state(net.main, scope)
    names = {name.split("_0")[0] for name in state(net.main, scope)}
    assert {"lr_step", "ema_step"} | ({"micro_step"} if windowed else set()) <= names


#: Paddle's rule with an alarm, which has counters of its own.
ALARM = {"max_bad_in_a_row": 9, "error_at_floor": True}


def test_no_preset_is_left_out() -> None:
    made = [name for name, found in vars(amp.LossScaler).items() if isinstance(found, classmethod) and name[0] != "_"]
    assert sorted(made) == sorted(PRESETS)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_scaler_preset(preset: str, mode: str, tmp_path: Path) -> None:
    changes = {} if preset == "fixed" else {"init_scale": 64.0, **(ALARM if preset == "paddle" else {})}
    net = build("Momentum", mode, getattr(amp.LossScaler, preset)(**changes))
    scope = net.start()
    net.train(scope, 0, HALF)
    amp.save_checkpoint(tmp_path / "saved", net.main, scope)
    rest = net.train(scope, HALF, STEPS)
    fresh = amp.Scope()
    assert amp.load_checkpoint(tmp_path / "saved", net.main, fresh).exact
    assert net.train(fresh, HALF, STEPS) == rest
    assert state(net.main, fresh) == state(net.main, scope)


def test_after_startup_and_amp_init(tmp_path: Path) -> None:
    net = build()
    scope = net.start()
    net.train(scope, 0, HALF)
    amp.save_checkpoint(tmp_path / "saved", net.main, scope)
    rest = net.train(scope, HALF, STEPS)
    other = net.start()
    net.train(other, 1, 3)
    amp.load_checkpoint(tmp_path / "saved", net.main, other)
    net.optimizer.amp_init(net.exe.place, other)
    assert net.train(other, HALF, STEPS) == rest


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16", "pure-bf16"])
def test_on_cuda(mode: str, tmp_path: Path) -> None:
    """Tensors come from the device, whole; the checkpoint loads on either place."""
    net = build("Adam", mode, "dynamic", place=amp.CUDAPlace(0))
    scope = net.start()
    net.train(scope, 0, HALF)
    amp.save_checkpoint(tmp_path / "saved", net.main, scope)
    saved, rest = state(net.main, scope), net.train(scope, HALF, STEPS)
    fresh, on_cpu = amp.Scope(), amp.Scope()
    amp.load_checkpoint(tmp_path / "saved", net.main, fresh)
    assert net.train(fresh, HALF, STEPS) == rest
    assert state(net.main, fresh) == state(net.main, scope)
    there = build("Adam", mode, "dynamic")
    amp.load_checkpoint(tmp_path / "saved", there.main, on_cpu)
    assert state(there.main, on_cpu) == saved
    there.train(on_cpu, HALF, HALF + 1)


def test_fresh_processes(tmp_path: Path) -> None:
    run("part", tmp_path)
    results = json.loads(run("rest", tmp_path))
    for case, (found, losses) in zip(CASES, results, strict=True):
        net = build(*case)
        scope = net.start()
        net.train(scope, 0, HALF)
        expected = [loss.hex() for loss in net.train(scope, HALF, STEPS)]
        assert (found, losses) == (digest(net.main, scope), expected), case


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_saving(tmp_path: Path) -> None:
    result = json.loads(run("kills", tmp_path, 10, 120, 1))
    assert result["kills"] == 10
    assert sum(name.startswith("step_") for name in result["left"]) in (2, 3)  # 3: killed before the oldest went


def test_a_scale_grows_on_under_a_rule_that_is_due_already(tmp_path: Path) -> None:
    """Counts are compared for equality, so one beyond the rule's would have met it at the next bad step alone."""
    slow, fast = (build(scaling=amp.LossScaler(init_scale=8.0, growth_every=n)) for n in (1000, 2))
    scope, later = slow.start(), fast.start()
    slow.train(scope, 0, 8)
    amp.save_checkpoint(tmp_path / "c", slow.main, scope)
    with pytest.warns(UserWarning, match="computes something else"):
        amp.load_checkpoint(tmp_path / "c", fast.main, later)
    fast.train(later, 8, 9)
    assert later.find_var("loss_scaling_0").item() == 16.0
