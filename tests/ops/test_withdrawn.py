"""Operators that ONNX withdrew compute what onnxruntime's kernels compute, at opsets that have none of them as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.contrib_types import WITHDRAWN
from tests.helpers.sessions import run

X = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Affine": ("Affine", {"alpha": 2.0, "beta": 3.0}),
    "Affine by default": ("Affine", {}),
    "Scale": ("Scale", {"scale": 0.5}),
    "ImageScaler": ("ImageScaler", {"scale": 0.5, "bias": [1.0, -2.0, 3.0]}),
    "ParametricSoftplus": ("ParametricSoftplus", {"alpha": 2.0, "beta": 3.0}),
    "ScaledTanh": ("ScaledTanh", {"alpha": 2.0, "beta": 3.0}),
    "Crop by borders": ("Crop", {"border": [1, 0, 2, 1]}),
    "Crop to a size": ("Crop", {"border": [1, 2, 0, 0], "scale": [2, 3]}),
    "DynamicSlice": ("DynamicSlice", {}),
}


def model_of(type_: str, attrs: dict[str, Any]) -> onnx.ModelProto:
    given = [[1], [3], [2]] if type_ == "DynamicSlice" else []
    names = [f"i{slot}" for slot, _ in enumerate(given)]
    nodes = [onnx.helper.make_node(type_, ["x", *names], ["h"], **attrs), onnx.helper.make_node("Relu", ["h"], ["y"])]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)
    y = onnx.helper.make_empty_tensor_value_info("y")
    held = [onnx.numpy_helper.from_array(np.array(each), name) for name, each in zip(names, given, strict=True)]
    graph = onnx.helper.make_graph(nodes, "m", [x], [y], held)
    return onnx.helper.make_model(graph, ir_version=4, opset_imports=[onnx.helper.make_opsetid("", 8)])


def test_each_of_them_is_tried() -> None:
    assert {type_ for type_, _ in CASES.values()} == set(WITHDRAWN)


@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same(name: str) -> None:
    model = model_of(*CASES[name])
    (expected,) = run(model, {"x": X})
    program = amp.Program.from_onnx(model)
    assert program.var("h").dtype == "float32" and program.var("h").shape in (expected.shape, None)
    half = amp.convert(model, check=True)
    assert half.conversion.verdict is not None and half.conversion.verdict.met
    assert half.opset() == 13 and {op.precision for op in half.operators if op.type != "Cast"} == {"float16"}
    program.convert_opset()
    assert not {op.type for op in program.operators}.intersection(WITHDRAWN)
    np.testing.assert_allclose(run(program.to_onnx(), {"x": X})[0], expected, rtol=1e-5, atol=1e-6)


def test_what_stands_before_a_network_is_counted_and_trained_through() -> None:
    model = model_of("ImageScaler", {"scale": 0.5, "bias": [1.0, -2.0, 3.0]})
    program = amp.Program.from_onnx(model)
    assert program.cost_estimate(amp.CUDAPlace(0), {}).kernels >= 2
    with amp.program_guard(program):
        loss = amp.nn.functional.mean(program.outputs[0])
        (slope,) = [gradient for _, gradient in amp.append_backward(loss, parameter_list=[program.var("x")])]
    (got,) = amp.Executor(amp.CPUPlace()).run(program, {"x": X}, [slope])
    scaled = X * 0.5 + np.array([1, -2, 3])[:, None, None]
    np.testing.assert_allclose(got, np.where(scaled > 0, 0.5, 0) / X.size, rtol=1e-5)
