"""LSTM, GRU and RNN in programs: torch's gradients, ONNX's own node tests, exported and built models in training."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.node import collect_testcases

import amp_transpiler as amp
from tests import recurrent_oracle
from tests.gradcheck import assert_near, check_gradient

RECORD = Path(__file__).resolve().parent / "data" / "recurrent_torch.npz"
#: Where torch's gates lie in ONNX's order: i, f, c, o -> i, o, f, c and r, z, n -> z, r, h.
GATES = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}


def reordered(type_: str, value: np.ndarray) -> np.ndarray:
    return np.concatenate([np.split(value, len(GATES[type_]))[i] for i in GATES[type_]])


def as_onnx(type_: str, named: dict[str, np.ndarray]) -> list[np.ndarray]:
    """torch's parameters, or their gradients, as W, R and B."""
    stacked = [
        np.stack([reordered(type_, named[f"{name}_l0{suffix}"]) for suffix in ("", "_reverse")])
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    return [*stacked[:2], np.concatenate(stacked[2:], axis=1)]


@pytest.mark.parametrize("type_", sorted(GATES))
def test_gradients_are_torchs(type_: str) -> None:
    with np.load(RECORD) as record:
        lengths = record["lengths"].astype(np.int32)
        kept = {key.removeprefix(f"{type_}_"): record[key] for key in record.files if key.startswith(f"{type_}_")}
    states = [name for name in ("state0", "state1") if name in kept]
    inputs = [kept["x"], *as_onnx(type_, kept), *(kept[name] for name in states)]
    grads = {name.removeprefix("grad_"): value for name, value in kept.items() if name.startswith("grad_")}
    expected = [grads["x"], *as_onnx(type_, grads), *(grads[name] for name in states)]
    program, startup = amp.Program(), amp.Program()
    with amp.program_guard(program, startup), amp.scope_guard(amp.Scope()):
        made = [amp.create_parameter(list(a.shape), "float32", initializer=a.astype(np.float32)) for a in inputs]
        wired = [*made[:4], program.add_constant("lengths", lengths), *made[4:]]
        ys = [program.add_variable(f"y{i}", "float32", shape) for i, shape in enumerate(
            [(6, 2, 3, 4), *[(2, 3, 4)] * len(states)])]  # fmt: skip
        attrs = {"hidden_size": 4, "direction": "bidirectional", "linear_before_reset": 1}
        if type_ != "GRU":
            del attrs["linear_before_reset"]
        program.add_operator(type_, wired, ys, attrs=attrs)
        weights = [kept[f"dy{i}"].astype(np.float32) for i in range(len(ys))]
        weights[0] = weights[0].reshape(6, 3, 2, 4).transpose(0, 2, 1, 3)
        total = None
        for y, weight in zip(ys, weights, strict=True):
            part = amp.nn.functional.sum(y * weight)
            total = part if total is None else total + part
        pairs = amp.append_backward(total)
        exe = amp.Executor(amp.CPUPlace())
        exe.run(startup)
        found = exe.run(program, feed={}, fetch_list=[*ys, *(gradient for _, gradient in pairs)])
    assert [v.name for v, _ in pairs] == [v.name for v in made]
    truth = [kept["y0"].reshape(6, 3, 2, 4).transpose(0, 2, 1, 3), *(kept[f"y{i}"] for i in range(1, len(ys)))]
    for name, one, other in zip([*"yhc"[: len(ys)], *"xwrbhc"], found, [*truth, *expected], strict=False):
        assert_near(one, other, 1e-5, f"{type_} {name}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("type_", sorted(GATES))
def test_onnx_node_tests(type_: str) -> None:
    cases = [case for case in collect_testcases(type_) if case.model.graph.node[0].op_type == type_]
    assert len(cases) >= 6
    for case in cases:
        node = case.model.graph.node[0]
        values, expected = case.data_sets[0]
        given = dict(zip([name for name in node.input if name], values, strict=True))
        inputs = [given.get(name) for name in node.input]
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attrs = {name: value.decode() if isinstance(value, bytes) else value for name, value in attrs.items()}
        oracle = partial(recurrent_oracle.run, type_, attrs)
        outputs = oracle(*(None if a is None else a.astype(np.float64) if a.dtype.kind == "f" else a for a in inputs))
        slots = [i for i, name in enumerate(node.output) if name]
        for slot, value in zip(slots, expected, strict=True):
            assert_near(outputs[slot], value, 1e-5, f"{case.name}: output {slot} of the oracle")
        check_gradient(type_, inputs, attrs=attrs, outputs=len(outputs), through=slots, forward=oracle, half=())
