"""A lowered model has the outputs of its program by name, constants and inputs among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.sessions import run

TEXT = """<ir_version: 9, opset_import: ["" : 17]>
g (float[2] x, float16[2] h) => (float[2] y, float[2] w, float[2] x, float16[2] h, float16[2] c, float16[2] k)
<float[2] w = {1, 2}> { y = Mul(x, w)  k = Add(h, c) }"""
FEEDS: dict[str, Any] = {"x": np.array([3, 4], np.float32), "h": np.array([5, 6], np.float16)}


@pytest.mark.parametrize("place", [amp.CPUPlace(), amp.CUDAPlace(0)], ids=repr)
def test_outputs_keep_their_names(place: Any, tmp_path: Any) -> None:
    model = onnx.parser.parse_model(TEXT)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([7, 8], np.float16), "c"))
    program = amp.convert(model)
    program.lower(place).to_onnx(str(tmp_path / "lowered.onnx"))
    lowered = onnx.load(tmp_path / "lowered.onnx")
    onnx.checker.check_model(lowered, full_check=True)
    assert [(v.name, v.type) for v in lowered.graph.output] == [(v.name, v.type) for v in model.graph.output]
    for got, want in zip(run(lowered, FEEDS), run(model, FEEDS), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("outputs", ["float[2] a, float[2] b", "float[2] b, float[2] a"])
def test_copies_that_are_outputs_in_another_order(outputs: str) -> None:
    """One is what the other copies, whichever comes first."""
    text = "a = Exp(x)  b = Identity(a)"
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> g (float[2] x) => ({outputs}) {{ {text} }}'
    )
    feed = {"x": FEEDS["x"]}
    lowered = amp.Program.from_onnx(model).lower(amp.CPUPlace()).model
    onnx.checker.check_model(lowered, full_check=True)
    for got, want in zip(run(lowered, feed), run(model, feed), strict=True):
        np.testing.assert_array_equal(got, want)
