"""Quantised models: what quantises and what undoes it follow their neighbours, and run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp

QDQ = """<ir_version: 8, opset_import: ["" : {opset}]>
m (float[4,8] x) => (float[4,4] y) <float s = {{0.02}}, int8 z = {{3}}, float t = {{0.01}}, int8 o = {{0}}, int8[8,4] w> {{
  a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)  v = DequantizeLinear(w, t, o)  c = MatMul(b, v)
  d = QuantizeLinear(c, s, z)  e = DequantizeLinear(d, s, z)  f = Slice(e, from, to)  y = Relu(f)
}}"""


def quantized(opset: int) -> onnx.ModelProto:
    text = QDQ.format(opset=opset).replace("int8[8,4] w>", "int8[8,4] w, int64[1] from = {0}, int64[1] to = {4}>")
    model = onnx.parser.parse_model(text)
    w = np.random.default_rng(0).integers(-127, 128, (8, 4), np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    del model.graph.value_info[:]
    return model


X = {"x": np.random.default_rng(1).normal(0, 0.5, (4, 8)).astype(np.float32)}


@pytest.mark.parametrize("opset", [13, 21])
def test_a_quantised_layer_runs_in_16_bit_without_casts_inside(opset: int) -> None:
    """Their scales are floats of the type of the data; the integers between them are what they were."""
    program = amp.convert(quantized(opset))
    of_scales = {(op.type, op.precision) for op in program.operators if "uantizeLinear" in op.type}
    assert of_scales == {("QuantizeLinear", "float16"), ("DequantizeLinear", "float16")}
    assert [op.type for op in program.operators].count("Cast") == 2
    verdict = amp.convert(quantized(opset), calibration=X, check=True, tolerance=0.05).conversion.verdict
    assert verdict is not None and verdict.met
