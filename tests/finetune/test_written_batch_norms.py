"""Batch normalisations that an exporter wrote out have no statistics any more: a note says that they do not train so."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp

TEXT = """<ir_version: 8, opset_import: ["" : 17]> net (float[4,3] x) => (float[4,3] y)
    { z = MatMul (x, w) m = Mul (z, a) y = Add (m, b) }"""
KERAS = "functional_1/batch_normalization_1/batchnorm/mul:0"


@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        (KERAS, "train", True),
        (KERAS, "synchronized", True),
        (KERAS, "frozen", False),
        ("model/layer_normalization/batchnorm/mul/ReadVariableOp:0", "train", False),
        ("scale", "train", False),
    ],
)
def test_what_is_left_of_a_batch_norm_is_told(name: str, how: str, told: bool) -> None:
    model = onnx.parser.parse_model(TEXT)
    model.graph.node[1].input[1] = name
    held = {"w": np.eye(3) + 1, name: np.array([1, 2, 0.5]), "b": np.array([0.5, -1, 2])}
    for key, array in held.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), key))
    report = amp.prepare_training(amp.Program.from_onnx(model), batch_norm=how)
    assert any(note.startswith(f"'{name}': of batch norm") for note in report.notes) == told
    assert set(report.trainable) == {"w", name, "b"}
