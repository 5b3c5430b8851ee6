"""Every preset of LossScaler moves as its published rule says, step by step, through onnxruntime."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings, strategies as st

from amp_transpiler.errors import LossScaleError
from amp_transpiler.optimizer.scale_state import ScaleState
from amp_transpiler.optimizer.scaler import LossScale, LossScaler
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.program import Program
from tests.helpers import scaler_rules as rules
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.steps import Steps, feed

LARGEST = 2.0**127


class Machine:
    """The operators of one scaler, run by onnxruntime."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.program, startup = Program(), Program("startup")
        found, loss = feed(self.program, "found", "bool", (1,)), feed(self.program, "loss", "float32", ())
        self.state = ScaleState.create(self.program, startup, scaler)
        self.state.append(scaler, found, [loss])
        self.steps = Steps(self.program, startup)
        self.initial = self.steps.state

    def run(self, bad_steps: Sequence[bool], scale: float | None = None) -> list[LossScale]:
        """The record at the start and after each step."""
        self.steps.state = dict(self.initial)
        if scale is not None:
            self.steps.state[self.state.scale.name] = np.array([scale], np.float32)
        records = [self.record()]
        for bad in bad_steps:
            self.steps({"found": np.array([bad]), "loss": np.zeros((), np.float32)}, [])
            records.append(self.record())
        return records

    def record(self) -> LossScale:
        values = {name: getattr(self.state, name) for name in LossScale._fields}
        return LossScale(**{n: None if v is None else self.steps.state[v.name][0] for n, v in values.items()})


@functools.cache
def machine(scaler: LossScaler) -> Machine:
    return Machine(scaler)


def rows(name: str, preset: Any, rule: Any, **variants: tuple[dict[str, Any], dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(preset(**ours), functools.partial(rule, **theirs), id=f"{name}-{variant}")
        for variant, (ours, theirs) in variants.items()
    ]


#: A scaler, and its rule with the same numbers.
RULES = [
    *rows(
        "paddle",
        LossScaler.paddle,
        rules.Paddle,
        short=({"growth_every": 3}, {"every": 3}),
        patient=({"growth_every": 2, "backoff_after": 3}, {"every": 2, "after": 3}),
    ),
    *rows(
        "exponential",
        LossScaler.exponential,
        rules.Exponential,
        short=({"growth_every": 3}, {"every": 3}),
        patient=({"growth_every": 4, "backoff_after": 3}, {"every": 4, "after": 3}),
    ),
    *rows("torch", LossScaler.torch, rules.Torch, short=({"growth_every": 3}, {"every": 3})),
    *rows("keras", LossScaler.keras, rules.Keras, short=({"growth_every": 3}, {"every": 3})),
    *rows("tf_keras", LossScaler.tf_keras, rules.TfKeras, short=({"growth_every": 3}, {"every": 3})),
    *rows(
        "apex",
        LossScaler.apex,
        rules.Apex,
        short=({"growth_every": 2}, {"every": 2}),
        floor=({"growth_every": 3, "floor": 8.0}, {"every": 3, "lowest": 8.0}),
    ),
    *rows(
        "deepspeed",
        LossScaler.deepspeed,
        rules.DeepSpeed,
        short=({"growth_every": 3}, {"every": 3}),
        patient=({"growth_every": 4, "backoff_after": 3}, {"every": 4, "shift": 3}),
        consecutive=({"growth_every": 3, "accumulate": False}, {"every": 3, "consecutive": True}),
        none=(
            {"growth_every": 3, "backoff_after": 1, "accumulate": False, "hysteresis": False},
            {"every": 3, "shift": 1},
        ),
    ),
    *rows(
        "deepspeed_fused",
        LossScaler.deepspeed_fused,
        rules.DeepSpeedFused,
        short=({"growth_every": 3}, {"every": 3}),
        each=({"growth_every": 1}, {"every": 1}),
    ),
    *rows(
        "megatron",
        LossScaler.megatron,
        rules.Megatron,
        short=({"growth_every": 3}, {"every": 3}),
        patient=({"growth_every": 4, "backoff_after": 3}, {"every": 4, "hysteresis": 3}),
    ),
    *rows(
        "jmp",
        LossScaler.jmp,
        rules.Jmp,
        short=({"growth_every": 3}, {"every": 3}),
        low=({"growth_every": 2, "floor": 0.25}, {"every": 2, "lowest": 0.25}),
    ),
    *rows(
        "mindspore",
        LossScaler.mindspore,
        rules.MindSpore,
        short=({"growth_every": 3, "max_bad_in_a_row": 2}, {"every": 3, "most": 2}),
    ),
    *rows("oneflow", LossScaler.oneflow, rules.OneFlow, short=({"growth_every": 3}, {"every": 3})),
]


def bits(values: Any) -> tuple[Any, ...]:
    """A record to compare: the scale to the bit, and the counts."""
    scale, good, bad = values
    return np.float32(scale).tobytes(), int(good), int(bad)


def raises(scaler: LossScaler, record: LossScale) -> bool:
    try:
        scaler.check(record)
    except LossScaleError:
        return True
    return False


@pytest.mark.parametrize("scaler, rule", RULES)
@pytest.mark.filterwarnings("ignore:overflow")
def test_every_transition_is_that_of_the_published_rule(scaler: LossScaler, rule: Any) -> None:
    moved: set[str] = set()

    @seed(5)
    @settings(max_examples=8, deadline=None, database=None)
    @given(
        st.integers(0, 12),
        st.lists(st.sampled_from([False, False, False, True]), min_size=15, max_size=30),
        st.lists(st.booleans(), max_size=15),
    )
    def walk(exponent: int, calm: list[bool], rough: list[bool]) -> None:
        start = 2.0**exponent
        oracle, bad_steps = rule(start), calm + rough
        records = machine(scaler).run(bad_steps, start)
        for bad, before, record in zip(bad_steps, records[:-1], records[1:], strict=True):
            oracle.update(bad)
            assert bits(record[:3]) == bits(oracle.record())
            if hasattr(oracle, "error"):
                assert raises(scaler, record) == oracle.error
            moved.add("grew" if record.scale > before.scale else "shrank" if record.scale < before.scale else "stayed")

    walk()
    assert moved == {"grew", "shrank", "stayed"}


# -- the corners, scripted -----------------------------------------------------------------------------------
def scales(scaler: LossScaler, script: str, start: float | None = None) -> list[float]:
    """The scale after each step of a script of good (``.``) and bad (``x``) steps."""
    return [float(record.scale) for record in machine(scaler).run([step == "x" for step in script], start)[1:]]


def counts(scaler: LossScaler, script: str) -> list[tuple[int, int]]:
    """(good, bad) after each step of a script."""
    return [(int(r.good), int(r.bad)) for r in machine(scaler).run([step == "x" for step in script])[1:]]


def test_growth_to_infinity_is_kept_out_where_the_rule_guards_it() -> None:
    for preset in (LossScaler.paddle, LossScaler.torch, LossScaler.tf_keras, LossScaler.jmp, LossScaler.exponential):
        scaler = preset(growth_every=1)
        assert scales(scaler, "..", 2.0**126) == [LARGEST, LARGEST]
        assert counts(scaler, ".") == [(0, 0)]
    assert scales(LossScaler.keras(growth_every=1), "..x.", 2.0**126) == [LARGEST, np.inf, np.inf, np.inf]
    largest = float(np.finfo(np.float32).max)
    assert scales(LossScaler.oneflow(growth_every=1), "..x", 2.0**126) == [LARGEST, largest, largest / 2]


def test_the_floor_stops_a_decrease_and_nothing_else() -> None:
    assert scales(LossScaler.paddle(), ".x.xx", 0.25) == [0.25, 0.25, 0.25, 0.25, 1.0]
    assert scales(LossScaler.torch(), "xxx", 1.0) == [0.5, 0.25, 0.125]
    assert scales(LossScaler.torch(), "xx", 2.0**-149) == [0.0, 0.0]
    assert scales(LossScaler.jmp(floor=4.0), "xxx", 8.0) == [4.0, 4.0, 4.0]
    held = LossScaler.jmp(floor=4.0, clamp_always=True)
    assert scales(held, ".x", 2.0) == [4.0, 4.0]


def test_the_ceiling_stops_a_growth_and_nothing_else() -> None:
    apex = LossScaler.apex(growth_every=2)
    assert scales(apex, "....", 2.0**23) == [2.0**23, 2.0**24, 2.0**24, 2.0**24]
    assert scales(apex, ".x..", 2.0**30) == [2.0**30, 2.0**29, 2.0**29, 2.0**24]
    held = LossScaler.apex(growth_every=2, clamp_always=True)
    assert scales(held, "x.", 2.0**30) == [2.0**24, 2.0**24]  # half of 2**30 is still above


def test_a_hysteresis_is_used_up_and_refilled() -> None:
    """Two bad steps are needed for the first decrease, then one for each; a growth refills it, in DeepSpeed's other
    mode every good step does."""
    consecutive = LossScaler.deepspeed(growth_every=9, init_scale=64.0, accumulate=False)
    assert scales(consecutive, "x.xx.x") == [64, 64, 64, 32, 32, 32]


@pytest.mark.parametrize("preset", [LossScaler.megatron, LossScaler.deepspeed])
def test_a_hysteresis_refills_after_good_steps(preset: Any) -> None:
    scaler = preset(growth_every=3, init_scale=64.0)
    assert scales(scaler, "x.xx.x") == [64, 64, 32, 16, 16, 8]
    assert scales(scaler, "xx...xx") == [64, 32, 32, 32, 64, 64, 32]
    assert counts(scaler, "xx...") == [(0, 1), (0, 1), (1, 1), (2, 1), (0, 0)]


def test_bad_steps_in_a_row_and_bad_steps_that_accumulate() -> None:
    assert scales(LossScaler.paddle(init_scale=10.0), "x.x.xx") == [10, 10, 10, 10, 10, 8]
    assert scales(LossScaler.exponential(init_scale=10.0), "x.x.xx") == [10, 10, 8, 8, 8, float(np.float32(6.4))]
    assert counts(LossScaler.exponential(growth_every=2), "x..x") == [(0, 1), (1, 1), (0, 0), (0, 1)]


@pytest.mark.parametrize("preset", [LossScaler.paddle, LossScaler.exponential], ids=["==", ">="])
def test_a_count_beyond_its_threshold(preset: Any) -> None:
    """``==`` never fires there, ``>=`` at once."""
    run = machine(preset(growth_every=2, backoff_after=2))
    fired = []
    for bad in (False, True):
        run.run([])
        run.steps.state |= {run.state.good.name: np.array([7], np.int32), run.state.bad.name: np.array([7], np.int32)}
        before = float(run.record().scale)
        run.steps({"found": np.array([bad])}, [])
        fired.append(float(run.record().scale) / before)
    assert fired == ([1.0, 1.0] if preset == LossScaler.paddle else [2.0, pytest.approx(0.8)])


def test_the_first_growth_of_deepspeeds_fused_rule_comes_one_step_later() -> None:
    scaler = LossScaler.deepspeed_fused(growth_every=2, init_scale=8.0)
    assert scales(scaler, ".....x....") == [8, 8, 16, 16, 32, 16, 16, 16, 32, 32]


def test_a_fixed_scale_has_no_operator_of_its_own() -> None:
    fixed = machine(LossScaler.fixed(512.0))
    assert fixed.program.operators == []
    watched = machine(LossScaler.fixed(512.0, max_bad_in_a_row=3))
    assert [int(r.bad_in_a_row) for r in watched.run([True, True, False, True])] == [0, 1, 2, 0, 1]
    assert watched.record()[:3] == (512.0, None, None)


@pytest.mark.parametrize("scaler", list(dict.fromkeys(row.values[0] for row in RULES)), ids=str)
def test_the_operators_have_cuda_kernels(scaler: LossScaler) -> None:
    lowered = lower(machine(scaler).program, "cuda", {"found": (1,), "loss": ()})
    assert without_cuda_kernel(lowered.model) == []
    assert {node.op_type for node in lowered.model.graph.node}.isdisjoint({"If", "Loop", "Scan", "Not"})
