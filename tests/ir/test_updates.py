"""States that a program of the user's own updates: a momentum encoder, a queue, a running mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F


def state(name: str, shape: list[int]) -> amp.Variable:
    zeros = amp.nn.initializer.Constant(0.0)
    return amp.create_parameter(shape, "float32", name=name, trainable=False, initializer=zeros)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_a_momentum_encoder_follows_the_weight_after_the_step(mode: str) -> None:
    """What reads the weight itself behind ``minimize`` has the one before the step."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None, 3])
        before, after = state("before", [3, 2]), state("after", [3, 2])
        loss = F.mean(amp.nn.fc(x, 2, param_attr="w", bias_attr=False))
        sgd: Any = amp.optimizer.SGD(0.5, multi_precision=mode != "fp32")
        if mode != "fp32":
            sgd = amp.decorate(sgd, use_pure_fp16=mode == "pure", use_fp16_guard=False)
        sgd.minimize(loss)
        w = main.var("w")
        main.set_update(before, F.cast(w, "float32"))
        main.set_update(after, after * 0.5 + F.cast(main.updates[w], "float32") * 0.5)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(startup, scope=scope)
    if mode != "fp32":
        sgd.amp_init(amp.CPUPlace(), scope=scope)
    mean = np.zeros((3, 2))
    for _ in range(3):
        old = scope.find_var("w").astype(np.float32)
        executor.run(main, feed={"x": np.ones((4, 3), np.float32)}, scope=scope)
        mean = mean * 0.5 + scope.find_var("w").astype(np.float64) * 0.5
        np.testing.assert_array_equal(scope.find_var("before"), old)
        np.testing.assert_allclose(scope.find_var("after"), mean, rtol=1e-6)


@pytest.mark.parametrize(
    ("new", "told"),
    [
        (
            lambda x: F.cast(F.mean(x, axis=0), "float16"),
            r"the update of 'kept' \(float32\) is 'cast_0.tmp_0' \(float16\)",
        ),
        (lambda x: x, r"the update of 'kept' \[3\] is 'x' \[None, 3\]; an update keeps the shape"),
        (lambda x: F.mean(x), r"the update of 'kept' \[3\] is 'mean_0.tmp_0' \[\]"),
        (lambda x: 3.0, "3.0 is no variable"),
        (lambda x: np.ones(3), "array.* is no variable"),
    ],
)
def test_what_is_no_update_is_refused_where_it_is_said(new: Callable[[amp.Variable], Any], told: str) -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program("startup")), amp.unique_name.guard():
        x, kept = amp.data("x", [None, 3]), state("kept", [3])
        with pytest.raises(amp.AmpError, match=told):
            main.set_update(kept, new(x))


def test_assign_to_a_state_names_the_call() -> None:
    with amp.program_guard(amp.Program(), amp.Program("startup")):
        x, kept = amp.data("x", [3]), state("kept", [3])
        with pytest.raises(amp.errors.ArgumentError, match=r"set_update\(output, x\)"):
            F.assign(x, output=kept)
        assert F.assign(x, output=None).shape == (3,)
