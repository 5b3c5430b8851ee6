"""Schedules by Paddle's names and formulas, and what ``schedule.step()`` means in a program that holds the schedule."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, OrderError
from amp_transpiler.optimizer import lr, lr_schedule
from tests.helpers.moving import Net
from tests.helpers.where import oracle

#: A schedule, and Paddle's documented formula of its rate at an epoch.
FORMULAS: list[tuple[lr.LRScheduler, Callable[[int], float]]] = [
    (lr.ExponentialDecay(0.5, 0.9), lambda t: 0.5 * 0.9**t),
    (lr.NaturalExpDecay(0.5, gamma=0.1), lambda t: 0.5 * math.exp(-0.1 * t)),
    (lr.InverseTimeDecay(0.5, 0.1), lambda t: 0.5 / (1 + 0.1 * t)),
    (lr.StepDecay(0.5, step_size=5, gamma=0.8), lambda t: 0.5 * 0.8 ** (t // 5)),
    (lr.MultiStepDecay(0.5, milestones=[3, 5], gamma=0.8), lambda t: 0.5 * 0.8 ** ((t >= 3) + (t >= 5))),
    (lr.LinearLR(0.4, total_steps=5), lambda t: 0.4 * (1 / 3 + min(t, 5) / 5 * 2 / 3)),
    (lr.PiecewiseDecay([3, 6], [0.1, 0.2, 0.3], verbose=True), lambda t: 0.1 if t < 3 else 0.2 if t < 6 else 0.3),
    (lr.PolynomialDecay(0.5, decay_steps=4, last_epoch=-1), lambda t: (0.5 - 1e-4) * (1 - min(t, 4) / 4) + 1e-4),
    (
        lr.NoamDecay(d_model=4, warmup_steps=3, learning_rate=2.0),
        lambda t: 2 * 4**-0.5 * min((t or 1) ** -0.5, t * 3**-1.5),
    ),
    (lr.LinearWarmup(lr.StepDecay(0.5, 2), 3, 0.0, 0.3), lambda t: 0.1 * t if t < 3 else 0.5 * 0.1 ** ((t - 3) // 2)),
    (lr.CosineAnnealingDecay(0.5, T_max=10), lambda t: 0.25 * (1 + math.cos(math.pi * t / 10))),
]
EVERY = pytest.mark.parametrize("rule, formula", FORMULAS, ids=[type(rule).__name__ for rule, _ in FORMULAS])


@EVERY
def test_rates_are_paddles(rule: lr.LRScheduler, formula: Callable[[int], float]) -> None:
    assert [rule.value(t) for t in range(12)] == pytest.approx([formula(t) for t in range(12)], rel=1e-12, abs=1e-15)


CYCLIC = oracle("cyclic_rates.json")["schedules"]


@pytest.mark.parametrize("case", CYCLIC, ids=[f"{case['name']}{case['arguments']}" for case in CYCLIC])
def test_cycles_are_paddles(case: Any) -> None:
    rule = getattr(lr, case["name"])(*case["arguments"], **case["keywords"], last_epoch=-1)
    assert [rule.value(t) for t in range(42)] == pytest.approx(case["rates"], rel=1e-12)


def test_step_after_each_run_gives_paddles_rates() -> None:
    rule = lr.StepDecay(0.5, step_size=2, gamma=0.5)
    net = Net(rule)
    moved, read = [], []
    with warnings.catch_warnings(), amp.scope_guard(net.scope):
        warnings.simplefilter("error")
        for _ in range(6):
            read.append((rule.last_epoch, rule.get_lr(), rule.last_lr, rule(), net.optimizer.get_lr()))
            moved.append(net.run())
            rule.step()
    assert moved == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125], rel=1e-5)
    assert [step for step, *_ in read] == [0, 1, 2, 3, 4, 5]
    assert all(len(set(rates)) == 1 and rates[0] == rule.value(step) for step, *rates in read)


@pytest.mark.parametrize("decorated", [{}, {"init_loss_scaling": 8.0}], ids=["plain", "decorated"])
def test_a_schedule_by_user_stands_still_between_calls(decorated: dict[str, Any]) -> None:
    rule = lr.ExponentialDecay(0.5, 0.5).by_user()
    net = Net(rule, **decorated)
    moved = []
    for _ in range(3):
        moved += [net.run(), net.run()]
        rule.step(scope=net.scope)
    assert moved == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125], rel=1e-5)
    if decorated:
        amp.check_step(net.main)
        before = rule.get_lr(net.scope)
        assert net.run(math.inf) == 0 and rule.get_lr(net.scope) == before == 0.5**4
    rule.step(7, scope=net.scope)
    assert net.run() == pytest.approx(0.5**8, rel=1e-4)
    with amp.scope_guard(net.scope):
        kept = rule.state_dict()
        assert kept == {"last_epoch": 7, "last_lr": 0.5**8}
        rule.step()
        rule.set_state_dict(kept)
        assert rule.last_epoch == 7


def test_enable_static_makes_schedules_wait_for_step_as_paddles_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lr_schedule, "_paddles_way", False)
    before = lr.StepDecay(0.5, 2)
    amp.enable_static()
    after = lr.StepDecay(0.5, 2)
    assert not before.stepped_by_user and after.stepped_by_user
    net = Net(after)
    assert [net.run() for _ in range(4)] == pytest.approx([0.5] * 4)


def test_a_loop_that_steps_once_an_epoch_is_told_how() -> None:
    rule = lr.StepDecay(0.5, 2)
    net = Net(rule)
    net.run(), net.run(), net.run()
    with pytest.warns(UserWarning, match=r"stands at step 3 at the first call.*StepDecay\(...\).by_user\(\)") as seen:
        rule.step(scope=net.scope)
    assert seen[0].filename == __file__
    net.run()
    rule.step(scope=net.scope)
    net.run(), net.run()
    with pytest.raises(OrderError, match=r"took 2 steps since the last call.*once an epoch.*by_user\(\)"):
        rule.step(scope=net.scope)
    rule.step(1, scope=net.scope)
    assert net.run() == pytest.approx(0.5)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda rule: pickle.loads(pickle.dumps(rule))], ids=["copy", "pickle"]
)
def test_a_schedule_can_be_copied_and_sent(copied: Callable[[Any], Any]) -> None:
    rule = lr.StepDecay(0.5, 2).by_user()
    net = Net(rule)
    rule.step(scope=net.scope)
    again = copied(rule)
    assert again == rule and again.stepped_by_user and again.value(4) == 0.5 * 0.1**2
    again.step(scope=net.scope)
    assert rule.get_lr(net.scope) == rule.value(2)


def test_a_schedule_without_a_program_has_no_step_to_take() -> None:
    rule = lr.StepDecay(0.5, 2)
    assert rule.last_epoch == 0 and rule.get_lr() == 0.5
    with pytest.raises(OrderError, match="run the startup program.*pass scope="):
        rule.step()
    Net(rule)
    with pytest.raises(OrderError, match="by_user after minimize"):
        rule.by_user()


class Own(lr.LRScheduler):
    """As Paddle's users write schedules."""

    def __init__(self, learning_rate: float, last_epoch: int = -1) -> None:
        super().__init__(learning_rate, last_epoch)

    def get_lr(self, scope: Any = None) -> float:
        return 0.1


@pytest.mark.parametrize(
    "call, error, said",
    [
        (lambda: lr.CyclicLR(0.1, 0.5, 4, mode="saw"), ArgumentError, "mode is 'saw'.*LambdaDecay"),
        (lambda: lr.CyclicLR(0.1, 0.5, 4, scale_fn=lambda x: 1.0), ArgumentError, "a function is LambdaDecay's"),
        (lambda: lr.CosineAnnealingWarmRestarts(0.5, 0), ArgumentError, "T_0 is 0"),
        (lambda: lr.StepDecay(0.5, 2, last_epoch=3), ArgumentError, r"schedule.step\(epoch\)"),
        (lambda: Own(0.5), TypeError, r"Own is no schedule of amp.optimizer.lr.*LambdaDecay.*set_lr\(rate\)"),
        (lambda: lr.LRScheduler(learning_rate=0.5), TypeError, "LRScheduler is no schedule"),
        (lambda: lr.StepDecay(0.5, 0), ArgumentError, "StepDecay: step_size is 0"),
        (lambda: lr.ExponentialDecay(0.5, 0.0), ArgumentError, "gamma is 0.0"),
        (lambda: lr.MultiStepDecay(0.5, [5, 5]), ArgumentError, "ascending"),
    ],
)
def test_what_is_not_offered_points_elsewhere(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()
