"""Executors that watch: they change nothing, name bad steps, and warn or raise."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentTypeError, NonFiniteError
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.view.training_step import training_step
from tests.helpers import programs
from tests.tools.overflows import ready


def test_watch_changes_nothing_and_names_bad_steps() -> None:
    plain, watched = (
        ready(
            programs.build(
                "transformer", "amp", init_loss_scaling=2.0**40, decr_every_n_nan_or_inf=1, decr_ratio=2.0**-12
            ),
            "t",
        )
        for _ in range(2)
    )
    named: list[object] = []
    (loss,) = (v.name for v in training_step(plain.main).losses)
    exe = amp.watch(watched.executor, on_bad=named.append)
    exe.run(
        watched.main.clone(for_test=True),
        watched.feeds,
        ["fc_2.tmp_1"],
        watched.scope,
    )
    for _ in range(5):
        losses = plain.executor.run(plain.main, plain.feeds, [loss], plain.scope)
        others = exe.run(watched.main, watched.feeds, [loss, "fc_2.tmp_1"], watched.scope)
        assert losses[0].tobytes() == others[0].tobytes() and len(others) == 2
    assert [c.loss_scaling for c in named] == [2.0**40, 2.0**28] and exe.bad_steps == 2 and exe.culprits == named
    for name in plain.scope.var_names():
        assert plain.scope.find_var(name).tobytes() == watched.scope.find_var(name).tobytes()


def test_a_window_of_micro_batches_is_watched() -> None:
    """The second of four micro-batches overflows: it is named, once, with the sums before it forgotten."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3], "float32")
        loss = F.mean(amp.nn.fc(x, 2))
        opt = amp.decorate(amp.optimizer.SGD(0.1), init_loss_scaling=4.0, accumulate_steps=4)
        opt.minimize(loss, startup)
    named: list[object] = []
    exe, scope = amp.watch(amp.Executor(), named.append), amp.Scope()
    exe.run(startup, scope=scope)
    for value in (1, 1e6, 1, 1, 1, 1, 1, 1, 1e6, 1, 1, 1):
        exe.run(main, {"x": np.full((4, 3), value, np.float32)}, [], scope)
    assert [culprit.operator for culprit in named] == ["Cast -> x.cast_fp16"] * 2 and exe.bad_steps == 2

    plain, feed = amp.Executor(), {"x": np.full((4, 3), 1e6, np.float32)}
    plain.run(main, {"x": np.ones((4, 3), np.float32)}, [], scope)
    before = amp.step_state(main, scope)  # by hand
    plain.run(main, feed, [], scope)
    culprit = amp.find_culprit(main, feed, scope, before=before)
    assert culprit is not None and culprit.operator == "Cast -> x.cast_fp16"


def test_ranks_without_a_culprit_point_to_the_others() -> None:
    def run() -> str:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            loss = F.mean(amp.nn.fc(amp.data("x", [4, 3], "float32"), 2))
            amp.decorate(amp.optimizer.SGD(0.1)).minimize(loss, startup)
        exe, scope = amp.watch(amp.Executor(), "raise"), amp.Scope()
        exe.run(startup, scope=scope)
        with pytest.raises(NonFiniteError) as caught:
            exe.run(main, {"x": np.full((4, 3), [1, np.inf][amp.distributed.rank()], np.float32)}, [], scope)
        return str(caught.value)

    found = amp.distributed.simulate(2, run)
    assert "run again, every number was finite on rank 0; see what the other ranks say" in found[0]
    assert "feed 'x' is not finite" in found[1]


def test_watch_warns_or_raises() -> None:
    step = ready(programs.build("mlp", "amp", init_loss_scaling=2.0**30), "mlp")
    with pytest.warns(RuntimeWarning, match=r"a step of program 'program_\d+' is bad: backward operator 'CastGrad"):
        amp.watch(step.executor).run(step.main, step.feeds, [], step.scope)
    with pytest.raises(NonFiniteError, match="loss scale 65536: makes the step good") as caught:
        amp.watch(step.executor, "raise", cures=True).run(step.main, step.feeds, [], step.scope)
    assert caught.value.culprit.role == "backward" and isinstance(caught.value, ArithmeticError)
    with pytest.warns(RuntimeWarning, match="is bad"):  # a report beside, and values that are left on the device
        reports = amp.StepReports(step.main)
        loss, report = amp.watch(step.executor).run(
            step.main, step.feeds, [*reports.losses, reports], step.scope, return_numpy=False
        )
    assert loss.numpy() == report.loss and report.skipped
    with pytest.raises(ArgumentTypeError, match="fetch_list is a list"):
        amp.watch(step.executor).run(step.main, step.feeds, "cross_entropy_0.tmp_0", step.scope)
    limited = amp.watch(step.executor, limit=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limited.run(step.main, step.feeds, [], step.scope)
    assert limited.bad_steps == 1 and not limited.culprits
    assert limited.place is step.executor.place
