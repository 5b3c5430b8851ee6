"""Training steps that are broken in one place each, as other systems were; every one must be rejected.

A case is a mutation of what ``minimize`` emits and the message that it has to be rejected with, which names the operator
or the state at fault. Mutations of lowered models are in ``check_lowered_corpus``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from amp_transpiler import nn, optimizer as optim
from amp_transpiler.ir import context, unique_name
from amp_transpiler.ir.nodes import OWN
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import check_finite_and_unscale, decorate
from amp_transpiler.passes.autodiff.backward import append_backward
from amp_transpiler.program import Program, program_guard
from tests.corpora.broken_scaling import (
    alarm_not_stored,
    another_scale,
    clip_before_unscale,
    clip_by_hand_before_unscale,
    loss_not_scaled,
    master_of_16_bit,
    ratios_out_of_range,
    scale_by_hand,
    scale_not_stored,
    scale_update_removed,
    sum_in_16_bit,
    two_scale_updates,
    unscale_in_16_bit,
    unscaled_results_in_16_bit,
    unscaled_twice,
)
from tests.corpora.step_edits import found_inf, given, made, step_by_hand, the, ungated

FEEDS = {"x": (4, 3)}


class Case(NamedTuple):
    mutate: Callable[[Any], None]
    message: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never written


def built(pure: bool = False, optimizer: Any = None, average: bool = False, **options: Any) -> Program:
    """A step with batch norm, dropout, clipping, a schedule, two layers."""
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        x = nn.data("x", [4, 3], "float32")
        with context.fp16_guard():
            h = nn.dropout(nn.batch_norm(nn.fc(x, 5, act="relu")), 0.5)
            loss = F.mean(nn.fc(h, 2))
        rate = optim.lr.CosineAnnealingDecay(0.1, T_max=10)
        optimizer = optimizer or optim.Adam(rate, multi_precision=pure, grad_clip=optim.ClipGradByGlobalNorm(1.0))
        decorate(optimizer, use_pure_fp16=pure, **options).minimize(loss, startup)
        if average:
            optim.ExponentialMovingAverage(0.9).update(main, startup)
    return main


def looped(pure: bool = False) -> Program:
    """Two losses, two optimizers over disjoint parameters, gradients clipped by the user's own operators."""
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        with context.fp16_guard():
            h = nn.batch_norm(nn.fc(nn.data("x", [4, 3], "float32"), 5, act="relu"))
            losses = [F.mean(nn.fc(h, 2)), F.mean(nn.fc(h, 1))]
        first = optim.Adam(0.1, parameter_list=["fc_0.*"], multi_precision=pure)
        second = optim.Momentum(optim.lr.NoamDecay(8, 10), multi_precision=pure)
        optimizer = decorate([first, second], use_pure_fp16=pure)
        pairs = append_backward(optimizer.get_scaled_loss(losses, startup))
        first_half = optimizer.get_unscaled_gradients([grad for _, grad in pairs[:3]])
        second_half = optimizer.get_unscaled_gradients([grad for _, grad in pairs[3:]])
        grads = [given(grad) for grad in [*first_half, *second_half]]
        norm = F.sum(grads[0] * grads[0]) + 1e-6
        optimizer.apply_gradients([(p, grad / norm) for (p, _), grad in zip(pairs, grads, strict=True)])
    return main


def update_outside_the_verdict(program: Program) -> None:
    the(program, "Adam").set_input(0, None)


def second_group_with_a_verdict_of_its_own(program: Program) -> None:
    """SOK: an overflow in the dense gradients alone still applies those of the embedding."""
    check = the(program, "CheckFiniteAndUnscale")
    (unscaled,), _ = check_finite_and_unscale([given(check.input(1))], given(check.input(0)))
    the(program, "ClipGradByGlobalNorm").set_input(0, unscaled)


def verdict_of_the_last_group(program: Program) -> None:
    """Torch-FL: the group of the next element type starts found_inf anew."""
    check = the(program, "CheckFiniteAndUnscale")
    (unscaled,), found = check_finite_and_unscale([given(check.input(1))], given(check.input(0)))
    the(program, "ClipGradByGlobalNorm").set_input(0, unscaled)
    for op in program.operators:
        if op.domain == OWN and op.input(0) is check.output(0):
            op.set_input(0, found)


def cleared_verdict(program: Program) -> None:
    never = program.add_constant("never", np.zeros(1, bool))
    the(program, "Adam").set_input(0, made(program, "And", [found_inf(program), never], "bool", "cleared"))


def verdict_through_not(program: Program) -> None:
    fine = made(program, "Not", [found_inf(program)], "bool", "fine")
    the(program, "Adam").set_input(0, made(program, "Not", [fine], "bool", "bad"))


def verdict_of_the_user(program: Program) -> None:
    """A test that onnxruntime's CPU provider passes NaN through."""
    largest = made(program, "ReduceMax", [given(the(program, "CheckFiniteAndUnscale").output(1))], "float32", "largest")
    the(program, "Adam").set_input(0, made(program, "IsNaN", [largest], "bool", "not_finite"))


def statistics_with_another_verdict(program: Program) -> None:
    other = program.add_input("other", "bool", (1,))
    next(op for op in program.operators if op.type == "GateState").set_input(0, other)


def scaler_with_another_verdict(program: Program) -> None:
    other = program.add_input("other", "bool", (1,))
    the(program, "UpdateLossScaling").set_input(0, made(program, "Or", [found_inf(program), other], "bool", "either"))


def alarm_with_another_verdict(program: Program) -> None:
    the(program, "CountBadSteps").set_input(0, program.add_input("other", "bool", (1,)))


def gradient_around_the_check(program: Program) -> None:
    check, clip = the(program, "CheckFiniteAndUnscale"), the(program, "ClipGradByGlobalNorm")
    clip.set_input(1, check.input(2))


def scaled_gradient_mixed_in(program: Program) -> None:
    """A term of the user's that is still scaled."""
    check, adam = the(program, "CheckFiniteAndUnscale"), the(program, "Adam")
    slot = next(i for i, v in enumerate(adam.inputs) if v is not None and v.name == "fc_0.w_0@GRAD@UNSCALED@CLIP")
    raw = next(v for v in check.inputs if v is not None and v.name == "fc_0.w_0@GRAD")
    adam.set_input(slot, made(program, "Add", [given(adam.input(slot)), raw], "float32", "mixed"))


def swapped_gradients(program: Program) -> None:
    check = the(program, "CheckFiniteAndUnscale")
    first, second = check.input(1), check.input(2)
    check.set_input(1, second)
    check.set_input(2, first)


def no_check(program: Program) -> None:
    program.remove_operator(the(program, "CheckFiniteAndUnscale"))


def ungated_statistics(program: Program) -> None:
    ungated(program, "batch_norm_0.w_1")


def ungated_schedule(program: Program) -> None:
    """Lightning and transformers: the schedule goes on while steps are skipped."""
    ungated(program, "lr_step_0")


def ungated_beta_power(program: Program) -> None:
    step_by_hand(program, "adam_beta1_pow_acc_0", "Mul", 0.9)


def ungated_master(program: Program) -> None:
    step_by_hand(program, "fc_0.w_0_fp32_master_0", "Mul", 0.5)


def ungated_average(program: Program) -> None:
    step_by_hand(program, "fc_0.w_0_ema_0", "Mul", 0.999)


def average_outside_the_verdict(program: Program) -> None:
    the(program, "ExponentialAverage").set_input(0, None)


def forgotten_moment(program: Program) -> None:
    del program.updates[program.var("fc_0.w_0_moment1_0")]


def crossed_moments(program: Program) -> None:
    a, b = program.var("fc_0.w_0_moment1_0"), program.var("fc_0.w_0_moment2_0")
    program.updates[a], program.updates[b] = program.updates[b], program.updates[a]


def step_counter_of_the_user(program: Program) -> None:
    program.add_variable("steps", "int32", (1,), persistable=True)
    step_by_hand(program, "steps", "Add", 1)


def statistics_left_by_a_bad_window(program: Program) -> None:
    """The end of a window keeps statistics of its last run alone."""
    statistics = program.var("batch_norm_0.w_1")
    gate = given(program.updates[statistics]).producer
    assert gate is not None
    gate.set_input(1, statistics)


def parameter_in_every_micro_batch(program: Program) -> None:
    assert program.accumulation is not None
    weight = program.var("fc_0.w_0")
    program.accumulation.updates[weight] = program.updates[weight]


def sum_never_cleared(program: Program) -> None:
    reset = the(program, "ResetGradients")
    total = program.var("fc_0.w_0_accumulated_0")
    assert program.accumulation is not None and reset is not None
    program.set_update(total, program.accumulation.updates[total])


PROGRAMS = [
    Case(update_outside_the_verdict, "1: 'Adam.* is gated by nothing"),
    Case(
        second_group_with_a_verdict_of_its_own,
        "1: 'Adam.* is gated by found_inf_0, which leaves out found_inf of 'Ch",
    ),
    Case(
        verdict_of_the_last_group,
        "1: 'Adam.* is gated by found_inf_1, which leaves out found_inf of 'Check.*found_inf_0",
    ),
    Case(cleared_verdict, r"1: 'Adam.* is gated by cleared, made by 'And .* \(And\)"),
    Case(verdict_through_not, r"1: 'Adam.* is gated by bad, made by 'Not .* \(Not\)"),
    Case(verdict_of_the_user, r"1: 'Adam.* is gated by not_finite, made by 'IsNaN .* \(IsNaN\)"),
    Case(statistics_with_another_verdict, "1: 'GateState.* is gated by other"),
    Case(scaler_with_another_verdict, "1: 'UpdateLossScaling.* takes 'other' for a bad step"),
    Case(alarm_with_another_verdict, "1: 'CountBadSteps.* is gated by other", {"scaler": optim.LossScaler.deepspeed()}),
    Case(gradient_around_the_check, r"1: the gradient .* in 'Adam.* \(Adam\) does not come from"),
    Case(scaled_gradient_mixed_in, r"1: the gradient 'mixed' of parameter 'fc_0.w_0' in 'Adam.* come from '.*' alone"),
    Case(swapped_gradients, "1: parameter 'fc_0.w_0' is updated by 'Adam.* the gradient of another variable"),
    Case(no_check, "1: there must be a CheckFiniteAndUnscale over the gradients, and there is none"),
    Case(ungated_statistics, "2: state 'batch_norm_0.w_1' takes '.*' from 'BatchNorm.*, which no found_inf gates"),
    Case(
        ungated_schedule, r"2: state 'lr_step_0' takes 'lr_step_0@NEW' from 'LearningRate.*, which no found_inf gates"
    ),
    Case(
        ungated_beta_power, r"2: state 'adam_beta1_pow_acc_0' takes .* from 'Mul .* \(Mul\), which no found_inf gates"
    ),
    Case(
        ungated_master, r"2: state 'fc_0.w_0_fp32_master_0' takes .* \(Mul\), which no found_inf gates", {"pure": True}
    ),
    Case(ungated_average, r"2: state 'fc_0.w_0_ema_0' takes .* \(Mul\), which no found_inf gates", {"average": True}),
    Case(average_outside_the_verdict, "1: 'ExponentialAverage.* is gated by nothing", {"average": True}),
    Case(forgotten_moment, "2: 'Adam.* computes a new 'fc_0.w_0_moment1_0' that"),
    Case(crossed_moments, "2: state 'fc_0.w_0_moment1_0' takes .* the next value of 'fc_0.w_0_moment2_0'"),
    Case(step_counter_of_the_user, r"2: state 'steps' takes .* from 'Add .* \(Add\), which no found_inf gates"),
    Case(
        statistics_left_by_a_bad_window,
        "2: state 'batch_norm_0.w_1' takes .* in every micro-batch, and a bad window",
        {"accumulate_steps": 4},
    ),
    Case(
        parameter_in_every_micro_batch,
        "2: state 'fc_0.w_0' takes .* from 'Adam.* in every micro-batch",
        {"accumulate_steps": 4},
    ),
    Case(
        sum_never_cleared,
        "2: state 'fc_0.w_0_accumulated_0' takes .* from 'Accumulate.*, which no found_inf gates",
        {"accumulate_steps": 4},
    ),
    Case(
        sum_in_16_bit,
        "3: 'AccumulateGradients.* adds up gradients in float16, in 'fc_0.w_0_accumulated_0'",
        {"accumulate_steps": 4},
    ),
    Case(clip_before_unscale, "3: gradient .* is clipped before it is unscaled, by 'ClipGradByNorm"),
    Case(
        clip_by_hand_before_unscale,
        r"3: gradient 'held.*' is clipped before it is unscaled, by 'Clip -> held' \(Clip\)",
    ),
    Case(
        unscale_in_16_bit,
        r"3: 'Mul -> unscaled16' \(Mul\) applies the loss scale to gradient '.*' in float16",
        {"pure": True},
    ),
    Case(unscaled_results_in_16_bit, "3: gradient .* is unscaled in float16 by 'CheckFiniteAndUnscale"),
    Case(unscaled_twice, "3: gradient .* is unscaled twice, the second time by 'CheckFiniteAndUnscale.*found_inf_1"),
    Case(loss_not_scaled, "3: the loss 'mean_0.tmp_0@SCALED' is not multiplied by 'loss_scaling_0'.* comes from 'Mul"),
    Case(another_scale, "3: the loss 'mean_0.tmp_0@SCALED' is not multiplied by 'other_scale'"),
    Case(two_scale_updates, "4: 2 operators update the loss scale: 'UpdateLossScaling"),
    Case(scale_update_removed, "4: 'num_good_steps_0' counts for the loss scale, but nothing moves it"),
    Case(scale_not_stored, "4: 'loss_scaling_0' does not take the value that 'UpdateLossScaling"),
    Case(scale_by_hand, "4: 'loss_scaling_0' does not take the value that 'UpdateLossScaling"),
    Case(
        alarm_not_stored,
        "4: 'bad_in_a_row_0' does not take the value that 'CountBadSteps",
        {"scaler": optim.LossScaler.deepspeed(max_bad_in_a_row=9)},
    ),
    Case(ratios_out_of_range, "4: 'UpdateLossScaling.* has ratios 2 and 1.5"),
    Case(master_of_16_bit, "5: the master weight 'fc_0.w_0_fp32_master_0'.* in 'Adam", {"pure": True}),
]
