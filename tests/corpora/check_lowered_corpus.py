"""Lowered training steps that are broken in one place each; every one must be rejected, as in ``check_step_corpus``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from amp_transpiler.passes.lowering.lowering import Lowered
from tests.corpora.check_step_corpus import Case


def gate_of(lowered: Lowered, state: str) -> onnx.NodeProto:
    (tensor,) = [port.tensor for port in lowered.updates if port.variable == state]
    node = next(node for node in lowered.model.graph.node if tensor in node.output)
    while node.op_type != "Where":
        node = next(other for other in lowered.model.graph.node if node.input[0] in other.output)
    return node


def swapped_branches(lowered: Lowered) -> None:
    node = gate_of(lowered, "fc_0.w_0")
    node.input[1], node.input[2] = node.input[2], node.input[1]


def condition_through_not(lowered: Lowered) -> None:
    node = gate_of(lowered, "fc_0.w_0")
    lowered.model.graph.node.append(onnx.helper.make_node("Not", [node.input[0]], ["negated"], "negation"))
    node.input[0] = "negated"


def without_gate(state: str) -> Callable[[Lowered], None]:
    def mutate(lowered: Lowered) -> None:
        node = gate_of(lowered, state)
        node.op_type = "Identity"
        del node.input[2], node.input[0]

    mutate.__name__ = f"without_gate_of_{state}"
    return mutate


def another_state(lowered: Lowered) -> None:
    gate_of(lowered, "fc_0.w_0").input[2] = "fc_0.w_0_moment1_0"


def verdict_by_maximum(lowered: Lowered) -> None:
    node = next(n for n in lowered.model.graph.node if n.op_type == "ReduceSum" and "found_inf" in n.name)
    node.op_type = "ReduceMax"


def gradient_left_out(lowered: Lowered) -> None:
    """The second group is not in found_inf."""
    node = next(n for n in lowered.model.graph.node if n.op_type == "Sum" and "found_inf" in n.name)
    del node.input[-1]


def constant_condition(lowered: Lowered) -> None:
    lowered.model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "always"))
    gate_of(lowered, "fc_0.w_0").input[0] = "always"


def second_found_inf(lowered: Lowered) -> None:
    """One gate follows a test of its own."""
    gate = gate_of(lowered, "fc_0.w_0")
    test = onnx.helper.make_node("IsNaN", [gate.input[1]], ["own_test"], "own_test")
    ok = onnx.helper.make_node("Equal", ["own_test", "own_test"], ["own_ok"], "own_ok")
    lowered.model.graph.node.extend([test, ok])
    gate.input[0] = "own_ok"


def dead_update(state: str) -> Callable[[Lowered], None]:
    """OneFlow: an optimizer took the update for dead code."""

    def mutate(lowered: Lowered) -> None:
        (tensor,) = [port.tensor for port in lowered.updates if port.variable == state]
        outputs = [info for info in lowered.model.graph.output if info.name != tensor]
        del lowered.model.graph.output[:]
        lowered.model.graph.output.extend(outputs)

    mutate.__name__ = f"dead_update_of_{state}"
    return mutate


def gradient_not_rounded(lowered: Lowered) -> None:
    """onnxruntime on CPU: the test sees the fp32 value that fp16 would have turned into an infinity."""
    nodes = lowered.model.graph.node
    made_by = {name: node for node in nodes for name in node.output}
    emulated = made_by[lowered.tensors["fc_0.w_0@GRAD"].name]
    emulated.op_type = "Identity"
    emulated.input[0] = made_by[emulated.input[0]].input[0]
    del emulated.attribute[:]


LOWERED = [
    Case(swapped_branches, r"the gate of state 'fc_0.w_0', '.*' \(Where\), has its branches swapped"),
    Case(condition_through_not, r"the gate of state 'fc_0.w_0' goes through Not, 'negation' \(Not\)"),
    Case(without_gate("fc_0.w_0"), r"state 'fc_0.w_0' is written without a gate, by '.*' \(Sub\)"),
    Case(without_gate("adam_beta1_pow_acc_0"), "state 'adam_beta1_pow_acc_0' is written without a gate"),
    Case(
        without_gate("fc_0.w_0_fp32_master_0"),
        "state 'fc_0.w_0_fp32_master_0' is written without a gate",
        {"pure": True},
    ),
    Case(without_gate("batch_norm_0.w_1"), "state 'batch_norm_0.w_1' is written without a gate"),
    Case(without_gate("lr_step_0"), "state 'lr_step_0' is written without a gate"),
    Case(without_gate("fc_0.w_0_ema_0"), "state 'fc_0.w_0_ema_0' is written without a gate", {"average": True}),
    Case(another_state, r"the gate of state 'fc_0.w_0', '.*' \(Where\), does not keep the old value"),
    Case(verdict_by_maximum, r"looks for NaN with ReduceMax, '.*found_inf.*' \(ReduceMax\)"),
    Case(gradient_left_out, "found_inf of 'CheckFiniteAndUnscale.*' does not look at gradient '.*@UNSCALED'"),
    Case(constant_condition, "the gate of state 'fc_0.w_0' follows no test for NaN"),
    Case(second_found_inf, "gates follow 2 different found_inf: .*own_test"),
    Case(dead_update("loss_scaling_0"), "state 'loss_scaling_0' is not carried"),
    Case(dead_update("num_good_steps_0"), "state 'num_good_steps_0' is not carried"),
    Case(dead_update("fc_0.w_0_moment1_0"), "state 'fc_0.w_0_moment1_0' is not carried"),
]
#: On CPU alone: CUDA has no emulated storage.
ON_CPU = [
    Case(
        gradient_not_rounded,
        r"looks at gradient 'fc_0.w_0@GRAD' before '.*' \(Identity\) is rounded to float16",
        {"pure": True},
    ),
]
