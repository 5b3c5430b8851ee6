"""What one part of a step is told of the tensors that another gives it."""

from __future__ import annotations

from pathlib import Path

import onnx

from amp_transpiler.runtime.chain import _type
from tests.helpers.sessions import session


def test_a_tensor_whose_rank_onnxruntime_does_not_know_is_no_scalar(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
      net (float[4] x, int64[N] shape) => (float y, float[4] z, float s) {
        y = Reshape(x, shape)  z = Relu(x)  s = ReduceSum<keepdims = 0>(x)
      }""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    outputs = session(model, written=tmp_path / "runs.onnx").get_outputs()
    graph = onnx.load(tmp_path / "runs.onnx").graph
    assert [_type(output, graph) for output in outputs] == [("float32", None), ("float32", (4,)), ("float32", ())]
    assert _type(outputs[2], None) == ("float32", None)
