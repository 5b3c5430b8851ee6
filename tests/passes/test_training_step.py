"""The reading of a training step, against what the builder of the step returned."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import parser

import amp_transpiler as amp
from amp_transpiler import nn, optimizer as optim
from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training.master_names import master_names, mastered
from amp_transpiler.passes.autodiff.backward import append_backward
from amp_transpiler.passes.view.training_step import TrainingStep, training_step
from amp_transpiler.program import Program
from tests.corpora.step_edits import the
from tests.helpers.building import building

BETAS = ("beta1_pow_acc", "beta2_pow_acc")
#: What each optimizer keeps of a group, and of each parameter, as Paddle names it.
KEPT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "SGD": ((), ()),
    "Momentum": ((), ("velocity",)),
    "LarsMomentum": ((), ("velocity",)),
    "Adam": (BETAS, ("moment1", "moment2")),
    "AdamW": (BETAS, ("moment1", "moment2")),
    "Lamb": (BETAS, ("moment1", "moment2")),
}
MODES: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "mixed": {},
    "pure": {"use_pure_fp16": True},
    "window": {"accumulate_steps": 3},
    "pure window": {"use_pure_fp16": True, "accumulate_steps": 2},
}


def network() -> Variable:
    """The loss of two layers with batch norm and dropout."""
    with amp.fp16_guard():
        return F.mean(nn.fc(nn.dropout(nn.batch_norm(nn.fc(nn.data("x", [4, 3], "float32"), 5, act="relu")), 0.5), 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KEPT)
def test_what_minimize_returned(kind: str, mode: str) -> None:
    options = MODES[mode]
    pure, windowed = "pure" in mode, "window" in mode
    with building() as (main, startup):
        loss = network()
        optimizer: Any = getattr(optim, kind)(0.1, multi_precision=pure)
        if options is not None:
            optimizer = amp.decorate(optimizer, **options)
        updates, pairs = optimizer.minimize(loss, startup)
    step = training_step(main)
    assert [update.operator for update in step.updates] == updates
    assert {row.parameter for row in step.rows} == {parameter for parameter, _ in pairs} == set(main.parameters)
    assert len(step.rows) == len(pairs) and step.losses == (loss,)

    scalars, accumulators = KEPT[kind]
    assert [tuple(update.scalars) for update in step.updates] == [scalars]
    for name, state in step.updates[0].scalars.items():
        assert state is not None and f"_{name}_" in state.name
    for row in step.rows:
        assert row.parameter is not None
        master = f"{row.parameter.name}_fp32_master_0" if row.parameter.dtype == "float16" else None
        assert (row.master and row.master.name) == master
        expected = {kept: f"{master or row.parameter.name}_{kept}_0" for kept in accumulators}
        assert {kept: getattr(state, "name", None) for kept, state in row.accumulators.items()} == expected
    assert pure == any(row.master is not None for row in step.rows)
    taken = [(state, new) for update in step.updates for state, new in update.states if state is not None]
    assert len(taken) == len(scalars) + len(pairs) * (1 + len(accumulators)) + sum(
        r.master is not None for r in step.rows
    )
    assert all(main.updates[state] is new for state, new in taken)
    assert [v.name for v in step.learning_rates] == ["learning_rate_0"]
    assert step.rng_step is main.var("@rng_step") and step.rng_seed is main.var("@rng_seed")

    if options is None:
        assert not step.checks and not step.scale_updates and step.scale is None and step.found_inf is None
        assert dict(step.gradients) == dict(pairs) and step.scaled_losses == (loss,)
        return
    (check,), (scaling,) = step.checks, step.scale_updates
    assert step.scaled_losses == (optimizer.get_scaled_loss(),)
    assert step.scale is scaling.scale is main.var("loss_scaling_0")
    assert (scaling.good, scaling.bad) == (main.var("num_good_steps_0"), main.var("num_bad_steps_0"))
    assert step.found_inf is check.found_inf is scaling.found_inf is main.var("found_inf_0")
    raw = [grad for grad, _ in check.gradients]
    if windowed:
        assert step.accumulation is main.accumulation and set(step.sums.values()) == set(main.parameters)
        assert [given and given.name.split("@")[0] for given in raw] == [total.name for total in step.sums]
        # the statistics of the batch norm, each with what it was
        assert {f"{state.name}_before_window_0" for state in step.before_window.values()} == {
            old.name for old in step.before_window
        }
        assert len(step.before_window) == 2
    else:
        assert set(raw) == {grad for _, grad in pairs} and step.accumulation is None and not step.sums
    unscaled = {new: grad for grad, new in check.gradients}
    raw_of = {parameter: unscaled[gradient] for parameter, gradient in step.gradients}
    if not windowed:
        assert raw_of == dict(pairs)
    amp.check_step(main)


@pytest.mark.parametrize("clip", [optim.ClipGradByGlobalNorm(1.0), optim.ClipGradByNorm(1.0), optim.ClipGradByValue(1)])
def test_gradients_before_they_are_clipped(clip: Any) -> None:
    with building() as (main, startup):
        loss = network()
        optimizer = amp.decorate(optim.Adam(0.1, grad_clip=clip))
        _, pairs = optimizer.minimize(loss, startup)
    step = training_step(main)
    raw_of = {new: grad for grad, new in step.checks[0].gradients}
    assert {p: raw_of[g] for p, g in step.gradients} == dict(pairs)
    assert {row.gradient for row in step.rows} == {v for clip in step.clips for v in clip.operator.outputs}


def test_two_optimizers_gradients_unscaled_by_hand_and_averages() -> None:
    with building() as (main, startup):
        losses = [network(), F.mean(nn.fc(main.var("x"), 1))]
        first = optim.Adam(optim.lr.NoamDecay(8, 10), parameter_list=["fc_0.*"])
        optimizer = amp.decorate([first, optim.Momentum(0.1)], scaler=optim.LossScaler.deepspeed())
        scaled = optimizer.get_scaled_loss(losses, startup)
        pairs = append_backward(scaled)
        halves = [optimizer.get_unscaled_gradients([grad for _, grad in half]) for half in (pairs[:2], pairs[2:])]
        grads = [grad * 2.0 for half in halves for grad in half if grad is not None]
        given = [(parameter, grad) for (parameter, _), grad in zip(pairs, grads, strict=True)]
        updates = optimizer.apply_gradients(given)
        average = optim.ExponentialMovingAverage(0.9, warmup=True).update(main, startup)
    step = training_step(main)
    assert [update.operator for update in step.updates] == updates
    assert [update.kind for update in step.updates] == ["Adam", "Momentum"]
    assert {row.parameter: row.gradient for row in step.rows} == dict(given)
    assert {row.parameter.name for row in step.updates[0].rows if row.parameter} == {"fc_0.w_0", "fc_0.b_0"}
    assert list(step.losses) == losses and step.scaled_losses == (scaled,)
    (check,) = step.checks
    assert [grad for grad, _ in check.gradients] == [grad for _, grad in pairs]
    assert [part.operator for part in step.averages] == [average]
    assert {p.name: a.name for p, a in step.averaged(step.averages[0])} == {
        p.name: f"{p.name}_ema_0" for p in main.parameters
    }
    (schedule,) = step.schedules
    assert schedule.made("rate") is step.learning_rates[0] and schedule.read("step") is main.var("lr_step_0")
    (counter,) = step.counters
    assert [state.name for state, _ in counter.states if state] == [
        "bad_in_a_row_0",
        "loss_bad_in_a_row_0",
        "bad_at_floor_0",
    ]


def names(step: TrainingStep) -> list[Any]:
    """A step in names, to compare programs."""

    def name(v: Variable | None) -> str | None:
        return None if v is None else v.name

    rows = [
        (name(r.parameter), name(r.gradient), name(r.master), {k: name(v) for k, v in r.accumulators.items()})
        for r in step.rows
    ]
    checks = [(name(c.scale), name(c.found_inf), [(name(a), name(b)) for a, b in c.gradients]) for c in step.checks]
    singles = [step.found_inf, step.scale, step.rng_seed, step.rng_step, *step.losses, *step.scaled_losses]
    parts = [[p.operator.label for p in ps] for ps in (step.scale_updates, step.clips, step.gated, step.averages)]
    windows = [{a.name: b.name for a, b in found.items()} for found in (step.sums, step.before_window)]
    return [rows, checks, [name(v) for v in singles], parts, windows]


@pytest.mark.parametrize("mode", MODES)
def test_an_imported_program_reads_as_the_built_one(mode: str) -> None:
    with building() as (main, startup):
        optimizer: Any = optim.Lamb(0.1, multi_precision="pure" in mode, grad_clip=optim.ClipGradByNorm(1.0))
        options = MODES[mode]
        optimizer = optimizer if options is None else amp.decorate(optimizer, **options)
        optimizer.minimize(network(), startup)
    again = Program.from_onnx(main.to_onnx())
    assert names(training_step(again)) == names(training_step(main))
    assert names(training_step(main.clone())) == names(training_step(main))


def test_a_model_from_a_file_minimised() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    g (float[4, 2] x) => (float[] loss) <float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[3] b = {0, 0, 0}>
    { h = MatMul(x, w)  y = Add(h, b)  loss = ReduceMean<keepdims = 0>(y) }
    """
    main = Program.from_onnx(parser.parse_model(text))
    updates, pairs = optim.SGD(0.1).minimize(main.var("loss"))
    step = training_step(main)
    assert [update.operator for update in step.updates] == updates
    assert {r.parameter: r.gradient for r in step.rows} == dict(pairs) and len(pairs) == 2
    assert step.losses == (main.var("loss"),)


def test_programs_without_updates() -> None:
    with building() as (main, _):
        loss = network()
        main.outputs = [loss]
        empty = training_step(main)
        assert not empty.updates and not empty.losses and not empty.gradients and empty.found_inf is None
        assert empty.tested == [loss] and empty.learning_rates == [] and empty.accumulation is None
        pairs = append_backward(loss)
    step = training_step(main)
    assert step.gradients == [(p, g) for g in main.variables for p in [g.grad_of] if (p, g) in pairs]
    assert step.losses == step.scaled_losses == (loss,)
    with pytest.raises(ArgumentTypeError, match="expected the training program"):
        training_step(loss)  # type: ignore[arg-type]


def test_a_broken_step_is_read_as_far_as_it_goes() -> None:
    with building() as (main, startup):
        amp.decorate(optim.Adam(0.1)).minimize(network(), startup)
    update, check = the(main, "Adam"), the(main, "CheckFiniteAndUnscale")
    slots = slots_of("Adam")
    assert slots is not None
    update.set_input(0, None)
    update.set_input(len(slots.inputs), None)
    update.set_output(len(update.outputs) - 2, None)
    check.set_output(len(check.outputs) - 1, None)
    step = training_step(main)
    assert step.found_inf is None and step.rows[0].parameter is None and step.rows[0].gradient is not None
    assert step.updates[0].states[-2][1] is None and step.updates[0].states[-2][0] is not None
    assert step.rows[-1].master is None and step.rows[-1].accumulators["moment2"] is not None
    assert step.checks[0].gradients[-1][1] is None and step.checks[0].gradients[-1][0] is not None
    main.remove_operator(check)
    assert training_step(main).checks == () and training_step(main).scale is None


# -- the slots themselves --------------------------------------------------------------------------------------------
def test_rows_and_new_values_of_an_update() -> None:
    slots = slots_of("Adam")
    assert slots is not None and slots.updates and slots.accumulators == ("moment1", "moment2")
    inputs = ["found", "rate", "b1", "b2", "p0", "g0", "m0", "v0", "M0", "p1", "g1", "m1", "v1", "M1"]
    assert slots.states(inputs) == ["b1", "b2", "p0", "m0", "v0", "M0", "p1", "m1", "v1", "M1"]
    assert [row["moment2"] for row in slots.rows(inputs)] == ["v0", "v1"]
    assert [slots.replaced(output) for output in range(7)] == [2, 3, 4, 6, 7, 8, 9]
    assert slots.states(inputs[:4]) == ["b1", "b2"] and list(slots.rows(inputs[:4])) == []


def test_what_is_the_new_value_of_what() -> None:
    kinds = ("CheckFiniteAndUnscale", "UpdateLossScaling", "CountBadSteps", "GateState", "LearningRate")
    tables = {kind: slots_of(kind) for kind in kinds}
    replaced = {kind: dict(slots.replacements(8)) for kind, slots in tables.items() if slots is not None}
    assert replaced == {
        "CheckFiniteAndUnscale": {},
        "UpdateLossScaling": {0: 1, 1: 2, 2: 3},
        "CountBadSteps": {0: 3, 1: 4, 2: 5},
        "GateState": {0: 1},
        "LearningRate": {1: 0},
    }
    gated = {kind for kind, slots in tables.items() if slots is not None and slots.gated}
    assert gated == {"GateState"}
    assert slots_of("Adam", "") is None and slots_of("MatMul", OWN) is None


def test_names_of_master_weights() -> None:
    found = master_names("fc.w")
    assert [next(found), next(found)] == ["fc.w_fp32_master_0", "fc.w_fp32_master_1"]
    assert mastered("fc.w_fp32_master_1") == "fc.w" and mastered("fc.w_fp32_master_x") is None
