"""Schedules that Python computes at each call of ``step()``: Paddle's recorded rates, in the program too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.optimizer import lr
from tests.helpers.moving import Net
from tests.helpers.where import oracle

RECORDED = oracle("stepped_rates.json")
PLATEAUS = RECORDED["plateaus"]
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "LambdaDecay": lambda: lr.LambdaDecay(0.5, lambda step: 0.95**step, verbose=True),
    "LambdaDecay from 5": lambda: lr.LambdaDecay(0.5, lr_lambda=lambda step: 1 / (1 + step), last_epoch=4),
    "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(0.5, lambda step: 0.9 if step % 2 else 0.8),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rates_of_functions_are_paddles(name: str) -> None:
    rule, recorded = FUNCTIONS[name](), RECORDED["functions"][name]
    net, moved, read = Net(rule), [], []
    first = rule.last_epoch
    with amp.scope_guard(net.scope):
        for _ in recorded:
            assert net.optimizer.get_lr() == np.float32(rule.get_lr())
            read.append(rule.last_lr)
            moved.append(net.run())
            rule.step()
    assert rule.last_epoch == first + len(recorded)
    assert read == recorded and moved == pytest.approx(recorded, rel=1e-6)
    assert [rule.value(first + n) for n in range(3)] == recorded[:3]


@pytest.mark.parametrize("case", PLATEAUS, ids=[str(case["arguments"]) for case in PLATEAUS])
def test_rates_of_a_metric_are_paddles(case: Any) -> None:
    rule: Any = lr.ReduceOnPlateau(1.0, **case["arguments"])
    net, moved = Net(rule), []
    with amp.scope_guard(net.scope):
        moved.append(net.run())
        for number, metric in enumerate(RECORDED["metrics"]):
            rule.step(np.full((1, 1), metric, np.float64) if number % 2 else metric)
            moved.append(net.run())
            assert rule.get_lr() == case["rates"][number + 1]
    assert moved == pytest.approx(case["rates"], rel=1e-6)
    assert rule.state_dict() == case["state"]


def test_they_go_on_from_their_state_and_the_rate_is_in_a_checkpoint(tmp_path: Path) -> None:
    rules: list[Any] = [lr.ReduceOnPlateau(1.0, patience=1), lr.ReduceOnPlateau(1.0, patience=1)]
    first, other = (Net(rule) for rule in rules)
    with amp.scope_guard(first.scope):
        for metric in (3.0, 4.0, 5.0, 6.0):
            rules[0].step(metric)
        amp.save_checkpoint(tmp_path / "step", first.main)
    with amp.scope_guard(other.scope):
        amp.load_checkpoint(tmp_path / "step", other.main)
        assert other.run() == pytest.approx(0.1)
        rules[1].set_state_dict(rules[0].state_dict())
        rules[1].step(7.0)  # the second that is not better since the last reduction
        assert other.run() == pytest.approx(0.01)
    function = lr.LambdaDecay(1.0, lambda step: 0.5**step)
    net = Net(function)
    with amp.scope_guard(net.scope):
        function.step(3)
        assert function.state_dict() == {"last_epoch": 3, "last_lr": 0.125} and net.run() == 0.125
        function.set_state_dict({"last_epoch": 1, "last_lr": 0.5})
        assert net.run() == 0.5


@pytest.mark.parametrize("told", [True, False])
def test_one_that_was_not_told_where_it_stood_says_so(told: bool, tmp_path: Path) -> None:
    rules = [lr.LambdaDecay(1.0, lambda step: 0.5**step) for _ in range(2)]
    first, other = (Net(rule) for rule in rules)
    for _ in range(3):
        rules[0].step(scope=first.scope)
    amp.save_checkpoint(tmp_path / "c", first.main, first.scope, extra=rules[0].state_dict())
    loaded = amp.load_checkpoint(tmp_path / "c", other.main, other.scope)
    with warnings.catch_warnings(record=True) as warned, amp.scope_guard(other.scope):
        warnings.simplefilter("always")
        if told:
            rules[1].set_state_dict(loaded.extra)
        rules[1].step()
        rules[1].step()
    assert other.run() == (0.5**5 if told else 0.5**2)
    said = [str(one.message) for one in warned]
    assert len(said) == (not told)
    assert told or "holds the rate 0.125, and this schedule stands at step 0, with 1, and goes on" in said[0]


def test_a_bad_step_leaves_the_rate_to_the_user() -> None:
    rule = lr.LambdaDecay(1.0, lambda step: 0.5**step)
    net = Net(rule, init_loss_scaling=8.0)
    with amp.scope_guard(net.scope):
        net.executor.run(net.main, feed={"x": np.array([np.inf], np.float32)})
        assert net.optimizer.get_lr() == 1.0
        rule.step()
        assert net.optimizer.get_lr() == net.run() == 0.5


def test_a_schedule_of_a_users_own_is_a_function() -> None:
    """As scripts of Paddle's language models write theirs."""

    class WarmedUp(lr.LambdaDecay):
        def __init__(self, learning_rate: float, steps: int) -> None:
            super().__init__(learning_rate, lambda step: min(1.0, step / steps))

    rule = WarmedUp(0.8, 4)
    net = Net(rule)
    rates = []
    with amp.scope_guard(net.scope):
        for _ in range(6):
            rates.append(net.run())
            rule.step()
    assert rates == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8])
    assert rule.stepped_by_user and rule != WarmedUp(0.8, 4)


@pytest.mark.parametrize(
    "call, error, said",
    [
        (lambda: lr.LambdaDecay(0.5, 0.1), ArgumentTypeError, "lr_lambda is 0.1; expected a function"),
        (lambda: lr.LambdaDecay(0.5, lambda step: None), ArgumentError, r"lr_lambda\(0\) is None"),
        (lambda: lr.LambdaDecay(0.5, lambda step: -1), ArgumentError, r"lr_lambda\(0\) is -0.5"),
        (lambda: lr.LambdaDecay(-0.5, lambda step: 1), ArgumentError, "learning_rate is -0.5"),
        (lambda: lr.ReduceOnPlateau(0.5, mode="low"), ArgumentError, "mode is 'low'; expected 'min' or 'max'"),
        (lambda: lr.ReduceOnPlateau(0.5, factor=1.0), ArgumentError, "factor is 1.0; expected a number below 1"),
        (lambda: lr.ReduceOnPlateau(0.5).step(0.1), OrderError, "run the startup program, first"),
        (lambda: lr.LambdaDecay(0.5, lambda step: 1).step(), OrderError, "run the startup program, first"),
        (
            lambda: lr.LinearWarmup(lr.LambdaDecay(0.5, lambda step: 1), 2, 0.0, 0.5),
            ArgumentTypeError,
            "write the warm-up into the function of a LambdaDecay",
        ),
        (
            lambda: optim.SGD(lr.LambdaDecay(0.5, lambda step: 1)).set_lr(0.1),
            OrderError,
            r"the rate follows LambdaDecay\(learning_rate=0.5\)",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_a_metric_is_one_number() -> None:
    rule: Any = lr.ReduceOnPlateau(0.5)
    net = Net(rule)
    with amp.scope_guard(net.scope), pytest.raises(ArgumentTypeError, match="expected one number"):
        rule.step([0.1, 0.2])
    with pytest.raises(ArgumentError, match="the state has no best, cooldown_counter, num_bad_epochs"):
        rule.set_state_dict({"last_epoch": 1, "last_lr": 0.5})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"last_lr": "x"}, "last_lr is 'x'; expected a number"),
        ({"best": [1]}, r"best is \[1\]; expected a number or None"),
        ({"num_bad_epochs": -1}, "num_bad_epochs is -1; expected a whole number"),
        (None, "the state has no best, cooldown_counter, last_epoch, last_lr, num_bad_epochs"),
    ],
)
def test_a_state_that_is_none_changes_nothing(changed: dict[str, Any] | None, said: str) -> None:
    rule = lr.ReduceOnPlateau(0.5)
    net = Net(rule)
    with amp.scope_guard(net.scope):
        rule.step(float("inf"))
        before = rule.state_dict()
        with pytest.raises(ArgumentError, match=said):
            rule.set_state_dict(None if changed is None else {**before, **changed})  # type: ignore[arg-type]
        assert rule.state_dict() == before
        rule.set_state_dict(before)


def test_a_factor_is_computed_once_for_each_step() -> None:
    asked = list[int]()

    def factor(step: int) -> float:
        asked.append(step)
        return 1 - 1 / (step + 2)

    rule = lr.MultiplicativeDecay(0.3, factor)
    net = Net(rule)
    with amp.scope_guard(net.scope):
        for _ in range(50):
            rule.step()
        assert asked == list(range(1, 51))
        there = rule.get_lr()
        rule.step(20)
        assert rule.get_lr() == rule.value(20) == lr.MultiplicativeDecay(0.3, factor, 19).get_lr() > there
        rule.step(50)
        assert rule.get_lr() == there == lr.MultiplicativeDecay(0.3, factor).value(50)
    for schedule in (rule, lr.LambdaDecay(0.3, factor)):
        with pytest.raises(ArgumentError, match="step is .*; expected a whole number"):
            schedule.value(1.5)  # type: ignore[arg-type]


def test_a_function_that_fails_leaves_the_schedule_where_it_stood() -> None:
    rule = lr.LambdaDecay(1.0, lambda step: {0: 1.0, 1: 0.5}[step])
    net = Net(rule)
    with amp.scope_guard(net.scope):
        rule.step()
        with pytest.raises(KeyError):
            rule.step()
        assert (rule.last_epoch, rule.get_lr(), net.run()) == (1, 0.5, 0.5)
