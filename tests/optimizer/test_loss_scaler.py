"""LossScaler as an object: its numbers, its errors, its state in a program, and its alarm."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import nn, optimizer as optim
from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    GradientError,
    LossScaleError,
    OrderError,
    ScopeError,
)
from amp_transpiler.nn import functional as F
from tests.helpers.scaler_rules import PRESETS


# -- the record ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, scale, growth, backoff",
    [
        ("paddle", 15, (2.0, 1000), (0.8, 2)),
        ("exponential", 32, (2.0, 1000), (0.8, 2)),
        ("torch", 16, (2.0, 2000), (0.5, 1)),
        ("keras", 15, (2.0, 2000), (0.5, 1)),
        ("tf_keras", 15, (2.0, 2000), (0.5, 1)),
        ("apex", 16, (2.0, 2000), (0.5, 1)),
        ("deepspeed", 16, (2.0, 1000), (0.5, 2)),
        ("deepspeed_fused", 16, (2.0, 1000), (0.5, 1)),
        ("megatron", 32, (2.0, 1000), (0.5, 2)),
        ("jmp", 15, (2.0, 2000), (0.5, 1)),
        ("mindspore", 24, (2.0, 2000), (0.5, 1)),
        ("oneflow", 16, (2.0, 2000), (0.5, 1)),
    ],
)
def test_the_numbers_of_a_preset_are_its_sources(
    name: str, scale: int, growth: tuple[float, int], backoff: tuple[float, int]
) -> None:
    scaler = getattr(amp.LossScaler, name)()
    assert scaler.init_scale == 2.0**scale
    assert (scaler.growth_factor, scaler.growth_every) == growth
    assert (scaler.backoff_factor, scaler.backoff_after) == backoff


def test_the_default_is_paddles() -> None:
    assert amp.LossScaler() == amp.LossScaler.paddle()
    assert amp.LossScaler().attributes() == {
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_ratio": 2.0,
        "decr_ratio": 0.8,
    }


@pytest.mark.parametrize("name", PRESETS)
def test_a_scaler_survives_json_and_cannot_be_changed(name: str) -> None:
    """jmp loses its floor on the way through a compiler; here every field is in the record."""
    scaler = getattr(amp.LossScaler, name)(max_bad_in_a_row=7)
    assert amp.LossScaler(**json.loads(json.dumps(dataclasses.asdict(scaler)))) == scaler
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaler.init_scale = 1.0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"init_scale": 0}, "init_scale is 0; expected a number in"),
        ({"init_scale": 1e-46}, "init_scale is 1e-46; expected a number in"),
        ({"init_scale": float("inf")}, "init_scale is inf"),
        ({"init_scale": True}, "init_scale is True"),
        ({"growth_factor": 0.5}, "growth_factor is 0.5"),
        ({"backoff_factor": 1.5}, "backoff_factor is 1.5"),
        ({"backoff_factor": 0}, "backoff_factor is 0"),
        ({"growth_every": 0}, "growth_every is 0; expected a whole number, 1 to 2147483647"),
        ({"backoff_after": 1.0}, "backoff_after is 1.0"),
        ({"growth_delay": -1}, "growth_delay is -1"),
        ({"floor": 0}, "floor is 0"),
        ({"max_bad_in_a_row": -1}, "max_bad_in_a_row is -1"),
        ({"floor": 8, "ceiling": 4}, "floor 8 is above ceiling 4"),
        ({"ceiling": 4}, "init_scale 32768 is above ceiling 4"),
        ({"clamp_always": True, "floor": 2, "init_scale": 1}, "init_scale 1 is below floor 2"),
        ({"clamp_always": True, "floor": None}, "clamp_always has nothing to hold"),
        ({"error_at_floor": True, "floor": None}, "error_at_floor needs a floor"),
        ({"backoff_after": 1, "hysteresis": True}, "accumulate and hysteresis have no effect"),
        ({"dynamic": False, "growth_every": 5}, "a fixed scale makes no use of growth_every"),
        ({"dynamic": False, "error_at_floor": True}, "a fixed scale makes no use of error_at_floor"),
    ],
)
def test_numbers_out_of_range_and_fields_without_use_are_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        amp.LossScaler(**fields)


def test_wrong_kinds_and_unknown_fields_are_errors() -> None:
    with pytest.raises(ArgumentTypeError, match="accumulate is 1; expected True or False"):
        amp.LossScaler(accumulate=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="no field scale_window; the fields are accumulate, at_least"):
        amp.LossScaler.deepspeed(scale_window=3)


def test_deepspeeds_fused_rule_refuses_the_hysteresis_that_deepspeed_ignores() -> None:
    with pytest.raises(ArgumentError, match="have no effect; pass accumulate=False, hysteresis=False"):
        amp.LossScaler.deepspeed_fused(hysteresis=True)


# -- in a program --------------------------------------------------------------------------------------------
class Loop:
    """``loss = mean(x w)`` in pure 16 bit, stepped with good and bad batches."""

    def __init__(self, scaler: amp.LossScaler | None = None, **options: Any) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            x = nn.data("x", [4, 3], "float32")
            self.loss = F.mean(nn.fc(x, 2))
            self.optimizer = amp.decorate(optim.SGD(0.1), scaler=scaler, **options)
            self.optimizer.minimize(self.loss, self.startup)
        self.scope, self.exe = amp.Scope(), amp.Executor(amp.CPUPlace(), threads=1)
        self.exe.run(self.startup, scope=self.scope)

    def step(self, fill: float) -> None:
        self.exe.run(self.main, feed={"x": np.full((4, 3), fill, np.float32)}, scope=self.scope)

    def state(self) -> amp.LossScale:
        return self.optimizer.get_loss_scale_state(self.scope)


def test_decorate_takes_a_scaler_and_its_state_is_one_record() -> None:
    loop = Loop(amp.LossScaler.torch(init_scale=8.0, growth_every=2))
    assert loop.optimizer.loss_scaler == amp.LossScaler.torch(init_scale=8.0, growth_every=2)
    assert loop.state() == amp.LossScale(8.0, 0, 0)
    seen = []
    for fill in (1, 1, np.nan, 1):
        loop.step(fill)
        seen.append(tuple(loop.state()[:3]))
    assert seen == [(8.0, 1, 0), (16.0, 0, 0), (8.0, 0, 0), (8.0, 1, 0)]
    assert loop.scope.find_var("loss_scaling_0").dtype == np.float32


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_of_the_state_goes_there_and_back(name: str) -> None:
    scaler = getattr(amp.LossScaler, name)(max_bad_in_a_row=100)
    loop = Loop(scaler)
    start = loop.state()
    assert start.scale == scaler.init_scale and start.good in ((None,) if name == "fixed" else (-scaler.growth_delay,))
    other = amp.LossScale(2.0**-3, *(None if value is None else 11 * n for n, value in enumerate(start[1:], 1)))
    loop.optimizer.set_loss_scale_state(other, loop.scope)
    assert loop.state() == other
    again = amp.LossScale(*json.loads(json.dumps(other)))
    assert again == other


def test_a_state_of_another_scaler_is_refused() -> None:
    loop = Loop(amp.LossScaler.paddle())
    with pytest.raises(ArgumentTypeError, match="is a LossScale, not"):
        loop.optimizer.set_loss_scale_state((1.0, 0, 0), loop.scope)
    with pytest.raises(ScopeError):
        loop.optimizer.get_loss_scale_state(amp.Scope())


@pytest.mark.parametrize(
    "state, message",
    [
        (amp.LossScale(1.0), "this one has good"),
        (amp.LossScale(1.0, 0, 0, 3), "has no bad_in_a_row"),
        (amp.LossScale(-1.0, 0, 0), "the loss scale is -1.0"),
        (amp.LossScale(2.0, 2**31, 0), "the count 'good' of a loss scale is 2147483648; expected a number of int32"),
        (amp.LossScale(2.0, 0, 1.5), "the count 'bad' of a loss scale is 1.5"),  # type: ignore[arg-type]
    ],
)
def test_a_state_that_lacks_a_counter_is_refused(state: amp.LossScale, message: str) -> None:
    loop = Loop(amp.LossScaler.paddle())
    before = loop.state()
    with pytest.raises(ArgumentError, match=message):
        loop.optimizer.set_loss_scale_state(state, loop.scope)
    assert loop.state() == before


def test_the_scale_of_sums_is_not_changed_inside_of_a_window() -> None:
    loop = Loop(amp.LossScaler.paddle(), accumulate_steps=2)
    other = loop.state()._replace(scale=4.0)
    loop.step(1.0)
    with pytest.raises(OrderError, match="of which 1 of 2 runs are done; set it to 4 when the window is over"):
        loop.optimizer.set_loss_scale_state(other, loop.scope)
    loop.optimizer.set_loss_scale_state(loop.state(), loop.scope)
    loop.step(1.0)
    loop.optimizer.set_loss_scale_state(other, loop.scope)
    assert loop.state() == other


@pytest.mark.parametrize(
    "option",
    [
        {"init_loss_scaling": 8.0},
        {"incr_every_n_steps": 3},
        {"decr_ratio": 0.5},
        {"incr_ratio": 4.0},
        {"decr_every_n_nan_or_inf": 1},
        {"use_dynamic_loss_scaling": False},
    ],
)
def test_a_scaler_beside_numbers_for_another_is_an_error(option: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="leave out init_loss_scaling"):
        amp.decorate(optim.SGD(), scaler=amp.LossScaler.torch(), **option)


def test_a_scaler_that_is_none_is_an_error() -> None:
    with pytest.raises(ArgumentTypeError, match=r"scaler is 'torch'; expected amp.LossScaler.torch\(\)"):
        amp.decorate(optim.SGD(), scaler="torch")  # type: ignore[arg-type]


def test_decorates_own_numbers_make_the_same_scaler() -> None:
    ours = amp.decorate(
        optim.SGD(),
        init_loss_scaling=64,
        incr_every_n_steps=3,
        decr_every_n_nan_or_inf=1,
        incr_ratio=4.0,
        decr_ratio=0.25,
    )
    assert ours.loss_scaler == amp.LossScaler(
        64.0, growth_factor=4.0, growth_every=3, backoff_factor=0.25, backoff_after=1
    )
    assert amp.decorate(optim.SGD(), init_loss_scaling=64, use_dynamic_loss_scaling=False).loss_scaler == (
        amp.LossScaler.fixed(64.0)
    )
    assert amp.decorate(optim.SGD(), dtype="bfloat16").loss_scaler == amp.LossScaler.fixed(1.0)
    assert amp.decorate(optim.SGD(), dtype="bfloat16", scaler=amp.LossScaler.jmp()).loss_scaler == amp.LossScaler.jmp()


# -- the alarm -----------------------------------------------------------------------------------------------
def test_too_many_bad_steps_in_a_row_raise_the_alarm_and_a_good_one_ends_it() -> None:
    loop = Loop(amp.LossScaler.paddle(max_bad_in_a_row=2))
    for _ in range(2):
        loop.step(np.inf)
        loop.optimizer.check_alarm(loop.scope)
    loop.step(np.inf)
    with pytest.raises(LossScaleError, match="the last 3 steps were bad.*the loss itself is not finite"):
        loop.optimizer.check_alarm(loop.scope)
    loop.step(1.0)
    loop.optimizer.check_alarm(loop.scope)
    assert loop.state()[3:5] == (0, 0)


def test_a_finite_loss_blames_the_scale() -> None:
    loop = Loop(amp.LossScaler.fixed(2.0**127, max_bad_in_a_row=0))
    loop.step(1000.0)
    with pytest.raises(LossScaleError, match="the loss is finite.*only the scale is too high") as raised:
        loop.optimizer.check_alarm(loop.scope)
    assert "smaller" in str(raised.value) and loop.state().loss_bad_in_a_row == 0


def test_the_alarm_at_the_floor_is_deepspeeds_error() -> None:
    """It comes with the step that finds the scale at its floor, not with the one that brings it there."""
    loop = Loop(amp.LossScaler.deepspeed(init_scale=2.0, backoff_after=1, accumulate=False, hysteresis=False))
    loop.step(np.nan)
    assert loop.state().scale == 1.0
    loop.optimizer.check_alarm(loop.scope)
    loop.step(np.nan)
    with pytest.raises(LossScaleError, match="the loss scale 1 is at its floor: the loss itself is not finite"):
        loop.optimizer.check_alarm(loop.scope)


@pytest.mark.parametrize(
    "scale, loss_finite, at_floor, message",
    [
        (1024.0, True, False, "only the scale is too high"),
        (1024.0, False, False, "the loss itself is not finite"),
        (1.0, True, True, "not even at this scale"),
        (float("inf"), True, False, "no gradient can be unscaled"),
        (0.0, True, False, "no gradient can be unscaled"),
    ],
)
def test_an_alarm_names_the_cause_and_the_way_out(
    scale: float, loss_finite: bool, at_floor: bool, message: str
) -> None:
    state = amp.LossScale(scale, 0, 0, 4, 0 if loss_finite else 4, int(at_floor))
    scaler = amp.LossScaler(max_bad_in_a_row=3, error_at_floor=True)
    with pytest.raises(LossScaleError, match=message):
        scaler.check(state)
    amp.LossScaler().check(state)  # no alarm is on


def test_check_alarm_without_an_alarm_or_before_minimize_is_an_error() -> None:
    with pytest.raises(OrderError, match="this loss scaler has no alarm"):
        Loop(amp.LossScaler.paddle()).optimizer.check_alarm()
    with pytest.raises(OrderError, match="check_alarm before minimize"):
        amp.decorate(optim.SGD(), scaler=amp.LossScaler.deepspeed()).check_alarm()


def test_an_alarm_costs_three_numbers_and_none_where_it_is_off() -> None:
    watched = {v.name for v in Loop(amp.LossScaler.paddle(max_bad_in_a_row=2, error_at_floor=True)).main.updates}
    plain = {v.name for v in Loop().main.updates}
    assert watched - plain == {"bad_in_a_row_0", "loss_bad_in_a_row_0", "bad_at_floor_0"}


def test_an_alarm_works_with_a_scale_of_one() -> None:
    loop = Loop(amp.LossScaler.fixed(1.0, max_bad_in_a_row=0))
    before = loop.scope.find_var("fc_0.w_0")
    loop.step(np.nan)
    with pytest.raises(LossScaleError):
        loop.optimizer.check_alarm(loop.scope)
    assert np.array_equal(before, loop.scope.find_var("fc_0.w_0"))


def test_an_alarm_looks_at_the_losses_of_the_call_that_succeeded() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = nn.data("x", [4, 3], "float32")
        loss, idle = F.mean(nn.fc(x, 2)), amp.create_parameter([2], name="idle")
        optimizer = amp.decorate(optim.SGD(), scaler=amp.LossScaler.mindspore())
        with pytest.raises(GradientError, match="does not depend on parameter 'idle'"):
            optimizer.minimize(loss, startup, parameter_list=["fc_0.w_0", idle])
        optimizer.minimize(loss, startup)
    (counter,) = [op for op in main.operators if op.type == "CountBadSteps"]
    assert [v.name for v in counter.inputs[6:] if v is not None] == [loss.name]


@pytest.mark.parametrize("optimizer", [amp.optimizer.Adam, amp.optimizer.Adagrad])
def test_moments_under_scales_whose_square_is_out_of_range(optimizer: Any) -> None:
    """A dynamic scale gets there in bfloat16. Gradients that are scaled by powers of two have the same bits."""

    def trained(scale: float) -> list[bytes]:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            constant = amp.nn.initializer.Constant(0.01)
            y = amp.nn.fc(amp.data("x", [2, 512]), 512, bias_attr=False, param_attr=amp.ParamAttr("w", constant))
            loss = F.mean(y * y)
            scaled = amp.decorate(optimizer(0.01), dtype="bfloat16", scaler=amp.LossScaler.fixed(scale))
            scaled.minimize(loss, startup)
        executor, scope = amp.Executor(), amp.Scope()
        executor.run(startup, scope=scope)
        x = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
        for _ in range(2):
            executor.run(main, feed={"x": x}, fetch_list=[loss], scope=scope)
        return [
            np.asarray(scope.find_var(v.name)).tobytes() for v in main.variables if v.persistable and v.name[0] == "w"
        ]

    assert trained(2.0**70) == trained(2.0**-70) == trained(1.0)
