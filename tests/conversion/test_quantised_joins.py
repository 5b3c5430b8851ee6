"""Quantised models whose Concat onnxruntime's CPU provider makes an integer kernel of load in 16 bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp

JOINED = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[1, 4, 8] x, float[1, 4, 8] z, float[8, 3] w) => (float[1, 8, 3] y)
    <float s = {0.05}, uint8 p = {128}, float s2 = {0.06}> {
        xq = QuantizeLinear(x, s, p)  xd = DequantizeLinear(xq, s, p)
        zq = QuantizeLinear(z, s, p)  zd = DequantizeLinear(zq, s, p)
        c = Concat <axis = 1> (xd, zd)
        cq = QuantizeLinear(c, s2, p)  cd = DequantizeLinear(cq, s2, p)
        y = MatMul(cd, w) }"""


def _run(model: onnx.ModelProto, feeds: dict[str, Any]) -> Any:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    kinds = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
    return session.run(None, {each.name: feeds[each.name].astype(kinds[each.type]) for each in session.get_inputs()})[0]


@pytest.mark.parametrize("keep_io", [True, False])
@pytest.mark.parametrize("mode", ["pure", "mixed"])
def test_a_join_of_what_is_quantised_stays_fp32(mode: str, keep_io: bool) -> None:
    model = onnx.parser.parse_model(JOINED)
    converted = amp.convert(model, mode=mode, keep_io=keep_io).to_onnx()
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=shape) for name, shape in (("x", (1, 4, 8)), ("z", (1, 4, 8)), ("w", (8, 3)))}
    np.testing.assert_allclose(_run(converted, feeds), _run(model, feeds), atol=0.2)
    makers = {name: node for node in converted.graph.node for name in node.output}
    kinds = {t.name: t.data_type for t in converted.graph.initializer}
    (join,) = (node for node in converted.graph.node if node.op_type == "Concat")
    assert {kinds[makers[name].input[1]] for name in join.input} == {onnx.TensorProto.FLOAT}


def test_what_is_read_elsewhere_too_may_be_16_bit() -> None:
    """No integer kernel is made of it then."""
    text = JOINED.replace("(float[1, 8, 3] y)", "(float[1, 8, 3] y, float[1, 8, 8] c)")
    model = onnx.parser.parse_model(text)
    converted = amp.convert(model, mode="pure").to_onnx()
    feeds = {name: np.ones(shape) for name, shape in (("x", (1, 4, 8)), ("z", (1, 4, 8)), ("w", (8, 3)))}
    np.testing.assert_allclose(_run(converted, feeds), _run(model, feeds), atol=0.2)
