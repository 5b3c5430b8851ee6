"""Training steps broken in the loss scale: clipped too early, unscaled twice or in 16 bit, a scale that is not stored."""

from __future__ import annotations

import numpy as np

from amp_transpiler import optimizer as optim
from amp_transpiler.ir import context
from amp_transpiler.ir.nodes import OWN, SCALING
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.optimizer import check_finite_and_unscale
from amp_transpiler.program import Program
from tests.corpora.step_edits import found_inf, given, made, step_by_hand, the


def clip_before_unscale(program: Program) -> None:
    """A famous U-Net repository, and many more."""
    check = the(program, "CheckFiniteAndUnscale")
    clipped = optim.ClipGradByNorm(1.0).append([given(g) for g in check.inputs[1:]])
    for slot, new in enumerate(clipped, 1):
        check.set_input(slot, new)


def clip_by_hand_before_unscale(program: Program) -> None:
    check = the(program, "CheckFiniteAndUnscale")
    limit = program.add_constant("limit", np.ones((), np.float32))
    raw = given(check.input(1))
    clipped = made(program, "Clip", [raw, made(program, "Neg", [limit], "float32", "low"), limit], "float32", "held")
    check.set_input(1, made(program, "Identity", [clipped], "float32", "held"))


def unscale_in_16_bit(program: Program) -> None:
    """MindSpore: the gradient times the reciprocal of the scale, in the gradient's fp16."""
    check = the(program, "CheckFiniteAndUnscale")
    inverse = made(program, "Reciprocal", [program.var("loss_scaling_0")], "float32", "inverse")
    narrow = made(program, "Cast", [inverse], "float16", "inverse16", to=ONNX_TYPES["float16"])
    raw = given(check.input(1))
    check.set_input(1, made(program, "Mul", [raw, narrow], "float16", "unscaled16"))
    one = program.add_constant("one", np.ones(1, np.float32))
    check.set_input(0, one)


def unscaled_results_in_16_bit(program: Program) -> None:
    given(the(program, "CheckFiniteAndUnscale").output(1)).dtype = "float16"


def sum_in_16_bit(program: Program) -> None:
    program.var("fc_0.w_0_accumulated_0").dtype = "float16"


def unscaled_twice(program: Program) -> None:
    """accelerate: two wrappers of one optimizer."""
    check, first = the(program, "CheckFiniteAndUnscale"), found_inf(program)
    unscaled, found = check_finite_and_unscale([given(v) for v in check.outputs[1:]], given(check.input(0)))
    for slot, new in enumerate(unscaled):
        the(program, "ClipGradByGlobalNorm").set_input(slot, new)
    both = made(program, "Or", [first, found], "bool", "both")
    for op in program.operators:
        if op.domain == OWN and op.input(0) is first:
            op.set_input(0, both)


def loss_not_scaled(program: Program) -> None:
    """A second loss that nobody multiplied."""
    scaled = program.var("mean_0.tmp_0@SCALED")
    assert scaled.producer is not None
    loss = given(scaled.producer.input(0))
    two = program.add_constant("two", np.full(1, 2, np.float32))
    scaled.producer.set_input(1, two)
    assert loss is not None


def another_scale(program: Program) -> None:
    other = program.add_variable("other_scale", "float32", (1,), persistable=True)
    the(program, "CheckFiniteAndUnscale").set_input(0, other)


def scale_update_removed(program: Program) -> None:
    """OneFlow, whole: the operator is gone as well."""
    op = the(program, "UpdateLossScaling")
    for state in op.inputs[1:4]:
        del program.updates[given(state)]
    program.remove_operator(op)


def two_scale_updates(program: Program) -> None:
    """SOK: apply_gradients twice in a step moves the scale twice."""
    op = the(program, "UpdateLossScaling")
    outputs = [program.add_variable(f"again{i}", v.dtype, v.shape) for i, v in enumerate(map(given, op.outputs))]
    with context.operator_role(SCALING):
        program.add_operator(op.type, op.inputs, outputs, attrs=op.attrs.copy(), domain=OWN)


def scale_not_stored(program: Program) -> None:
    """OneFlow: an optimizer took the update of the scale for dead code."""
    del program.updates[program.var("loss_scaling_0")]


def scale_by_hand(program: Program) -> None:
    step_by_hand(program, "loss_scaling_0", "Mul", 0.5)


def alarm_not_stored(program: Program) -> None:
    del program.updates[program.var("bad_in_a_row_0")]


def ratios_out_of_range(program: Program) -> None:
    the(program, "UpdateLossScaling").attrs["decr_ratio"] = 1.5


def master_of_16_bit(program: Program) -> None:
    program.var("fc_0.w_0_fp32_master_0").dtype = "float16"
