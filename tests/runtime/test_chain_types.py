"""What one part of a step is told of the tensors that another gives it."""

from __future__ import annotations

import onnx

from amp_transpiler.runtime.chain import _type
from tests.helpers.sessions import session


def test_a_tensor_whose_rank_onnxruntime_does_not_know_is_no_scalar() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
      net (float[4] x, int64[N] shape) => (float y, float[4] z) { y = Reshape(x, shape)  z = Relu(x) }""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert [_type(output) for output in session(model).get_outputs()] == [("float32", None), ("float32", (4,))]
