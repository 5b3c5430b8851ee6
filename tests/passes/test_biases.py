"""A product of matrices with its bias is one kernel that rounds once, on CPU as on CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.node_by_node import node_by_node
from tests.helpers.sessions import run

X = np.array([[[200.0, 3.0], [1.0, 2.0]]], np.float16)
W = np.array([[350.0, 1.0, 1e-4], [1.0, 1.0, 2.0]], np.float16)
B = np.array([-20000.0, 2.0**-9, -5.9], np.float16)


def program(body: str, dtype: str = "float16") -> amp.Program:
    """Of X, W and B it makes y, and perhaps p, the product."""
    text = f"({dtype}[1, 2, 2] x, {dtype}[2, 3] w, {dtype}[3] b) => ({dtype}[1, 2, 3] y, {dtype}[1, 2, 3] p)"
    return amp.Program.from_onnx(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text} {{ {body} }}')
    )


def results(source: amp.Program, place: str, names: list[str]) -> tuple[list[str], list[Any]]:
    """The operators that a place runs, and what they make, run on CPU."""
    lowered = lower(source, place, {}, [source.var(name) for name in names])
    feeds = {"x": X, "w": W, "b": B}
    if place == "cpu":
        made = run(lowered.model, feeds)
    else:
        known = node_by_node(lowered.model, feeds)
        made = [known[port.tensor] for port in lowered.fetches]
    return [node.op_type for node in lowered.model.graph.node], made


@pytest.mark.parametrize("body", ["p = MatMul(x, w)  y = Add(p, b)", "p = MatMul(x, w)  y = Add(b, p)"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_it_rounds_once(place: str, body: str) -> None:
    """A product beyond float16 comes back into it; whether somebody fetches the product changes nothing."""
    wanted = (X.astype(np.float64) @ W.astype(np.float64) + B.astype(np.float64)).astype(np.float16)
    assert np.isfinite(wanted).all() and X[0, 0].astype(np.float32) @ W[:, 0].astype(np.float32) > 65504
    kinds, (y,) = results(program(body), place, ["y"])
    np.testing.assert_array_equal(y, wanted)
    assert place == "cpu" or [kind for kind in kinds if kind != "Reshape"] == ["Gemm"]
    _, (y, p) = results(program(body), place, ["y", "p"])
    np.testing.assert_array_equal(y, wanted)
    assert np.isinf(p[0, 0, 0])


@pytest.mark.parametrize(
    "body",
    [
        "p = MatMul(x, w)  q = Neg(p)  r = Add(p, b)  y = Add(q, r)",
        "p = MatMul(x, w)  s = Constant <value_ints = [1, 3]> ()  c = Reshape(b, s)  y = Add(p, c)",
    ],
    ids=["two readers", "no vector"],
)
def test_others_stay_as_they_are(body: str) -> None:
    kinds, _ = results(program(body), "cuda", ["y"])
    assert "MatMul" in kinds and "Gemm" not in kinds


def test_fp32_stays_as_it_is_on_cpu() -> None:
    source = program("p = MatMul(x, w)  y = Add(p, b)", "float")
    lowered = lower(source, "cpu", {}, [source.var("y")])
    assert [node.op_type for node in lowered.model.graph.node] == ["MatMul", "Add"]
