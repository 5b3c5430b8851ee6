"""LSTM, GRU and RNN in programs: torch's gradients, exported and built models in training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GradientError
from tests.helpers import recurrent_oracle
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.gradcheck import assert_near
from tests.helpers.rules import tensor_info
from tests.helpers.where import RECORDED

RECORD = RECORDED / "recurrent_torch.npz"
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
        ys = [
            program.add_variable(f"y{i}", "float32", shape)
            for i, shape in enumerate([(6, 2, 3, 4), *[(2, 3, 4)] * len(states)])
        ]
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


MODES = ("fp32", "mixed", "pure")


def losses(
    program: amp.Program,
    startup: amp.Program,
    loss: amp.Variable,
    mode: str,
    feed: dict[str, np.ndarray],
    steps: int,
    rate: float = 1e-3,
) -> list[float]:
    """The loss of each step in one of three modes, the gradients scaled in 16 bit."""
    optimizer = amp.optimizer.Adam(rate, multi_precision=mode == "pure")
    if mode != "fp32":
        optimizer = amp.decorate(optimizer, init_loss_scaling=128.0, use_pure_fp16=mode == "pure", use_fp16_guard=False)
    optimizer.minimize(loss, startup)
    exe = amp.Executor(amp.CPUPlace())
    exe.run(startup)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace())
    return [float(exe.run(program, feed=feed, fetch_list=[loss])[0]) for _ in range(steps)]


def built(layer: str) -> tuple[amp.Program, amp.Program, amp.Variable]:
    """Two bidirectional layers on sequences of different lengths, and a loss on their last states."""
    program, startup = amp.Program(), amp.Program()
    with amp.program_guard(program, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 12, 6], "float32")
        lengths = amp.data("lengths", [4], "int64")
        y, *last = getattr(amp.nn, layer)(x, 8, num_layers=2, direction="bidirectional", sequence_length=lengths)
        assert y.shape == (4, 12, 16) and [s.shape for s in last] == [(4, 4, 8)] * len(last)
        scores = amp.nn.fc(last[0], 3, num_flatten_dims=2)
        loss = amp.nn.functional.mse_loss(scores, amp.data("target", [4, 4, 3], "float32"))
    return program, startup, loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", ["lstm", "gru"])
def test_built_layers_train(layer: str, mode: str) -> None:
    program, startup, loss = built(layer)
    names = [v.name for v in program.parameters]
    assert names[:6] == [f"{layer}_0.{part}" for part in ("w_0", "w_1", "b_0", "w_2", "w_3", "b_1")]
    rng = np.random.default_rng(0)
    feed = {
        "x": rng.normal(size=(4, 12, 6)).astype(np.float32),
        "lengths": np.array([12, 7, 1, 9]),
        "target": rng.normal(size=(4, 4, 3)).astype(np.float32),
    }
    with amp.program_guard(program, startup), amp.scope_guard(amp.Scope()):
        found = losses(program, startup, loss, mode, feed, 40, 2e-2)
    assert np.isfinite(found).all() and found[-1] < 0.4 * found[0], found


@pytest.mark.parametrize("layer", ["lstm", "gru"])
def test_a_cuda_step_has_no_control_flow_and_no_gaps(layer: str) -> None:
    program, startup, loss = built(layer)
    with amp.program_guard(program, startup):
        optimizer = amp.decorate(
            amp.optimizer.Adam(1e-3, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False
        )
        optimizer.minimize(loss, startup)
    model = program.lower(amp.CUDAPlace(0)).model
    assert not {"Scan", "Loop", "If"} & {node.op_type for node in model.graph.node}
    assert not without_cuda_kernel(model)


@pytest.mark.parametrize("layer, count", [("lstm", 2), ("gru", 1)])
def test_layers_are_what_numpy_computes(layer: str, count: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 2, 3)).astype(np.float32)
    program, startup = amp.Program(), amp.Program()
    with amp.program_guard(program, startup), amp.unique_name.guard(), amp.scope_guard(amp.Scope()):
        states = [amp.data(f"s{i}", [2, 2, 4], "float32") for i in range(count)]
        fed = {f"s{i}": rng.normal(size=(2, 2, 4)).astype(np.float32) for i in range(count)}
        given = tuple(states) if count == 2 else states[0]
        y, *last = getattr(amp.nn, layer)(
            amp.data("x", [5, 2, 3], "float32"),
            4,
            num_layers=2,
            time_major=True,
            initial_states=given,
            direction="reverse",
        )
        exe = amp.Executor(amp.CPUPlace())
        exe.run(startup)
        weights = {v.name: amp.global_scope().find_var(v.name) for v in program.parameters}
        found = exe.run(program, feed={"x": x, **fed}, fetch_list=[y, *last])
    attrs, level, ends = {"direction": "reverse", "linear_before_reset": 1}, x, []
    for i in range(2):
        w, r, b = (np.asarray(weights[f"{layer}_0.{part}"]) for part in (f"w_{2 * i}", f"w_{2 * i + 1}", f"b_{i}"))
        start = [fed[f"s{k}"][i : i + 1] for k in range(count)]
        level, *last_of = recurrent_oracle.run(layer.upper(), attrs, level, w, r, b, None, *start)
        level = level[:, 0]
        ends.append(last_of)
    for one, other in zip(found, [level, *(np.concatenate(e) for e in zip(*ends, strict=True))], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_layers_refuse_what_does_not_fit() -> None:
    with amp.program_guard(amp.Program(), amp.Program()):
        x = amp.data("x", [4, 12, 6], "float32")
        with pytest.raises(ArgumentError, match=r"direction is 'both'.*bidirectional"):
            amp.nn.lstm(x, 8, direction="both")
        with pytest.raises(ArgumentError, match=r"must be \[2, batch, 8\]"):
            amp.nn.gru(x, 8, direction="bidirectional", initial_states=amp.data("h", [1, 4, 8], "float32"))
        with pytest.raises(ArgumentTypeError, match="two variables, h and c"):
            amp.nn.lstm(x, 8, initial_states=x)
        with pytest.raises(ArgumentError, match="3 dimensions"):
            amp.nn.gru(amp.data("flat", [4, 6], "float32"), 8)
        with pytest.raises(ArgumentError, match="param_attr=False"):
            amp.nn.gru(x, 8, param_attr=False)


def test_activations_that_are_not_known_are_named_at_append_backward() -> None:
    program = amp.Program()
    with amp.program_guard(program, amp.Program()):
        x, w, r = (amp.create_parameter(shape) for shape in ([3, 2, 2], [1, 4, 2], [1, 4, 4]))
        for names, message in ((["Swish"], "RNN.*'Swish' is none of sigmoid, tanh"), (["Tanh"] * 2, "2 .*take 1")):
            y = program.add_variable(program.unique("y"), "float32", (3, 1, 2, 4))
            program.add_operator("RNN", [x, w, r], [y], attrs={"hidden_size": 4, "activations": names})
            with pytest.raises(GradientError, match=message):
                amp.append_backward(amp.nn.functional.sum(y))


@pytest.mark.parametrize("opset", [7, 11, 14, 17])
@pytest.mark.parametrize("type_", sorted(GATES))
def test_imported_models_of_any_opset_train(type_: str, opset: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = 4 * len(GATES[type_])
    weights = {"W": rng.normal(size=(1, rows, 3)), "R": rng.normal(size=(1, rows, 4))}
    tensors = [onnx.numpy_helper.from_array(a.astype(np.float32), name) for name, a in weights.items()]
    node = onnx.helper.make_node(type_, ["x", "W", "R"], ["y"], hidden_size=4)
    infos = [tensor_info("x", "float32", [6, 2, 3])], [tensor_info("y", "float32", [6, 1, 2, 4])]
    graph = onnx.helper.make_graph([node], "layer", *infos, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, tmp_path / "layer.onnx")
    program = amp.Program.from_onnx(str(tmp_path / "layer.onnx"))
    with amp.program_guard(program, program.startup), amp.scope_guard(amp.Scope()):
        loss = amp.nn.functional.mean(amp.nn.functional.pow(program.outputs[0], 2.0))
        feed = {"x": rng.normal(size=(6, 2, 3)).astype(np.float32)}
        found = losses(program, program.startup, loss, "fp32", feed, 15, 3e-2)
    assert found[-1] < 0.8 * found[0], found


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layer", ["lstm", "gru"])
def test_kernels_of_any_direction_are_of_16_bit_on_a_gpu(layer: str, direction: str) -> None:
    program, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(program, startup), amp.unique_name.guard():
        with amp.fp16_guard():
            x = amp.data("x", [2, 5, 8], "float32")
            y = amp.nn.functional.cast(getattr(amp.nn, layer)(x, 4, direction=direction)[0], "float32")
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True)
        optimizer.minimize(amp.nn.functional.mean(y * y), startup)
    rows = {row.operator: row for row in program.cost_estimate(amp.CUDAPlace(0)).operators}
    assert rows[layer.upper()].flops_16 > 0 == rows[layer.upper()].flops_32
