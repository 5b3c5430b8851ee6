"""A bad step changes the loss scale, its counters and the randomness counter, and no other bit: on random programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import lr

#: What may change, by the beginning of its name.
FREE = (
    "loss_scaling",
    "num_good_steps",
    "num_bad_steps",
    "bad_in_a_row",
    "loss_bad_in_a_row",
    "bad_at_floor",
    "@rng_step",
)
LAYERS = ("fc", "norm", "batch_norm", "dropout", "residual")
SCHEDULES: dict[str, Any] = {
    "number": lambda: 0.01,
    "cosine": lambda: lr.CosineAnnealingDecay(0.01, 10),
    "warm-up": lambda: lr.LinearWarmup(lr.NoamDecay(16, 4), 3, 0.001, 0.01),
    "one cycle": lambda: lr.OneCycleLR(0.01, 20),
}
OPTIMIZERS = ("SGD", "Momentum", "Adam", "AdamW", "Lamb")
SCALERS = ("paddle", "torch", "exponential", "deepspeed", "megatron", "jmp", "fixed")


def layer(kind: str, x: amp.Variable) -> amp.Variable:
    if kind == "fc":
        return amp.nn.fc(x, 8, act="relu")
    if kind == "norm":
        return amp.nn.layer_norm(x)
    if kind == "batch_norm":
        return amp.nn.batch_norm(x)
    if kind == "dropout":
        return F.dropout(x, 0.25)
    return x + amp.nn.fc(x, 8, act="tanh")


class Step:
    """A random program with its training step."""

    def __init__(
        self,
        layers: list[str],
        schedule: str,
        optimizers: list[str],
        scaler: str,
        mode: str,
        accumulate: int,
        clip: bool,
    ) -> None:
        self.main, startup = amp.Program(), amp.Program("startup")
        startup.seed = 5
        with amp.program_guard(self.main, startup), amp.unique_name.guard():
            x, ids = amp.data("x", [None, 8], "float32"), amp.data("ids", [None, 2], "int64")
            label = amp.data("label", [None, 1], "int64")
            with amp.fp16_guard():
                h = x + F.mean(amp.nn.embedding(ids, [6, 8], param_attr="table"), axis=1)
                for kind in layers:
                    h = layer(kind, h)
                self.loss = F.cross_entropy(amp.nn.fc(h, 3), label)
            lists = [["table"], None][-len(optimizers) :]
            grad_clip = amp.optimizer.ClipGradByGlobalNorm(1.0) if clip else None
            made = [
                getattr(amp.optimizer, name)(
                    SCHEDULES[schedule](), parameter_list=names, multi_precision=True, grad_clip=grad_clip
                )
                for name, names in zip(optimizers, lists, strict=True)
            ]
            rule = (
                amp.LossScaler.fixed(256.0) if scaler == "fixed" else getattr(amp.LossScaler, scaler)(init_scale=256.0)
            )
            self.optimizer = amp.decorate(
                made,
                use_pure_fp16=mode != "mixed",
                accumulate_steps=accumulate,
                scaler=rule,
                dtype="bfloat16" if mode == "bfloat16" else "float16",
            )
            self.optimizer.minimize(self.loss, startup)
            amp.optimizer.ExponentialMovingAverage(0.9).update(self.main)
        self.accumulate = accumulate
        self.executor, self.scope = amp.Executor(threads=1), amp.Scope()
        self.executor.run(startup, scope=self.scope)
        self.optimizer.amp_init(amp.CPUPlace(), self.scope)
        self.rng = np.random.default_rng(1)

    def run(self, poison: float | None = None) -> bool:
        """One step, whether it was found bad; ``poison`` fills its last micro-batch."""
        found = False
        for turn in range(self.accumulate):
            feed = {
                "x": self.rng.normal(size=(4, 8)).astype(np.float32),
                "ids": self.rng.integers(0, 6, (4, 2)),
                "label": self.rng.integers(0, 3, (4, 1)),
            }
            if poison is not None and turn == self.accumulate - 1:
                feed["x"][:] = poison  # all of it: dropout may drop one number
            (bad,) = self.executor.run(
                self.main, feed=feed, fetch_list=[self.optimizer.get_found_inf()], scope=self.scope
            )
            found = bool(bad[0])
        return found

    def state(self) -> dict[str, bytes]:
        return {name: self.scope.find_var(name).tobytes() for name in self.scope.var_names()}


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(
    layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    optimizers=st.lists(st.sampled_from(OPTIMIZERS), min_size=1, max_size=2),
    scaler=st.sampled_from(SCALERS),
    mode=st.sampled_from(["mixed", "pure", "bfloat16"]),
    accumulate=st.sampled_from([1, 1, 3]),
    clip=st.booleans(),
    poison=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_a_bad_step_changes_no_other_bit(
    layers: list[str],
    schedule: str,
    optimizers: list[str],
    scaler: str,
    mode: str,
    accumulate: int,
    clip: bool,
    poison: float,
) -> None:
    step = Step(layers, schedule, optimizers, scaler, mode, accumulate, clip)
    before = step.state()
    assert not step.run()
    between = step.state()
    assert {n for n in before if n.startswith(("table", "fc_")) and n in between and before[n] != between[n]}
    if schedule != "number":
        assert between["lr_step_0"] != before["lr_step_0"]
    assert step.run(poison) and step.run(poison)
    after = step.state()
    changed = {name for name in after if after[name] != between[name]}
    assert all(name.startswith(FREE) for name in changed), changed
    assert scaler == "fixed" or any(name.startswith(("loss_scaling", "num_bad_steps")) for name in changed)
    assert not step.run()
    assert all(np.isfinite(np.asarray(step.scope.find_var(n), np.float64)).all() for n in step.scope.var_names())


def test_evaluation_between_steps_changes_nothing() -> None:
    step = Step(["fc", "batch_norm", "dropout"], "cosine", ["Adam"], "paddle", "pure", 1, False)
    plain = Step(["fc", "batch_norm", "dropout"], "cosine", ["Adam"], "paddle", "pure", 1, False)
    test = step.main.clone(for_test=True)
    for _ in range(3):
        step.run()
        plain.run()
        before = step.state()
        feed = {"x": np.ones((4, 8), np.float32), "ids": np.ones((4, 2), np.int64), "label": np.ones((4, 1), np.int64)}
        loss, weights = step.executor.run(test, feed=feed, fetch_list=[step.loss.name, "fc_0.w_0"], scope=step.scope)
        assert np.isfinite(loss).all() and weights.dtype == np.float32  # as declared; the scope holds it in 16 bit
        np.testing.assert_array_equal(weights, step.scope.find_var("fc_0.w_0").astype(np.float32))
        assert step.state() == before
    assert step.state() == plain.state()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scale_and_counters_are_fetched_in_any_run(accumulate: int) -> None:
    step = Step(["fc"], "number", ["Adam"], "paddle", "mixed", accumulate, False)
    feed = {"x": np.ones((4, 8), np.float32), "ids": np.ones((4, 2), np.int64), "label": np.ones((4, 1), np.int64)}
    wanted = [step.optimizer.get_loss_scaling(), "num_good_steps_0", "num_bad_steps_0"]
    for turn in range(1, 5):
        scale, good, bad = step.executor.run(step.main, feed=feed, fetch_list=wanted, scope=step.scope)
        assert (scale[0], good[0], bad[0]) == (256, turn // accumulate, 0)
