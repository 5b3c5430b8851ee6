"""Operators of opsets 1 to 6 compute at opset 7 what they said, and run; onnxruntime has no kernels of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from tests.helpers.sessions import run

#: What PyTorch exported at opset 6, with the numbers that it computed.
RECORDED = Path(onnx.__file__).parent / "backend" / "test" / "data"
X = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
C, ROW = np.array([0.5, -1, 2], np.float32), np.array([1, 2, 3, 4, 5], np.float32)

#: name -> opset, node text over ``x`` and the vectors ``c`` (as long as the channels) and ``r`` (as long as rows), what
#: ``y`` is
OLD: dict[str, tuple[int, str, Any]] = {
    "along the channels": (6, "y = Add <broadcast = 1, axis = 1> (x, c)", X + C[:, None, None]),
    "along the channels, from behind": (1, "y = Mul <broadcast = 1, axis = -3> (x, c)", X * C[:, None, None]),
    "along the last axis": (4, "y = Sub <broadcast = 1> (x, r)", X - ROW),
    "used again": (3, "a = Relu <consumed_inputs = [1]> (x) y = Div <broadcast = 1> (a, r)", np.maximum(X, 0) / ROW),
    "of equal shape": (5, "y = Add <broadcast = 0> (x, x)", X + X),
    "slopes of channels": (6, "y = PRelu(x, c)", np.where(X < 0, C[:, None, None] * X, X)),
    "a shape": (4, "a = Reshape <shape = [0, -1]> (x) y = Relu(a)", np.maximum(X.reshape(2, -1), 0)),
    "a type": (5, 'a = Greater <broadcast = 1> (x, r) y = Cast <to = "FLOAT"> (a)', (X > ROW).astype(np.float32)),
    "joined": (3, "y = Concat(x, x)", np.concatenate([X, X], 1)),
    "scales": (6, 'y = Upsample <height_scale = 2.0, width_scale = 1.0, mode = "nearest"> (x)', X.repeat(2, 2)),
    "paddings": (1, "y = Pad <paddings = [0, 0, 0, 1, 0, 0, 0, 0]> (x)", np.pad(X, [(0, 0)] * 3 + [(1, 0)])),
    "a norm": (1, "y = GlobalLpPool <p = 1.0> (x)", np.abs(X).sum((2, 3), keepdims=True)),
    "dropout": (6, "y, mask = Dropout <is_test = 1, ratio = 0.5> (x)", X),
    "in a branch": (
        6,
        "y = If <then_branch = a () => (float z) { z = Add <broadcast = 1, axis = 1>"
        " (x, c) }, else_branch = b () => (float z) { z = Relu(x) }> (t)",
        X + C[:, None, None],
    ),
}


def model_of(opset: int, body: str, shape: tuple[int, ...] = (1,), rank: bool = True) -> onnx.ModelProto:
    weights = "float[3] c = {0.5, -1, 2}, float[5] r = {1, 2, 3, 4, 5}, bool t = {1}"
    text = f'<ir_version: 4, opset_import: ["" : {opset}]> m (float[2,3,4,5] x) => (float{list(shape)} y) <{weights}> {{ {body} }}'
    model = onnx.parser.parse_model(text)
    if not rank:
        model.graph.input[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("name", OLD)
def test_an_old_form(name: str) -> None:
    opset, body, expected = OLD[name]
    program = amp.Program.from_onnx(model_of(opset, body, expected.shape))
    assert program.opset() == opset and not program.untyped()
    program.convert_opset(7)
    (got,) = run(program.to_onnx(), {"x": X})[:1]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    half = amp.convert(model_of(opset, body, expected.shape))
    assert half.conversion.notes[0] == f"opset {opset} raised to 7, the oldest that onnxruntime runs"
    onnx.checker.check_model(half.to_onnx(), full_check=True)
    np.testing.assert_allclose(run(half.to_onnx(), {"x": X})[0], expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "name", ["test_operator_addmm", "test_operator_params", "test_PReLU_2d", "test_BatchNorm2d_eval", "test_GLU_dim"]
)
def test_what_was_recorded(name: str) -> None:
    (folder,) = RECORDED.glob(f"*/{name}")
    sets = folder / "test_data_set_0"

    def arrays(kind: str) -> list[Any]:
        return [onnx.numpy_helper.to_array(onnx.load_tensor(str(f))) for f in sorted(sets.glob(f"{kind}_*.pb"))]

    program = amp.Program.from_onnx(folder / "model.onnx")
    program.convert_opset(7)
    feeds = dict(zip([v.name for v in program.inputs], arrays("input"), strict=True))
    for got, expected in zip(run(program.to_onnx(), feeds), arrays("output"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("opset", "body", "complaint"),
    [
        (1, "y = Tile(x, c, r)", "Tile.*how often it repeats"),
        (1, "y = Split <axis = 1> (x, c)", "Split.*are an input"),
        (5, 'y = Cast <to = "REAL"> (x)', "'REAL' is no element type"),
        (6, "y = Add <broadcast = 1, axis = 1> (x, c)", "along axis 1, and how many axes"),
    ],
)
def test_what_has_no_form_is_named(opset: int, body: str, complaint: str) -> None:
    model = model_of(opset, body, rank="axis 1" not in complaint)
    with pytest.raises(GraphError, match=complaint):
        amp.convert(model)
