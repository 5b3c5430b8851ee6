"""Recurrent layers of Keras have one bias, which TensorFlow's exporter writes beside zeros."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp

RNG = np.random.default_rng(0)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
X = RNG.normal(size=(3, 2, 3)).astype(np.float32)
EVERY = [("LSTM", ""), ("GRU", ""), ("RNN", ""), ("GRU", "linear_before_reset = 1,")]


def load(kind: str, more: str, bias: np.ndarray, name: str = "B0__50") -> amp.Program:
    text = (
        f"net (float[3,2,3] x) => (float[3,1,2,2] y) {{ y = {kind} <hidden_size = 2, {more} layout = 0> (x, w, r, b) }}"
    )
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    model.graph.node[0].input[3] = name
    shapes = {"w": (1, 2 * GATES[kind], 3), "r": (1, 2 * GATES[kind], 2)}
    held = {key: np.random.default_rng(1).normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    for key, array in (held | {name: bias}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    return amp.Program.from_onnx(model)


def bias_of(kind: str, *halves: str) -> np.ndarray:
    size = 2 * GATES[kind]
    parts = [RNG.normal(size=size) if half == "some" else np.zeros(size) for half in halves]
    return np.concatenate(parts)[None].astype(np.float32)


@pytest.mark.parametrize(("kind", "more"), EVERY)
def test_the_half_that_is_zeros_is_not_trained(kind: str, more: str) -> None:
    """But for a GRU that resets what is made of the state with its bias."""
    size, program = 2 * GATES[kind], load(kind, more, bias_of(kind, "some", "zeros"))
    report = amp.prepare_training(program)
    assert set(report.trainable) == {"w", "r", "B0__50"}
    assert program.var("B0__50").shape == (1, 2 * size if more else size)
    assert any("one bias of a recurrent layer" in note for note in report.notes) == (not more)


@pytest.mark.parametrize(("kind", "more"), EVERY)
def test_where_all_are_zeros_an_lstm_has_no_bias(kind: str, more: str) -> None:
    """One of Keras begins with ones at its forget gate. Other layers begin with zeros."""
    size, program = 2 * GATES[kind], load(kind, more, bias_of(kind, "zeros", "zeros"))
    report = amp.prepare_training(program)
    assert ("B0__50" in report.trainable) == (kind != "LSTM")
    assert any("layer without bias" in note for note in report.notes) == (kind == "LSTM")
    if kind != "LSTM":
        assert program.var("B0__50").shape == (1, 2 * size if more else size)
    named = amp.prepare_training(load(kind, more, bias_of(kind, "zeros", "zeros")), trainable=["*", "B0__50"])
    assert "B0__50" in named.trainable


@pytest.mark.parametrize(
    ("name", "halves"),
    [("B0__50", ("some", "some")), ("onnx::LSTM_85", ("some", "zeros")), ("helper.concat.9", ("zeros", "zeros"))],
)
def test_two_biases_stay_two(name: str, halves: tuple[str, str]) -> None:
    """PyTorch and Paddle have them."""
    program = load("LSTM", "", bias_of("LSTM", *halves), name)
    assert name in amp.prepare_training(program, restore=False).trainable
    assert program.var(name).shape == (1, 16)


def test_the_bias_moves_by_its_own_gradient() -> None:
    """h = tanh(W x + R h + b), its gradient by differences in float64."""
    first = bias_of("RNN", "some", "zeros")
    program = load("RNN", "", first)
    weights = {name: np.asarray(onnx.numpy_helper.to_array(program.var(name).data), np.float64)[0] for name in "wr"}
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        amp.optimizer.SGD(0.1).minimize(amp.nn.functional.sum(program.outputs[0]))
    exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    exe.run(program.startup, scope=scope)
    exe.run(program, {"x": X}, scope=scope)

    def total(bias: np.ndarray) -> float:
        h, found = np.zeros((2, 2)), 0.0
        for x in X.astype(np.float64):
            h = np.tanh(x @ weights["w"].T + h @ weights["r"].T + bias)
            found += h.sum()
        return found

    steps = 1e-6 * np.eye(2)
    slope = np.array([(total(first[0, :2] + step) - total(first[0, :2] - step)) / 2e-6 for step in steps])
    np.testing.assert_allclose(scope.find_var("B0__50")[0], first[0, :2] - 0.1 * slope, rtol=1e-5)
