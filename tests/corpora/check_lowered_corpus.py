"""Lowered training steps that are broken in one place each; every one must be rejected, as in ``check_step_corpus``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from amp_transpiler.passes.lowering.lowering import Lowered
from tests.corpora.check_step_corpus import Case


def output_of(lowered: Lowered, state: str) -> str:
    """The output with the new value of a state, perhaps among others."""
    (tensor,) = [
        port.tensor
        for port in lowered.updates
        if state in (port.variable, *(segment.variable for segment in port.segments))
    ]
    return tensor


def made_by(lowered: Lowered, tensor: str) -> onnx.NodeProto:
    return next(node for node in lowered.model.graph.node if tensor in node.output)


def gate_of(lowered: Lowered, state: str) -> onnx.NodeProto:
    node = made_by(lowered, output_of(lowered, state))
    while node.op_type != "Where":
        node = made_by(lowered, node.input[0])
    return node


def sum_of(lowered: Lowered, state: str) -> list[str]:
    """``x``, ``y`` and the factor of the update ``x + y * factor`` of a state."""
    node = made_by(lowered, output_of(lowered, state))
    if node.op_type == "GatedAdd":
        return list(node.input)
    product = made_by(lowered, node.input[1])
    return [node.input[0], *product.input]


def choice_of(lowered: Lowered, tensor: str) -> onnx.NodeProto:
    """The Where by which a bad step has another number there."""
    node = made_by(lowered, tensor)
    while node.op_type in ("Expand", "Cast", "Reshape"):
        node = made_by(lowered, node.input[0])
    assert node.op_type == "Where"
    return node


def swapped_branches(lowered: Lowered) -> None:
    node = gate_of(lowered, "adam_beta1_pow_acc_0")
    node.input[1], node.input[2] = node.input[2], node.input[1]


def condition_through_not(lowered: Lowered) -> None:
    node = gate_of(lowered, "adam_beta1_pow_acc_0")
    lowered.model.graph.node.append(onnx.helper.make_node("Not", [node.input[0]], ["negated"], "negation"))
    lowered.model.graph.node.append(onnx.helper.make_node("Not", ["negated"], ["again"], "once_more"))
    node.input[0] = "again"


def without_gate(state: str) -> Callable[[Lowered], None]:
    def mutate(lowered: Lowered) -> None:
        node = gate_of(lowered, state)
        node.op_type = "Identity"
        del node.input[2], node.input[0]

    mutate.__name__ = f"without_gate_of_{state}"
    return mutate


def chosen(state: str, place: int, number: float | None) -> Callable[[Lowered], None]:
    """On a bad step the term or factor at this place of the sum is this number, or as on a good step."""

    def mutate(lowered: Lowered) -> None:
        node = choice_of(lowered, sum_of(lowered, state)[place])
        if number is None:
            node.op_type = "Identity"
            del node.input[:2]
        else:
            array = np.array(number, np.float32)
            lowered.model.graph.initializer.append(onnx.numpy_helper.from_array(array, "another"))
            node.input[1] = "another"

    mutate.__name__ = f"{place}_of_{state}_is_{number}"
    return mutate


def other_branch(state: str, other: str) -> Callable[[Lowered], None]:
    """On a bad step the state takes another state's value, or what an operator makes of its own."""

    def mutate(lowered: Lowered) -> None:
        tensor = output_of(lowered, state)
        node = made_by(lowered, tensor)
        graph = next(a.g for a in node.attribute if a.name == "else_branch")
        name = graph.output[list(node.output).index(tensor)].name
        inner = next(each for each in graph.node if name in each.output)
        if other in lowered.tensors:
            inner.input[0] = lowered.tensors[other].name
        else:
            inner.op_type = other

    mutate.__name__ = f"{state}_takes_{other}"
    return mutate


def swapped_if(lowered: Lowered) -> None:
    node = made_by(lowered, output_of(lowered, "fc_0.w_0"))
    for attribute in node.attribute:
        attribute.name = "else_branch" if attribute.name == "then_branch" else "then_branch"


def another_sum(lowered: Lowered) -> None:
    """The first moment goes on from the second one."""
    first, second = (decayed_by(lowered, f"fc_0.w_0_moment{i}_0") for i in (1, 2))
    first.input[0] = second.input[0]


def decayed_by(lowered: Lowered, state: str) -> onnx.NodeProto:
    """The node that reads the old state, ``x * keep``."""
    return made_by(lowered, made_by(lowered, output_of(lowered, state)).input[0])


def forgotten(state: str) -> Callable[[Lowered], None]:
    """A bad step keeps the share of the old state that a good one does."""

    def mutate(lowered: Lowered) -> None:
        kept = choice_of(lowered, decayed_by(lowered, state).input[-1])
        kept.op_type = "Identity"
        del kept.input[:2]

    mutate.__name__ = f"forgotten_{state}"
    return mutate


def another_state(lowered: Lowered) -> None:
    gate_of(lowered, "adam_beta1_pow_acc_0").input[2] = "fc_0.w_0"


def verdict_by_maximum(lowered: Lowered) -> None:
    sums = ("ReduceSum", "ReduceL1")
    node = next(n for n in lowered.model.graph.node if n.op_type in sums and "found_inf" in n.name)
    node.op_type = "ReduceMax"


def gradient_left_out(lowered: Lowered) -> None:
    """The last group is not in found_inf, or the last gradient of the one that there is."""
    for node in lowered.model.graph.node:
        if "found_inf" in node.name and node.op_type == "Sum":
            del node.input[-1]
        elif "found_inf" in node.name and node.op_type == "Concat":
            node.input[-1] = node.input[1]  # what lies between gradients


def constant_condition(lowered: Lowered) -> None:
    lowered.model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "always"))
    gate_of(lowered, "adam_beta1_pow_acc_0").input[0] = "always"


def second_found_inf(lowered: Lowered) -> None:
    """One gate follows a test of its own."""
    gate = gate_of(lowered, "adam_beta1_pow_acc_0")
    test = onnx.helper.make_node("IsNaN", [gate.input[1]], ["own_test"], "own_test")
    ok = onnx.helper.make_node("Equal", ["own_test", "own_test"], ["own_ok"], "own_ok")
    lowered.model.graph.node.extend([test, ok])
    gate.input[0] = "own_ok"


def dead_update(state: str) -> Callable[[Lowered], None]:
    """OneFlow: an optimizer took the update for dead code."""

    def mutate(lowered: Lowered) -> None:
        tensor = output_of(lowered, state)
        outputs = [info for info in lowered.model.graph.output if info.name != tensor]
        del lowered.model.graph.output[:]
        lowered.model.graph.output.extend(outputs)

    mutate.__name__ = f"dead_update_of_{state}"
    return mutate


def gradient_not_rounded(lowered: Lowered) -> None:
    """onnxruntime on CPU: the test sees the fp32 value that fp16 would have turned into an infinity."""
    nodes = lowered.model.graph.node
    makers = {name: node for node in nodes for name in node.output}
    emulated = makers[lowered.tensors["fc_0.w_0@GRAD"].name]
    emulated.op_type = "Identity"
    emulated.input[0] = makers[emulated.input[0]].input[0]
    del emulated.attribute[:]


#: Of ``p + y * factor``: what a bad step may not make of ``y`` (1) and the factor (2). -0.0 becomes 0.0 in 0 * 1.
BROKEN = [(1, None), (1, 2.0), (2, None), (2, 1.0), (2, 0.0)]
LOWERED = [
    Case(swapped_branches, r"the gate of state 'adam_beta1_pow_acc_0', '.*' \(Where\), has its branches swapped"),
    Case(condition_through_not, r"the gate of state 'adam_beta1_pow_acc_0' goes through Not, 'negation' \(Not\)"),
    Case(without_gate("adam_beta1_pow_acc_0"), "state 'adam_beta1_pow_acc_0' is written without a gate"),
    Case(without_gate("batch_norm_0.w_1"), "state 'batch_norm_0.w_1' is written without a gate"),
    Case(without_gate("lr_step_0"), "state 'lr_step_0' is written without a gate"),
    Case(without_gate("fc_0.w_0_ema_0"), "state 'fc_0.w_0_ema_0' is written without a gate", {"average": True}),
    Case(another_state, r"the gate of state 'adam_beta1_pow_acc_0', '.*' \(Where\), does not keep the old value"),
    Case(verdict_by_maximum, r"looks for NaN with ReduceMax, '.*found_inf.*' \(ReduceMax\)"),
    Case(gradient_left_out, "found_inf of 'CheckFiniteAndUnscale.*' does not look at gradient '.*@UNSCALED'"),
    Case(constant_condition, "the gate of state 'adam_beta1_pow_acc_0' follows no test for NaN"),
    Case(second_found_inf, "gates follow 2 different found_inf: .*own_test"),
    Case(dead_update("loss_scaling_0"), "state 'loss_scaling_0' is not carried"),
    Case(dead_update("num_good_steps_0"), "state 'num_good_steps_0' is not carried"),
    Case(dead_update("fc_0.w_0_moment1_0"), "state 'fc_0.w_0_moment1_0' is not carried"),
]
#: On CUDA alone, where no update is a branch.
ON_CUDA = [
    *(
        Case(chosen("fc_0.w_0", place, number), "state 'fc_0.w_0' is written without a gate")
        for place, number in BROKEN
    ),
    Case(chosen("fc_0.w_0_moment2_0", 2, None), "state 'fc_0.w_0_moment2_0' is written without a gate"),
    Case(forgotten("fc_0.w_0_moment2_0"), "state 'fc_0.w_0_moment2_0' is written without a gate"),
    Case(another_sum, "state 'fc_0.w_0_moment1_0' is written without a gate"),
    Case(
        chosen("fc_0.w_0_fp32_master_0", 1, None),
        "state 'fc_0.w_0_fp32_master_0' is written without a gate",
        {"pure": True},
    ),
    Case(without_gate("fc_0.w_0"), "state 'fc_0.w_0' is written without a gate", {"pure": True}),
]
#: On CPU alone: CUDA has no emulated storage, and no branches.
ON_CPU = [
    Case(other_branch("fc_0.w_0", "Neg"), "state 'fc_0.w_0' is written without a gate, by '.*' \\(If\\)"),
    Case(other_branch("fc_0.w_0", "Neg"), "state 'fc_0.w_0' is written without a gate", {"pure": True}),
    Case(other_branch("fc_0.w_0_moment1_0", "fc_0.w_0"), "state 'fc_0.w_0_moment1_0' is written without a gate"),
    Case(swapped_if, "state 'fc_0.w_0' is written without a gate"),
    Case(
        gradient_not_rounded,
        r"looks at gradient 'fc_0.w_0@GRAD' before '.*' \(Identity\) is rounded to float16",
        {"pure": True},
    ),
]
