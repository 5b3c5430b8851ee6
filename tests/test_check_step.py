"""The step checker accepts what minimize emits, and rejects every mutation of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from amp_transpiler import nn
from amp_transpiler import optimizer as optim
from amp_transpiler.errors import StepError
from amp_transpiler.ir import context, names
from amp_transpiler.ir.program import OWN, Operator, Program, Variable
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import check_finite_and_unscale, decorate
from amp_transpiler.passes.check_lowered import check_lowered
from amp_transpiler.passes.check_step import check_step
from amp_transpiler.passes.lowering import Lowered, lower


def built(pure: bool = False, optimizer: Any = None, **options: Any) -> Program:
    """A step with batch norm, dropout, clipping, two layers."""
    main, startup = Program(), Program("startup")
    with context.program_guard(main, startup), names.guard():
        x = nn.data("x", [4, 3], "float32")
        with context.fp16_guard():
            h = nn.dropout(nn.batch_norm(nn.fc(x, 5, act="relu")), 0.5)
            loss = F.mean(nn.fc(h, 2))
        optimizer = optimizer or optim.Adam(0.1, multi_precision=pure, grad_clip=optim.ClipGradByGlobalNorm(1.0))
        decorate(optimizer, use_pure_fp16=pure, **options).minimize(loss, startup)
    return main


def the(program: Program, type_: str) -> Operator:
    (op,) = [op for op in program.operators if op.type == type_ and op.domain == OWN]
    return op


def given(variable: Variable | None) -> Variable:
    assert variable is not None
    return variable


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Momentum, optim.Adam, optim.AdamW, optim.Lamb])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_minimize_emits_is_accepted(pure: bool, optimizer: Any, dynamic: bool) -> None:
    program = built(pure, optimizer(multi_precision=True), use_dynamic_loss_scaling=dynamic)
    check_step(program)
    for place in ("cpu", "cuda"):
        check_lowered(program, lower(program, place, {"x": (4, 3)}))


# -- mutations of the program --------------------------------------------------------------------------------
def ungated_update(program: Program) -> None:
    the(program, "Adam").set_input(0, None)


def second_verdict(program: Program) -> None:
    check = the(program, "CheckFiniteAndUnscale")
    check_finite_and_unscale([given(check.input(1))], given(check.input(0)))


def cleared_verdict(program: Program) -> None:
    verdict = given(the(program, "CheckFiniteAndUnscale").output(0))
    cleared = program.add_variable("cleared", "bool", (1,))
    never = program.add_constant("never", np.zeros(1, bool))
    program.add_operator("And", [verdict, never], [cleared])
    the(program, "Adam").set_input(0, cleared)


def verdict_from_one_gate_only(program: Program) -> None:
    other = program.add_input("other", "bool", (1,))
    next(op for op in program.operators if op.type == "GateState").set_input(0, other)


def gradient_around_the_check(program: Program) -> None:
    check, clip = the(program, "CheckFiniteAndUnscale"), the(program, "ClipGradByGlobalNorm")
    clip.set_input(1, check.input(2))


def swapped_gradients(program: Program) -> None:
    check = the(program, "CheckFiniteAndUnscale")
    first, second = check.input(1), check.input(2)
    check.set_input(1, second)
    check.set_input(2, first)


def ungated_statistics(program: Program) -> None:
    gate = next(op for op in program.operators if op.type == "GateState")
    program.set_update(given(gate.input(1)), given(gate.input(2)))


def forgotten_moment(program: Program) -> None:
    del program.updates[program.var("fc_0.w_0_moment1_0")]


def crossed_moments(program: Program) -> None:
    a, b = program.var("fc_0.w_0_moment1_0"), program.var("fc_0.w_0_moment2_0")
    program.updates[a], program.updates[b] = program.updates[b], program.updates[a]


def step_counter_of_the_user(program: Program) -> None:
    steps = program.add_variable("steps", "int32", (1,), persistable=True)
    one = program.add_constant("one", np.ones(1, np.int32))
    after = program.add_variable("steps@NEW", "int32", (1,))
    program.add_operator("Add", [steps, one], [after])
    program.set_update(steps, after)


def clip_before_unscale(program: Program) -> None:
    check = the(program, "CheckFiniteAndUnscale")
    clipped = optim.ClipGradByNorm(1.0).append([given(g) for g in check.inputs[1:]])
    for slot, new in enumerate(clipped, 1):
        check.set_input(slot, new)


def unscale_in_16_bit(program: Program) -> None:
    given(the(program, "CheckFiniteAndUnscale").output(1)).dtype = "float16"


def another_scale(program: Program) -> None:
    other = program.add_variable("other_scale", "float32", (1,), persistable=True)
    the(program, "CheckFiniteAndUnscale").set_input(0, other)


def scale_not_stored(program: Program) -> None:
    del program.updates[program.var("loss_scaling_0")]


def ratios_out_of_range(program: Program) -> None:
    the(program, "UpdateLossScaling").attrs["decr_ratio"] = 1.5


def two_scale_updates(program: Program) -> None:
    op = the(program, "UpdateLossScaling")
    outputs = [program.add_variable(f"again{i}", v.dtype, v.shape) for i, v in enumerate(map(given, op.outputs))]
    program.add_operator(op.type, op.inputs, outputs, attrs=op.attrs.copy(), domain=OWN)


def no_check(program: Program) -> None:
    program.remove_operator(the(program, "CheckFiniteAndUnscale"))


@pytest.mark.parametrize("mutate, message", [
    (ungated_update, "1: .*Adam.* is gated by nothing"),
    (second_verdict, "1: there must be one CheckFiniteAndUnscale, and there are 2"),
    (no_check, "1: there must be one CheckFiniteAndUnscale, and there are 0"),
    (cleared_verdict, "1: .*Adam.* is gated by cleared"),
    (verdict_from_one_gate_only, "1: .*GateState.* is gated by other"),
    (gradient_around_the_check, "1: the gradient .* does not come from"),
    (swapped_gradients, "1: parameter 'fc_0.w_0' is updated with 'fc_0.b_0@GRAD', the gradient of another"),
    (ungated_statistics, "2: state 'batch_norm_0.w_1' takes .* which no verdict gates"),
    (forgotten_moment, "2: .* computes a new 'fc_0.w_0_moment1_0' that"),
    (crossed_moments, "2: state 'fc_0.w_0_moment1_0' takes .* the next value of 'fc_0.w_0_moment2_0'"),
    (step_counter_of_the_user, "2: state 'steps' takes 'steps@NEW' from .* which no verdict gates"),
    (clip_before_unscale, "3: gradient .* is clipped before it is unscaled"),
    (unscale_in_16_bit, "3: gradient .* is unscaled in float16"),
    (another_scale, "3: no loss is multiplied by 'other_scale'"),
    (scale_not_stored, "4: 'loss_scaling_0' does not take the value"),
    (ratios_out_of_range, "4: .* has ratios 2 and 1.5"),
    (two_scale_updates, "4: 2 operators update the loss scale"),
], ids=lambda item: getattr(item, "__name__", ""))  # fmt: skip
def test_mutations_of_a_program_are_rejected(mutate: Callable[[Program], None], message: str) -> None:
    program = built()
    mutate(program)
    with pytest.raises(StepError, match=message):
        check_step(program)


def test_masters_must_be_fp32_masters_of_16_bit_parameters() -> None:
    program = built(pure=True)
    program.var("fc_0.w_0_fp32_master_0").dtype = "float16"
    with pytest.raises(StepError, match="5: the master weight 'fc_0.w_0_fp32_master_0'"):
        check_step(program)


def test_every_violation_is_listed() -> None:
    program = built()
    for mutate in (ungated_statistics, step_counter_of_the_user, ratios_out_of_range):
        mutate(program)
    with pytest.raises(StepError) as raised:
        check_step(program)
    assert len(str(raised.value).splitlines()) == 4


# -- mutations of the lowered model --------------------------------------------------------------------------
def gate_of(lowered: Lowered, state: str) -> onnx.NodeProto:
    (tensor,) = [port.tensor for port in lowered.updates if port.variable == state]
    (node,) = [node for node in lowered.model.graph.node if tensor in node.output]
    assert node.op_type == "Where"
    return node


def swapped_branches(lowered: Lowered) -> None:
    node = gate_of(lowered, "fc_0.w_0")
    node.input[1], node.input[2] = node.input[2], node.input[1]


def negated_condition(lowered: Lowered) -> None:
    node = gate_of(lowered, "fc_0.w_0")
    lowered.model.graph.node.append(onnx.helper.make_node("Not", [node.input[0]], ["negated"]))
    node.input[0] = "negated"


def no_gate(lowered: Lowered) -> None:
    node = gate_of(lowered, "fc_0.w_0")
    node.op_type = "Identity"
    del node.input[2], node.input[0]


def another_state(lowered: Lowered) -> None:
    gate_of(lowered, "fc_0.w_0").input[2] = "fc_0.w_0_moment1_0"


def verdict_by_maximum(lowered: Lowered) -> None:
    tests = [node for node in lowered.model.graph.node if node.op_type == "IsNaN"]
    reduce = next(node for node in lowered.model.graph.node if node.op_type == "ReduceSum" and "found_inf" in node.name)
    assert tests
    reduce.op_type = "ReduceMax"


def constant_condition(lowered: Lowered) -> None:
    lowered.model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "always"))
    gate_of(lowered, "fc_0.w_0").input[0] = "always"


@pytest.mark.parametrize("mutate, message", [
    (swapped_branches, "branches swapped"), (negated_condition, "goes through Not"), (no_gate, "without a gate"),
    (another_state, "does not keep the old value"), (verdict_by_maximum, "looks for NaN with ReduceMax"),
    (constant_condition, "follows no test for NaN"),
], ids=lambda item: getattr(item, "__name__", ""))  # fmt: skip
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_mutations_of_the_lowered_model_are_rejected(
    mutate: Callable[[Lowered], None], message: str, place: str
) -> None:
    program = built()
    lowered = lower(program, place, {"x": (4, 3)})
    mutate(lowered)
    with pytest.raises(StepError, match=message):
        check_lowered(program, lowered)


@pytest.mark.parametrize("pure", [False, True])
def test_gates_survive_the_runtimes_optimiser(pure: bool, tmp_path: Path) -> None:
    program = built(pure)
    lowered = lower(program, "cpu", {"x": (4, 3)})
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    ort.InferenceSession(lowered.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    check_lowered(program, dataclasses.replace(lowered, model=onnx.load(options.optimized_model_filepath)))
