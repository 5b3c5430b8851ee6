"""Functions that cannot be expanded, and graphs that lie too deep, are named in no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import amp_transpiler as amp
from amp_transpiler.errors import GraphError, ModelFileError
from tests.helpers.malformed import parsed, refused


def functions(bodies: dict[str, str], main: str = "f.A(x)") -> onnx.ModelProto:
    text = f"g (float[4] x) => (float[4] y) {{ [call] y = {main} }}\n"
    for name, nodes in bodies.items():
        text += f'<domain: "f", opset_import: ["" : 21, "f" : 1]> {name} (a) => (b) {{ {nodes} }}\n'
    return parsed(text)


def twice(model: onnx.ModelProto) -> onnx.ModelProto:
    model.functions.append(model.functions[0])
    return model


def doubling(levels: int) -> onnx.ModelProto:
    bodies = {"A0": "b = Neg(a)"} | {f"A{i}": f"m = f.A{i - 1}(a)  b = f.A{i - 1}(m)" for i in range(1, levels)}
    return functions(bodies, f"f.A{levels - 1}(x)")


def nested(depth: int, function: bool = False) -> onnx.ModelProto:
    """An If in an If in an If; with ``function`` around the call of a function that is the same again.

    It is made in place: what helpers copy may not lie as deep.
    """
    model = parsed("g (bool c, float[4] x) => (float[4] y) { y = If(c) }")
    fill(model.graph.node[0], depth, "f" if function else "")
    if function:
        other = model.functions.add(domain="f", name="Neg", input=["x"], output=["y"])
        other.opset_import.add(version=21)
        constant = other.node.add(op_type="Constant", output=["c"])
        constant.attribute.append(helper.make_attribute("value", onnx.numpy_helper.from_array(np.array(True))))
        fill(other.node.add(op_type="If", input=["c"], output=["y"]), depth, "")
    return model


def fill(node: onnx.NodeProto, depth: int, domain: str) -> None:
    for name in ("then_branch", "else_branch"):
        graph = node.attribute.add(name=name, type=onnx.AttributeProto.GRAPH).g
        graph.name = name
        graph.output.append(helper.make_tensor_value_info(f"{node.output[0]}{name[0]}", 1, [4]))
        inner = graph.node.add(op_type="Neg", input=["x"], output=[graph.output[0].name])
        if name == "then_branch" and depth > 1:
            inner.op_type, inner.input[0] = "If", "c"
            fill(inner, depth - 1, domain)
        elif name == "then_branch":
            inner.domain = domain


FUNCTIONS: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "itself": (
        lambda: functions({"A": "b = f.A(a)"}),
        "in a circle: 'f::A' -> 'f::A'; a function may not be recursive",
    ),
    "mutual": (lambda: functions({"A": "b = f.B(a)", "B": "b = f.A(a)"}), "in a circle: 'f::A' -> 'f::B' -> 'f::A'"),
    "three, behind another": (
        lambda: functions({"A": "b = f.B(a)", "B": "b = f.C(a)", "C": "b = f.D(a)", "D": "b = f.B(a)"}),
        "circle: 'f::B' -> 'f::C'",
    ),
    "twice": (lambda: twice(functions({"A": "b = Neg(a)"})), "'f::A' is defined twice"),
    "41 doublings": (lambda: doubling(41), "expand to 1,099,511,627,776 operators, above the limit of 50,000"),
    "a long chain of doublings": (lambda: doubling(102), "in a row"),
    "a long chain": (
        lambda: functions({"A0": "b = Neg(a)"} | {f"A{i}": f"b = f.A{i - 1}(a)" for i in range(1, 120)}, "f.A119(x)"),
        "in a row",
    ),
    "too many inputs": (
        lambda: functions({"A": "b = Neg(a)"}, "f.A(x, x)"),
        "calls function 'f::A' with 2 inputs; it has 1",
    ),
    "nothing gives its output": (lambda: functions({"A": "c = Neg(a)"}), "function 'A' gives the output 'b'"),
    "writes twice": (lambda: functions({"A": "b = Neg(a)  b = Abs(a)"}), "function 'A' writes 'b' twice"),
    "a node of it": (lambda: functions({"A": "b = Relu(a, a)"}), "of function 'A' has 2 inputs"),
    "deep once expanded": (
        lambda: nested(20, function=True),
        "with its functions expanded nests graphs (of If, Loop, Scan) more than 30 deep",
    ),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions_that_cannot_be_expanded(case: str, tmp_path: Path) -> None:
    make, message = FUNCTIONS[case]
    model = make()
    start = time.perf_counter()
    refused(model, tmp_path, message)
    assert time.perf_counter() - start < 2, "counted, not expanded"


def test_functions_that_expand_within_the_limit_are_converted() -> None:
    assert len(amp.convert(doubling(8)).operators) >= 128
    model = functions({"A": "b = Neg(a)"})
    model.functions[0].name, model.graph.node[0].op_type = "Relu", "Relu"  # hides no operator: the domain differs
    assert [op.type for op in amp.convert(model).operators if op.type != "Cast"] == ["Neg"]


@pytest.mark.parametrize("depth", [31, 40, 200])
def test_graphs_that_lie_too_deep_are_named_as_that(depth: int, tmp_path: Path) -> None:
    model = nested(depth)
    with pytest.raises(GraphError, match="nests graphs .* more than 30 deep"):
        amp.Program.from_onnx(model)
    if depth < 100:  # protobuf itself writes no deeper one
        (tmp_path / "deep.onnx").write_bytes(model.SerializeToString())
        with pytest.raises((GraphError, ModelFileError), match=r"deep.onnx'.* nests graphs .* more than 30 deep"):
            amp.Program.from_onnx(tmp_path / "deep.onnx")


def test_29_deep_is_not_too_deep() -> None:
    assert len(list(amp.Program.from_onnx(nested(29)).walk())) == 59
