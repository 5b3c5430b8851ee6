"""A product of matrices with its bias is one kernel that rounds once, on CPU as on CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowered import Lowered
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


@pytest.mark.parametrize(
    ("sizes", "fetched", "kinds"),
    [
        ("1, 2", ["y"], ["Reshape", "Gemm", "Reshape"]),
        ("1, 2", ["y", "p"], ["MatMul", "Add"]),
        ("2", ["y"], ["MatMul", "Add"]),  # onnxruntime makes a Gemm of these whatever it knows of their sizes
    ],
    ids=["batch", "fetched", "matrix"],
)
def test_fp32_on_cpu(sizes: str, fetched: list[str], kinds: list[str]) -> None:
    text = f"(float[{sizes}, 2] x, float[2, 3] w, float[3] b) => (float[{sizes}, 3] y, float[{sizes}, 3] p)"
    source = amp.Program.from_onnx(
        onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 21]> g {text} {{ p = MatMul(x, w)  y = Add(p, b) }}'
        )
    )
    lowered = lower(source, "cpu", {}, [source.var(name) for name in fetched])
    assert [node.op_type for node in lowered.model.graph.node] == kinds
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=s).astype(np.float32) for s in ((*([1] if "," in sizes else []), 2, 2), (2, 3), 3))
    y, *_ = run(lowered.model, {"x": x, "w": w, "b": b})
    np.testing.assert_allclose(y, x.astype(np.float64) @ w + b, rtol=1e-6, atol=1e-6)


def test_no_update_waits_for_what_nobody_asked_for() -> None:
    """The product that the Gemm replaces reads the weight too."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [2, 4, 64], "float32")
        hidden = amp.nn.fc(amp.nn.fc(x, 64, num_flatten_dims=2, act="relu"), 64, num_flatten_dims=2)
        loss = amp.nn.functional.mean(hidden * hidden)
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    graph = lower(main, "cpu", {}, [loss]).model.graph
    forward = [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and "GRAD" not in node.output[0]]
    assert [node.op_type for node in forward] == ["Gemm", "Gemm"]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_operators_of_a_branch_are_not_taken_for_the_sum_around_it(place: str) -> None:
    """Operators are numbered in each graph, and one of a branch may have the number of a sum that adds a bias."""
    for count in range(1, 9):
        chain = " ".join(f"n{i + 1} = Neg(n{i})" for i in range(count))
        branches = f"""then_branch = yes () => (float16[1, 2, 3] n{count}) {{ n0 = Abs(q) {chain} }},
                       else_branch = no () => (float16[1, 2, 3] a) {{ a = Abs(q) }}"""
        body = f"p = MatMul(x, w)  q = Add(p, b)  c = Constant <value = bool {{1}}> ()  y = If (c) <{branches}>"
        (branch,) = [node for node in lower(program(body), place, {}).model.graph.node if node.op_type == "If"]
        made = onnx.helper.get_attribute_value(branch.attribute[0])
        assert [node.op_type for node in made.node] == ["Abs", *["Neg"] * count, "Identity"]


def softmaxes(body: str, dtype: str, shape: list[int], bias: list[int]) -> Lowered:
    """What CUDA runs of x and b."""
    text = f"g ({dtype}{shape} x, {dtype}{bias or ''} b) => ({dtype}{shape} y) {{ {body} }}"
    source = amp.Program.from_onnx(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'))
    return lower(source, "cuda", {}, [source.var("y")])


@pytest.mark.parametrize(
    ("bias", "inner"),
    [
        ([2, 3, 4, 5], 0),
        ([2, 3, 1, 5], 1),
        ([2, 1, 1, 5], 1),
        ([1, 1, 1, 5], 1),
        ([5], 1),
        ([4, 5], 0),
        ([1, 3, 4, 5], 0),
        ([3, 4, 5], 0),
        ([2, 1, 4, 5], None),
        ([1, 3, 1, 5], None),
        ([1, 1, 4, 1], None),
        ([1], None),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float", "bfloat16"])
def test_a_softmax_adds_its_bias(dtype: str, bias: list[int], inner: int | None) -> None:
    """Where its kernel spreads a bias so, and has that type; the sum is not rounded."""
    shape = [2, 3, 4, 5]
    for body in ("s = Add(x, b)  y = Softmax(s)", "s = Add(b, x)  y = Softmax <axis = 3> (s)"):
        lowered = softmaxes(body, dtype, shape, bias)
        if inner is None or dtype == "bfloat16":
            assert [node.op_type for node in lowered.model.graph.node] == ["Add", "Softmax"]
            continue
        (node,) = lowered.model.graph.node
        assert {a.name: a.i for a in node.attribute} == {"axis": 3, "is_inner_broadcast": inner}
        rng, kind = np.random.default_rng(0), "float32" if dtype == "float" else dtype
        x, b = (rng.normal(0, 4, size).astype(kind) for size in (shape, bias))
        power = np.exp(x.astype(np.float64) + b.astype(np.float64))
        y = node_by_node(lowered.model, {"x": x, "b": b})[lowered.fetches[0].tensor]
        wanted = power / power.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(y, wanted, rtol=6e-4 if kind == "float16" else 1e-6, atol=6e-8)


@pytest.mark.parametrize(
    "body",
    [
        "s = Add(x, b)  y = Softmax <axis = 0> (s)",
        "s = Add(x, b)  t = Softmax(s)  y = Add(s, t)",
        "s = Sub(x, b)  y = Softmax(s)",
        "s = Add(x, b)  y = LogSoftmax(s)",
    ],
)
def test_other_softmaxes_stay_as_they_are(body: str) -> None:
    kinds = [node.op_type for node in softmaxes(body, "float", [4, 5], [4, 5]).model.graph.node]
    assert "BiasSoftmax" not in kinds


def test_a_softmax_of_long_rows_has_no_bias() -> None:
    """Beyond 1,024 numbers its kernel adds in a pass of its own."""
    for width, kinds in ((1024, ["BiasSoftmax"]), (1025, ["Add", "Softmax"])):
        lowered = softmaxes("s = Add(x, b)  y = Softmax(s)", "float", [4, width], [width])
        assert [node.op_type for node in lowered.model.graph.node] == kinds


def test_a_bias_that_is_one_number_is_added_by_itself() -> None:
    lowered = softmaxes("s = Add(x, b)  y = Softmax(s)", "float", [3, 4], [])
    assert [node.op_type for node in lowered.model.graph.node] == ["Add", "Softmax"]


@pytest.mark.parametrize(("shape", "kinds"), [([2, 3, 4], ["Add", "Softmax"]), ([3, 4], ["BiasSoftmax"])])
def test_before_opset_13_a_softmax_is_along_the_second_axis_and_all_behind_it(
    shape: list[int], kinds: list[str]
) -> None:
    text = f"g (float{shape} x, float{shape} b) => (float{shape} y) {{ s = Add(x, b)  y = Softmax(s) }}"
    source = amp.Program.from_onnx(onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["" : 11]> {text}'))
    lowered = lower(source, "cuda", {}, [source.var("y")])
    assert [node.op_type for node in lowered.model.graph.node] == kinds
