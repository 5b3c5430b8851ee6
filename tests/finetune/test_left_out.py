"""What training leaves as it is, by name or look, and says so."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.weights import not_a_weight


def program(text: str, **contents: np.ndarray) -> amp.Program:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in contents.items())
    return amp.Program.from_onnx(model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lifted_tensor_0", "what the model's code makes"),
        ("parametrizations.weight.0._u", "what the model's code makes"),
        ("net.0.parametrizations.weight.0._v", "what the model's code makes"),
        ("levels", ""),
        ("net.0.parametrizations.weight.original", ""),
    ],
)
def test_names_that_say_that_nothing_is_learned(name: str, reason: str) -> None:
    made = program("net (float[2,3] x) => (float[2,3] y) { y = Mul (x, c) }", c=np.array([0.1, 0.5, 0.9], np.float32))
    variable = made.var("c")
    variable.name = name
    assert not_a_weight(variable) == reason


def test_vectors_that_begin_as_counted_numbers_and_draws_are_told() -> None:
    text = """net (float[2,8] x) => (float[2,1] y) {
        r = RandomNormalLike (x)  d = Sub (x, centers)  e = Add (d, r)  f = Exp (e)  y = MatMul (f, w) }"""
    made = program(text, centers=np.linspace(-1, 1, 8, dtype=np.float32), w=np.ones((8, 1), np.float32) / 3)
    report = amp.prepare_training(made)
    assert report.trainable == ("w",)
    assert any(note.startswith("'centers': counted numbers") for note in report.notes)
    assert "1 operators (RandomNormalLike) draw by the program's seed" in report.notes
    named = program(text, centers=np.linspace(-1, 1, 8, dtype=np.float32), w=np.ones((8, 1), np.float32) / 3)
    assert set(amp.prepare_training(named, trainable=["w", "centers"]).trainable) == {"w", "centers"}
