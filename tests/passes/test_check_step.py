"""The step checker accepts what minimize emits, and rejects every mutation of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.errors import ArgumentError, StepError
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.step_check.check_lowered import check_lowered
from tests.corpora.check_lowered_corpus import LOWERED, ON_CPU, ON_CUDA
from tests.corpora.check_step_corpus import (
    FEEDS,
    PROGRAMS,
    Case,
    built,
    looped,
    ratios_out_of_range,
    step_counter_of_the_user,
    ungated_statistics,
)
from tests.helpers.programs import build
from tests.helpers.scaler_rules import PRESETS
from tests.helpers.sessions import session


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Momentum, optim.Adam, optim.AdamW, optim.Lamb])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_minimize_emits_is_accepted(pure: bool, optimizer: Any, dynamic: bool) -> None:
    program = built(pure, optimizer(multi_precision=True), use_dynamic_loss_scaling=dynamic)
    for place in (amp.CPUPlace(), amp.CUDAPlace(0)):
        amp.check_step(program, place, FEEDS)


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_scaler_average_and_schedule_is_accepted(pure: bool, preset: str) -> None:
    program = built(pure, average=True, scaler=getattr(amp.LossScaler, preset)(max_bad_in_a_row=9))
    for place in (amp.CPUPlace(), amp.CUDAPlace(0)):
        amp.check_step(program, place, FEEDS)


@pytest.mark.parametrize("pure", [False, True])
def test_loops_of_the_users_own_and_windows_are_accepted(pure: bool) -> None:
    window = built(pure, average=True, accumulate_steps=3, scaler=amp.LossScaler.deepspeed())
    for program in (looped(pure), window):
        for place in (amp.CPUPlace(), amp.CUDAPlace(0)):
            amp.check_step(program, place, FEEDS)


@pytest.mark.parametrize("mode", ["amp", "pure-fp16"])
@pytest.mark.parametrize("name", ["use_case", "mlp", "resnet", "transformer"])
def test_whole_networks_are_accepted(name: str, mode: str) -> None:
    net = build(name, mode)
    for place in (amp.CPUPlace(), amp.CUDAPlace(0)):
        amp.check_step(net.main, place, {feed: value.shape for feed, value in net.feeds.items()})


def test_a_place_whose_steps_are_not_proved_is_refused_and_not_called_broken() -> None:
    with pytest.raises(ArgumentError, match="made of other operators, which are not proved; give CPUPlace"):
        amp.check_step(built(True, optim.Adam(multi_precision=True)), amp.WebGPUPlace(0), FEEDS)


def named(case: Case) -> str:
    return case.mutate.__name__


@pytest.mark.parametrize("case", PROGRAMS, ids=named)
def test_mutations_of_a_program_are_rejected(case: Case) -> None:
    program = built(**case.options)
    amp.check_step(program)
    case.mutate(program)
    with pytest.raises(StepError, match=case.message):
        amp.check_step(program)


def test_the_corpus_is_not_small() -> None:
    assert (
        len({named(case) for case in PROGRAMS}) >= 15
        and len({named(case) for case in LOWERED + ON_CPU + ON_CUDA}) >= 15
    )


def test_every_violation_is_listed() -> None:
    program = built()
    for mutate in (ungated_statistics, step_counter_of_the_user, ratios_out_of_range):
        mutate(program)
    with pytest.raises(StepError) as raised:
        amp.check_step(program)
    assert len(str(raised.value).splitlines()) == 4


@pytest.mark.parametrize(
    "case, place",
    [
        *((case, place) for case in LOWERED for place in ("cpu", "cuda")),
        *((case, "cpu") for case in ON_CPU),
        *((case, "cuda") for case in ON_CUDA),
    ],
    ids=lambda item: named(item) if isinstance(item, Case) else item,
)
def test_mutations_of_the_lowered_model_are_rejected(case: Case, place: str) -> None:
    program = built(**case.options)
    lowered = lower(program, place, FEEDS)
    check_lowered(program, lowered)
    case.mutate(lowered)
    with pytest.raises(StepError, match=case.message):
        check_lowered(program, lowered)


@pytest.mark.parametrize("pure", [False, True])
def test_gates_survive_the_runtimes_optimiser(pure: bool, tmp_path: Path) -> None:
    program = built(pure)
    lowered = lower(program, "cpu", FEEDS)
    session(lowered.model, written=tmp_path / "optimised.onnx")
    check_lowered(program, dataclasses.replace(lowered, model=onnx.load(tmp_path / "optimised.onnx")))
