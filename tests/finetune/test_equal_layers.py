"""Layers that were copied when the model was made are equal until they are trained, and are trained apart."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp


def model(weights: tuple[str, str], scopes: tuple[str, str] = ("/layers.0/fc", "/layers.1/fc")) -> onnx.ModelProto:
    """Two products by equal matrices of these names, in modules of these names."""
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[2,3] x) => (float[2,3] y) { h = MatMul (x, w) r = Tanh (h) y = MatMul (r, w) }""")
    matrix = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    for name in dict.fromkeys(weights):
        made.graph.initializer.append(onnx.numpy_helper.from_array(matrix, name))
    products = [node for node in made.graph.node if node.op_type == "MatMul"]
    for node, weight, scope in zip(products, weights, scopes, strict=True):
        node.name, node.input[1] = f"{scope}/MatMul", weight
    return made


@pytest.mark.parametrize("weights", [("layers.0.fc.weight", "layers.1.fc.weight"), ("val_3", "val_95")])
def test_equal_layers_keep_their_own_matrices(weights: tuple[str, str]) -> None:
    """PyTorch's nn.TransformerEncoder copies one layer; exporters name its matrices, or make names up."""
    report = amp.prepare_training(amp.Program.from_onnx(model(weights)))
    assert report.trainable == ("layers.0.fc.weight", "layers.1.fc.weight")
    assert not any("tied" in note or "as one" in note for note in report.notes)


@pytest.mark.parametrize("second", ["/layer.0/fc", "/layer.0/fc_1"])
def test_what_one_module_reads_twice_stays_one(second: str) -> None:
    """A layer that runs twice, as in ALBERT, of whose matrix the exporter wrote a copy for each time. TorchScript's
    counts the times behind the module's name."""
    report = amp.prepare_training(amp.Program.from_onnx(model(("val_3", "val_95"), ("/layer.0/fc", second))))
    assert len(report.trainable) == 1 and any("tied again" in note for note in report.notes)


def test_one_matrix_of_several_layers_is_told() -> None:
    """The exporter has merged what was equal: nobody can tell whether that was meant."""
    program = amp.Program.from_onnx(model(("layers.0.fc.weight", "layers.0.fc.weight")))
    report = amp.prepare_training(program)
    assert report.trainable == ("layers.0.fc.weight",)
    assert any(note.startswith("read by several layers") for note in report.notes)
