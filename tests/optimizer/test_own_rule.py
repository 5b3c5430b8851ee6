"""An optimizer of a user's own, by docs/optimizers.md: one that keeps the last gradient, as optimistic descent does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.ir import opdef
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training.update import shifted, update_rule

RATE = 0.25


class Optimistic(amp.optimizer.Optimizer):
    type = "Optimistic"


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """``p -= rate * (2 g - last)``; the gradient is the next step's last one, as it stands."""
    monkeypatch.setattr(opdef, "_TABLE", dict(opdef._TABLE))

    @update_rule("Optimistic", accumulators=("last",))
    def optimistic(e: Any, op: Any, switch: Any, rate: Any) -> Any:
        def step(index: int, p: Any, g: Any, last: Any) -> Any:
            way = e.Sub(e.Mul(g.value, e.like(2, p)), last)
            return shifted(e, switch, p, way, e.Neg(e.cast(rate, p.dtype))), g.value

        return [], step


def built(optimizer: Any) -> amp.Program:
    main = amp.Program()
    with amp.program_guard(main), amp.unique_name.guard():
        w = amp.create_parameter([4], "float32", name="w", initializer=np.zeros(4, np.float32))
        optimizer.minimize(F.sum(amp.data("x", [4], "float32") * w))
    return main


@pytest.mark.usefixtures("rule")
def test_the_step_is_proved_where_it_is_a_branch_alone() -> None:
    """On CUDA every new value has to be a sum that a bad step leaves alone, and the gradient as it stands is none."""
    main = built(amp.decorate(Optimistic(RATE), init_loss_scaling=8.0))
    amp.check_step(main, amp.CPUPlace())
    with pytest.raises(amp.errors.StepError, match="state 'w_last_0' is written without a gate"):
        amp.check_step(main, amp.CUDAPlace(0))


@pytest.mark.usefixtures("rule")
def test_it_steps_and_a_bad_step_keeps_its_state() -> None:
    main, scope, executor = built(amp.decorate(Optimistic(RATE), init_loss_scaling=8.0)), amp.Scope(), amp.Executor()
    executor.run(main.startup, scope=scope)
    w, last = np.zeros(4), np.zeros(4)
    for step, gradient in enumerate(np.arange(16.0).reshape(4, 4)):
        if step == 2:
            gradient[1] = np.inf
        else:
            w, last = w - RATE * (2 * gradient - last), gradient
        executor.run(main, {"x": gradient.astype(np.float32)}, [], scope=scope)
        assert np.array_equal(scope.find_var("w"), w) and np.array_equal(scope.find_var("w_last_0"), last)


def test_without_its_formula_it_is_named() -> None:
    with pytest.raises(amp.errors.ArgumentError, match="Optimistic: .* operator 'Optimistic', .* @update_rule"):
        built(Optimistic(RATE))
