"""What is wrong with nodes and nested graphs is said by name before anything else sees the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.decompose import decompose_operator
from tests.helpers.malformed import PLAIN, A, attribute, changed, parsed, refused

RNN = "r = Unsqueeze(x, x)  y, z = GRU <hidden_size = 2> (x, x, x)"
NODES: dict[str, tuple[onnx.ModelProto, str]] = {
    "too few inputs": (
        changed(lambda n: n.input.pop(), "y = Add(x, x)"),
        "'node' (Add) of graph 'g' has 1 input; the operator has 2",
    ),
    "none": (changed(lambda n: n.input.pop()), "has 0 inputs; the operator has 1"),
    "too many": (changed(lambda n: n.input.extend("xx")), "has 3 inputs; the operator has 1"),
    "too many outputs": (changed(lambda n: n.output.append("z")), "has 2 outputs; the operator has 1"),
    "an input left out": (changed(lambda n: n.input.__setitem__(0, ""), "y = Add(x, x)"), "leaves out its input 0"),
    "no operator": (changed(lambda n: n.ClearField("op_type")), "names no operator"),
    "a float axis": (changed(attribute(name="axis", type=A.FLOAT, f=1)), "'axis' as FLOAT; the operator takes INT"),
    "a list of axes": (
        changed(attribute(name="axis", type=A.INTS, ints=[1])),
        "'axis' as INTS; the operator takes INT",
    ),
    "an axis in text": (changed(attribute(name="axis", type=A.STRING, s=b"1")), "'axis' as STRING"),
    "float activations": (
        changed(attribute(name="activations", type=A.FLOAT, f=1), "y = LSTM(x, x, x)"),
        "'activations' as FLOAT; the operator takes STRINGS",
    ),
    "a tensor in another field": (changed(attribute(name="axis", type=A.INT, f=1)), "says that it is INT, and holds f"),
    "two values": (changed(attribute(name="axis", type=A.INT, i=1, f=1)), "says that it is INT, and holds f, i"),
    "no type": (changed(attribute(name="axis", i=1)), "'axis' that says no type"),
    "an unknown type": (changed(attribute(name="axis", type=A.TENSOR)), "says that it is TENSOR, and holds nothing"),
    "a reference": (
        changed(attribute(name="axis", type=A.INT, ref_attr_name="a")),
        "refers to 'a' of a function around it",
    ),
    "the same twice": (changed(lambda n: n.attribute.append(n.attribute[0])), "two attributes of one name (axis)"),
    "one missing": (changed(lambda n: n.attribute.pop(), "y = Cast<to = 1>(x)"), "lacks the attribute 'to'"),
}


@pytest.mark.parametrize("case", NODES)
def test_nodes_that_break_their_schema(case: str, tmp_path: Path) -> None:
    model, message = NODES[case]
    refused(model, tmp_path, "'node'", message)


def test_an_operator_that_onnxruntime_had_first_has_its_later_form(tmp_path: Path) -> None:
    """What optimises models wrote layer norms into models of opset 11, and opset 17 took them over."""
    old = '<ir_version: 7, opset_import: ["" : 11]> g (float[2,3] x, float[3] s) => (float[2,3] y) {{ [node] y = {} }}'
    refused(
        onnx.parser.parse_model(old.format("LayerNormalization(x)")), tmp_path, "'node'", "the operator has at least 2"
    )
    taken = amp.Program.from_onnx(onnx.parser.parse_model(old.format("LayerNormalization(x, s)")))
    assert taken.outputs[0].shape == (2, 3)


def test_what_is_0_may_be_left_out_as_other_writers_do() -> None:
    model = changed(attribute(name="axis", type=A.INT))
    assert amp.Program.from_onnx(model).operators[0].attrs["axis"] == 0


SCAN = """g (float[4] s, float[3,4] x, float[3,2] z) => (float[4] y, float[3,4] all) {
    [node] y, all = Scan<num_scan_inputs = 2, body = b (float[4] a, float[4] i, float[2] j) => (float[4] o, float[4] p) {
        o = Add(a, i)  p = Neg(o) }>(s, x, z) }"""
LOOP = """g (int64 n, bool c, float[4] x) => (float[4] y, float[N,4] all) {
    [node] y, all = Loop <body = b (int64 i, bool on, float[4] a) => (bool go, float[4] o, float[4] p) {
        go = Identity(on)  o = Neg(a)  p = Neg(o) }>(n, c, x) }"""
IF = """g (bool c, float[4] x) => (float[4] y) { [node] y = If (c) <
    then_branch = t () => (float[4] p) { p = Neg(x) }, else_branch = e () => (float[4] q) { q = Abs(x) }> }"""


def body(model: onnx.ModelProto) -> onnx.GraphProto:
    return next(a.g for a in model.graph.node[0].attribute if a.type == A.GRAPH)


def number(model: onnx.ModelProto, value: int) -> None:
    next(a for a in model.graph.node[0].attribute if a.name == "num_scan_inputs").i = value


CONTROL: dict[str, tuple[str, Callable[[onnx.ModelProto], Any], str]] = {
    "99 scanned": (SCAN, lambda m: number(m, 99), "has num_scan_inputs=99, and 3 inputs"),
    "0 scanned": (SCAN, lambda m: number(m, 0), "has num_scan_inputs=0"),
    "-1 scanned": (SCAN, lambda m: number(m, -1), "has num_scan_inputs=-1"),
    "2^63-1 scanned": (SCAN, lambda m: number(m, 2**63 - 1), "has num_scan_inputs=9223372036854775807"),
    "states without outputs": (
        SCAN,
        lambda m: (number(m, 1), m.graph.node[0].output.pop(), body(m).output.pop()),
        "carries 2 states and has 1 outputs",
    ),
    "axes": (
        SCAN,
        lambda m: m.graph.node[0].attribute.append(helper.make_attribute("scan_input_axes", [0])),
        "has 1 entries in 'scan_input_axes'",
    ),
    "scan body's inputs": (
        SCAN,
        lambda m: [body(m).input.pop() for _ in range(2)],
        "'body' with 1 inputs; the node's own ask for 3",
    ),
    "scan body's outputs": (SCAN, lambda m: body(m).output.pop(), "'body' with 1 outputs; the node's own ask for 2"),
    "loop body's inputs": (LOOP, lambda m: body(m).input.pop(), "'body' with 2 inputs; the node's own ask for 3"),
    "loop body's outputs": (LOOP, lambda m: body(m).output.pop(), "'body' with 2 outputs; the node's own ask for 3"),
    "loop without body outputs": (LOOP, lambda m: body(m).ClearField("output"), "'body' with 0 outputs"),
    "loop without a body": (LOOP, lambda m: m.graph.node[0].ClearField("attribute"), "lacks the attribute 'body'"),
    "an input of a branch": (
        IF,
        lambda m: body(m).input.add(name="i"),
        "'then_branch' with 1 inputs; the node's own ask for 0",
    ),
    "no output of a branch": (
        IF,
        lambda m: body(m).output.pop(),
        "'then_branch' with 0 outputs; the node's own ask for 1",
    ),
    "one branch": (IF, lambda m: m.graph.node[0].attribute.pop(), "lacks the attribute 'else_branch'"),
}


@pytest.mark.parametrize("case", CONTROL)
def test_control_flow_that_contradicts_its_graphs(case: str, tmp_path: Path) -> None:
    text, change, message = CONTROL[case]
    model = parsed(text)
    amp.Program.from_onnx(model)
    change(model)
    refused(model, tmp_path, "'node'", message)


@pytest.mark.parametrize(
    "type_, inputs",
    [
        ("MatMulGrad", 1),
        ("MatMulGrad", 5),
        ("Adam", 1),
        ("UpdateLossScaling", 2),
        ("CTCLoss", 1),
        ("ClipGradByNorm", 1),
        ("ConcatGrad", 2),
        ("SoftmaxGrad", 0),
    ],
)
def test_own_operators_that_this_package_did_not_write(type_: str, inputs: int) -> None:
    model = parsed("g (float[2,3] x) => (float[2,3] y) { y = Neg(x) }")
    model.opset_import.add(domain="amp_transpiler", version=1)
    node = model.graph.node[0]
    node.op_type, node.domain, node.name = type_, "amp_transpiler", "own"
    del node.input[:]
    node.input.extend(["x"] * inputs)
    program = amp.Program.from_onnx(model)
    with pytest.raises(
        GraphError,
        match=rf"'own' \(amp_transpiler::{type_}\): its inputs, outputs or attributes do not fit|rule of 'own'",
    ):
        program.lower(amp.CPUPlace(), {"x": (2, 3)}, program.outputs)


@pytest.mark.parametrize("name, value", [("to", 0), ("to", 97)])
def test_element_types_in_attributes_exist(name: str, value: int, tmp_path: Path) -> None:
    refused(
        changed(attribute(name=name, type=A.INT, i=value), "y = Cast<to = 1>(x)"),
        tmp_path,
        f"'{name}' as {value}, an element type",
    )


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "[" * 100_000,
        '{"trainable": [1], "persistable": [], "updates": {}}',
        "null",
        "x",
        '{"trainable": [], "persistable": [], "updates": {}, "window": {"steps": "a"}}',
    ],
)
def test_state_that_this_package_did_not_write(text: str, tmp_path: Path) -> None:
    model = parsed(PLAIN)
    model.graph.metadata_props.add(key="amp_transpiler.state", value=text)
    refused(model, tmp_path, "metadata entry 'amp_transpiler.state'", "is not as this package writes it")


def test_contrib_operators_that_do_not_fit_are_named_where_they_are_taken_apart() -> None:
    """ONNX has no schema for them, so nothing could be said of them when they were read."""
    model = parsed("g (float[2,3] x) => (float[2,3] y) { [odd] y = f.SkipLayerNormalization() }")
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.add(domain="com.microsoft", version=1)
    program = amp.Program.from_onnx(model)
    with pytest.raises(
        GraphError,
        match=r"'odd' \(com.microsoft::SkipLayerNormalization\): its inputs, outputs or attributes do not fit",
    ):
        decompose_operator(program.operators[0])
    program.verify()
