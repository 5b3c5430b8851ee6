"""On CPU the weights of a recurrent step stand left in its products: onnxruntime packs what stands right every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ops.rnn import directions

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
LENGTHS = [6, 0, 4, 1, 5, 2, 6, 3, 6]


def trained(
    type_: str, count: int, batch: int, lengths: bool, peepholes: bool, attrs: dict[str, Any]
) -> tuple[amp.Program, amp.Program, list[amp.Variable]]:
    """One operator on six steps, and Y, the last states and the gradients of all that it takes."""
    rng, program, startup = np.random.default_rng(0), amp.Program(), amp.Program()
    with amp.program_guard(program, startup):
        many, states = GATES[type_] * 4, 2 if type_ == "LSTM" else 1
        shapes: list[list[int] | None] = [[6, batch, 2], *([count, many, n] for n in (2, 4)), [count, 2 * many], None]
        shapes += [[count, batch, 4]] * states + [[count, 12]] * peepholes
        inputs = [
            s and amp.create_parameter(s, "float32", initializer=rng.normal(size=s).astype(np.float32)) for s in shapes
        ]
        if lengths:
            inputs[4] = program.add_constant("lengths", np.array(LENGTHS[:batch], np.int32))
        y = program.add_variable("y", "float32", (6, count, batch, 4))
        last = [program.add_variable(f"s{i}", "float32", (count, batch, 4)) for i in range(states)]
        both = {"direction": "bidirectional"} if count == 2 else {}
        program.add_operator(type_, inputs, [y, *last], attrs={"hidden_size": 4, **both, **attrs})
        weight = amp.nn.functional.sum(y * rng.normal(size=y.shape).astype(np.float32))
        loss = sum((amp.nn.functional.sum(s * s) for s in last), weight)
        return program, startup, [y, *last, *(gradient for _, gradient in amp.append_backward(loss))]


@pytest.mark.parametrize(
    ("type_", "count", "lengths", "peepholes", "attrs"),
    [
        ("LSTM", 2, True, False, {}),
        ("LSTM", 1, True, True, {"input_forget": 1, "clip": 0.6}),
        ("GRU", 2, True, False, {"linear_before_reset": 1}),
        ("GRU", 1, False, False, {"linear_before_reset": 0}),
        ("RNN", 2, False, False, {"activations": ["Elu", "Tanh"]}),
    ],
)
def test_nothing_comes_out_otherwise(
    type_: str, count: int, lengths: bool, peepholes: bool, attrs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, startup, wanted = trained(type_, count, 9, lengths, peepholes, attrs)
    found = []
    for wide in (8, 10):
        monkeypatch.setattr(directions, "_WIDE", wide)
        executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        executor.run(startup, scope=scope)
        found.append(executor.run(program, fetch_list=wanted, scope=scope))
    for ours, plain in zip(*found, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6 * np.abs(plain).max())


@pytest.mark.parametrize(("batch", "left"), [(7, False), (8, True)])
def test_from_eight_rows_on_a_step_multiplies_the_weights_with_the_state(batch: int, left: bool) -> None:
    program, _, wanted = trained("LSTM", 1, batch, False, False, {})
    model = program.lower(amp.CPUPlace(), fetch_list=wanted).model
    scans = [node for node in model.graph.node if node.op_type == "Scan"]
    bodies = [onnx.helper.get_node_attr_value(node, "body") for node in scans]
    products = [node for body in bodies for node in body.node if node.op_type in ("Gemm", "MatMul")]
    made = [{info.name for info in body.input} | {o for n in body.node for o in n.output} for body in bodies]
    assert len(products) == 2  # a step forward and one back
    for node, inside in zip(products, made, strict=True):
        assert (node.input[0] not in inside) == left and (node.input[1] in inside) == left
