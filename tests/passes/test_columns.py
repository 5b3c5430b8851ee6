"""A matrix times a vector, which onnxruntime computes wrongly behind a transposition that it fuses into the product."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower

X = np.arange(24, dtype=np.float32).reshape(2, 4, 3) / 8 - 1
V = np.array([1.0, -2.0, 0.5, 3.0], np.float32)


def program(body: str, dtype: str = "float", batch: str = "2") -> amp.Program:
    text = f"({dtype}[{batch}, 4, 3] x, {dtype}[4] v) => ({dtype}[{batch}, 3] y)"
    return amp.Program.from_onnx(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text} {{ {body} }}')
    )


def result(source: amp.Program) -> np.ndarray[Any, Any]:
    feed = {name: array.astype(source.var(name).dtype) for name, array in (("x", X), ("v", V))}
    return amp.Executor(amp.CPUPlace()).run(source, feed, ["y"], amp.Scope())[0]


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("batch", ["2", "n"])
@pytest.mark.parametrize(
    "between, factor", [("s = Identity(t)", 1), ("s = Add(t, t)", 2)], ids=["transposed", "moved past a sum"]
)
def test_behind_a_transposition(between: str, factor: int, batch: str, dtype: str) -> None:
    """All numbers here are exact in float16."""
    body = f"t = Transpose <perm = [0, 2, 1]> (x)  {between}  y = MatMul(s, v)"
    np.testing.assert_array_equal(result(program(body, dtype, batch)), factor * (X.transpose(0, 2, 1) @ V))


def test_other_products_stand_as_they_do() -> None:
    def kinds(body: str, place: str) -> set[str]:
        source = program(body)
        return {node.op_type for node in lower(source, place, {}, [source.var("y")]).model.graph.node}

    for place in ("cpu", "cuda"):
        turned = "t = Transpose <perm = [0, 2, 1]> (x)"
        assert kinds(f"{turned}  y = MatMul(t, v)", place) == {"Transpose", "Unsqueeze", "MatMul", "Squeeze"}
        others = kinds(f"{turned}  p = MatMul(x, t)  q = MatMul(p, v)  y = MatMul(q, x)", place)
        assert others == {"MatMul", "Transpose" if place == "cpu" else "FusedMatMul"}
        assert kinds("d = MatMul(v, v)  p = MatMul(v, x)  y = Mul(p, d)", place) == {"MatMul", "Mul"}
