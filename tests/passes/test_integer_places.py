"""Where the largest or smallest integer is, is asked in operators that CUDA has kernels of; ties are as ONNX says."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.integer_places import write_integer_places

X = np.random.default_rng(0).integers(0, 4, (3, 5, 4))


@pytest.mark.parametrize(
    ("type_", "axis", "keepdims", "last"), list(product(["ArgMax", "ArgMin"], [0, 1, -1, None], [0, 1], [0, 1]))
)
def test_places_are_those_of_onnxruntime(type_: str, axis: int | None, keepdims: int, last: int) -> None:
    attrs = f"keepdims = {keepdims}, select_last_index = {last}" + ("" if axis is None else f", axis = {axis}")
    for dtype in ("int32", "int64", "uint8"):
        text = f'<ir_version: 8, opset_import: ["" : 20]> g ({dtype}[3, 5, 4] x) => (int64[a, b, c] y) '
        model = onnx.parser.parse_model(text + f"{{ y = {type_} <{attrs}> (x) }}")
        feeds = {"x": X.astype(dtype)}
        (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
        found = amp.Program.from_onnx(model)
        assert write_integer_places(found) and not write_integer_places(found)
        made = found.to_onnx()
        assert type_ not in {node.op_type for node in made.graph.node}
        (y,) = ort.InferenceSession(made.SerializeToString()).run(None, feeds)
        assert y.dtype == np.int64
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("kind", ["float[3, 5]", "int64[3, n]"])
def test_floats_and_axes_of_open_size_stay(kind: str) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 20]> g ({kind} x) => (int64[3] y) '
    found = amp.Program.from_onnx(onnx.parser.parse_model(text + "{ y = ArgMax <axis = 1, keepdims = 0> (x) }"))
    assert not write_integer_places(found) and [op.type for op in found.operators] == ["ArgMax"]
