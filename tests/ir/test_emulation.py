"""16-bit rules on a place without 16-bit arithmetic: every stored value is rounded, as numpy rounds it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from amp_transpiler.ir.emitter import Emitter, Value
from tests.helpers.sessions import run

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def _computed(e: Emitter, result: Value, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    def port(name: str) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)

    graph = onnx.helper.make_graph(e.nodes, "g", [port("x")], [port(result.name)], list(e.initializers.values()))
    opset = onnx.helper.make_opsetid("", e.opset)
    (found,) = run(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), {"x": x})
    return np.asarray(found)


@pytest.mark.parametrize("half", HALVES)
def test_each_operator_stores_16_bit(half: str) -> None:
    """(x * 40000 - x) / 3 leaves float16 in the first product, and loses digits in each step."""
    kind = HALVES[half]
    x = np.array([0.1, 1.0, 1.7, -3.0, 1e-4, 0.0, -0.0], np.float32).astype(kind)
    e = Emitter("cpu")
    with e.emulation():
        v = Value("x", half, x.shape)
        result = e.Div(e.Sub(e.Mul(v, e.like(40000.0, v)), v), e.like(3.0, v))
    assert result.dtype == half
    with np.errstate(over="ignore"):
        stepwise = ((x * kind(40000.0)).astype(kind) - x).astype(kind) / kind(3.0)
    found = _computed(e, result, x.astype(np.float32))
    np.testing.assert_array_equal(found, stepwise.astype(kind).astype(np.float32))
    assert np.isinf(found).any() == (half == "float16")


@pytest.mark.parametrize("half", HALVES)
def test_what_is_taken_to_fp32_is_not_rounded(half: str) -> None:
    x = np.array([1.7, -3.0, 0.01], np.float32).astype(HALVES[half])
    e = Emitter("cpu")
    with e.emulation():
        wide = e.f32(Value("x", half, x.shape))
        result = e.Mul(e.Mul(wide, e.like(1 / 3, wide)), e.like(3e5, wide))
    exact = (x.astype(np.float32) * np.float32(1 / 3)) * np.float32(3e5)
    np.testing.assert_array_equal(_computed(e, result, x.astype(np.float32)), exact)


def test_operators_that_make_no_new_values_cost_nothing() -> None:
    e = Emitter("cpu")
    with e.emulation():
        v = Value("x", "float16", (2, 3))
        result = e.reshape(e.Neg(e.Relu(e.transpose(v, [1, 0]))), [6])
        assert e.cast(e.cast(result, "float32"), "float16").name == result.name
    assert [node.op_type for node in e.nodes] == ["Transpose", "Relu", "Neg", "Reshape"]
    assert e.stored(Value(result.name, "float32", (6,)), "float16").name == result.name
