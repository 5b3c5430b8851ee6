"""Scatters that combine: kernels on CPU know none in 16 bit, and those of GPUs add up in it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp

NET = """<ir_version: 9, opset_import: ["" : 18]> net (float[64,16] x, int64[64,16] i) => (float[4,16] y)
  <float[4,16] zeros, float[16,16] w> {{ a = MatMul (x, w) s = ScatterElements <axis = 0, reduction = "{how}"> (zeros, i, a)
  y = MatMul (s, w) }}"""


def net(how: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(NET.format(how=how))
    del model.graph.initializer[:]
    rng = np.random.default_rng(0)
    for name, content in (("zeros", np.zeros((4, 16))), ("w", rng.normal(size=(16, 16)) / 4)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(content.astype(np.float32), name))
    return model


@pytest.mark.parametrize("mode", ["pure", "mixed", "auto"])
@pytest.mark.parametrize("how", ["add", "max", "none"])
def test_what_is_combined_stays_fp32_and_runs(how: str, mode: str) -> None:
    model, rng = net(how), np.random.default_rng(1)
    feeds = {"x": rng.normal(size=(64, 16)).astype(np.float32), "i": rng.integers(0, 4, (64, 16))}
    if how == "none":  # of two that come to one place, any may stay
        feeds["i"] = np.tile(np.arange(64)[:, None] % 4, (1, 16))
        feeds["x"][4:] = np.tile(feeds["x"][:4], (15, 1))
    made = amp.convert(model, mode=mode)
    scatter = next(op for op in made.operators if op.type == "ScatterElements")
    assert (scatter.precision == "float32") == (how != "none")
    assert ("combines in the element type of its result" in scatter.reason) == (how != "none")
    outs = [
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for m in (model, made.to_onnx())
    ]
    assert np.linalg.norm(outs[1] - outs[0]) < 2e-3 * np.linalg.norm(outs[0])


def test_in_bfloat16_as_well() -> None:
    made = amp.convert(net("add"), dtype="bfloat16")
    assert [op.precision for op in made.operators if op.type in ("ScatterElements", "MatMul")] == [
        "bfloat16",
        "float32",
        "bfloat16",
    ]
