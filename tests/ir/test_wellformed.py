"""What is wrong with a model as a protobuf is said by name, by every command, before anything else sees the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import amp_transpiler as amp
from amp_transpiler.errors import GraphError, ModelFileError
from amp_transpiler.ir.decompose import take_apart

HEAD = '<ir_version: 10, opset_import: ["" : 21, "f" : 1]>\n'
PLAIN = HEAD + "g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { [add] y = Add(x, w) }"


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text if text.startswith("<") else HEAD + text)


def refused(model: onnx.ModelProto, tmp_path: Path, *words: str) -> str:
    """The message with which a model is refused, from a file and from memory alike."""
    messages = []
    path = tmp_path / "bad.onnx"
    path.write_bytes(model.SerializeToString())
    for source in (path, model):
        with pytest.raises((GraphError, ModelFileError)) as caught:
            amp.Program.from_onnx(source)
        messages.append(str(caught.value))
    assert messages[0].startswith(f"'{path}'") and messages[0].count("\n") == 0
    for message in messages:
        assert all(word in message for word in words), message
    return messages[0]


# -- text ------------------------------------------------------------------------------------------------------
LABEL = b"QQQQQQQQ"


def labelled() -> onnx.ModelProto:
    """A model with the same eight letters in every place that takes text."""
    text = LABEL.decode()
    model = parsed(PLAIN)
    graph, node = model.graph, model.graph.node[0]
    model.producer_name = model.doc_string = graph.name = node.name = graph.doc_string = node.doc_string = text
    node.input[0] = graph.input[0].name = node.output[0] = graph.output[0].name = text
    graph.input[0].type.tensor_type.shape.dim[0].dim_param = graph.initializer[0].doc_string = text
    for props in (model.metadata_props, graph.metadata_props, node.metadata_props, graph.initializer[0].metadata_props):
        props.add(key="key", value=text)
    node.attribute.append(helper.make_attribute(text, 1))
    node.attribute.append(helper.make_attribute("t", onnx.numpy_helper.from_array(np.zeros(1), text)))
    return model


@pytest.mark.parametrize("place", range(18))
def test_text_that_is_not_utf8_is_refused_wherever_it_stands(place: int, tmp_path: Path) -> None:
    pieces = labelled().SerializeToString().split(LABEL)
    assert len(pieces) == 19
    content = LABEL.join(pieces[: place + 1]) + b"Q\xff\xfeQQQQQ" + LABEL.join(pieces[place + 1 :])
    (tmp_path / "bad.onnx").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"bad\.onnx': holds text that is not UTF-8: field '\w+' of a \w+ is b'Q"):
        amp.Program.from_onnx(tmp_path / "bad.onnx")


def test_strings_in_a_tensor_are_text() -> None:
    model = parsed("g () => (string[2] y) { y = Identity(w) }")
    model.graph.initializer.append(TensorProto(name="w", data_type=8, dims=[2], string_data=[b"good", b"\xc3("]))
    with pytest.raises(ModelFileError, match=r"tensor 'w' of strings holds b'\\xc3\('"):
        amp.Program.from_onnx(model)


def test_bytes_of_an_attribute_may_be_anything() -> None:
    model = parsed("g (float[4] x) => (float[4] y) { y = elsewhere.Run(x) }".replace("elsewhere.", "f."))
    model.graph.node[0].attribute.append(helper.make_attribute("blob", b"\xff\xfe"))
    model.graph.value_info.append(helper.make_tensor_value_info("y", 1, [4]))
    assert amp.Program.from_onnx(model).to_onnx().graph.node[0].attribute[0].s == b"\xff\xfe"


# -- tensors ---------------------------------------------------------------------------------------------------
def tensor(data_type: int, dims: list[int], **content: Any) -> TensorProto:
    return TensorProto(name="w", data_type=data_type, dims=dims, **content)


F, I64, H = TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT16
TENSORS: dict[str, tuple[TensorProto, str]] = {
    "raw too long": (tensor(F, [4], raw_data=bytes(20)), "takes 16 bytes, and raw_data holds 20"),
    "raw too short": (tensor(I64, [4], raw_data=bytes(16)), "takes 32 bytes, and raw_data holds 16"),
    "raw of a large one": (tensor(F, [70_000], raw_data=bytes(280_001)), "takes 280000 bytes"),
    "raw of four bits": (tensor(TensorProto.INT4, [3], raw_data=bytes(3)), "takes 2 bytes, and raw_data holds 3"),
    "raw strings": (tensor(TensorProto.STRING, [1], raw_data=b"a"), "strings cannot have"),
    "typed too short": (tensor(F, [4], float_data=[1]), "takes 4 entries, and float_data holds 1"),
    "typed too long": (tensor(H, [1], int32_data=[1, 2]), "takes 1 entries, and int32_data holds 2"),
    "complex": (tensor(TensorProto.COMPLEX64, [2], float_data=[1, 2]), "takes 4 entries"),
    "strings missing": (tensor(TensorProto.STRING, [2], string_data=[b"a"]), "takes 2 entries"),
    "integers for floats": (tensor(F, [1], int32_data=[1]), "content in int32_data; float32 belongs into raw_data or"),
    "floats for integers": (tensor(I64, [1], float_data=[1]), "content in float_data"),
    "both": (tensor(F, [1], raw_data=bytes(4), float_data=[1]), "content twice, in raw_data and in float_data"),
    "two typed ones": (tensor(F, [1], float_data=[1], int64_data=[1]), "content in int64_data"),
    "nothing": (tensor(F, [4]), "has no content"),
    "nothing of 2^62": (tensor(F, [2**62]), "more elements than 64 bits"),
    "negative": (tensor(F, [-4], raw_data=bytes(16)), "negative dimension"),
    "twice negative": (tensor(F, [-2, -2], raw_data=bytes(16)), "negative dimension"),
    "overflow": (tensor(F, [2**33, 2**33], raw_data=bytes(4)), "more elements than 64 bits"),
    "overflow to nothing": (tensor(F, [2**40, 2**40, 0]), "more elements than 64 bits"),
    "overflow to 1": (tensor(F, [2**62, 4, 1], raw_data=b""), "more elements than 64 bits"),
    "unknown type": (tensor(97, [1], raw_data=b"a"), "element type 97, which ONNX does not define"),
    "no type": (tensor(0, [1], raw_data=b"a"), "element type 0"),
    "a segment": (tensor(F, [1], raw_data=bytes(4), segment=TensorProto.Segment(begin=0, end=1)), "segment"),
}


@pytest.mark.parametrize("place", ["initializer", "attribute", "nested", "function"])
@pytest.mark.parametrize("case", TENSORS)
def test_tensors_whose_parts_disagree(case: str, place: str, tmp_path: Path) -> None:
    proto, message = TENSORS[case]
    model = parsed("""g (bool c, float[4] x) => (float[4] y) { [if] y = If (c) <
        then_branch = t () => (float[4] p) { p = Identity(x) }, else_branch = e () => (float[4] q) { q = Neg(x) }> }
        <domain: "f", opset_import: ["" : 21]> F (a) => (b) { b = Neg(a) }""")
    if place == "initializer":
        model.graph.initializer.append(proto)
    elif place == "nested":
        model.graph.node[0].attribute[1].g.initializer.append(proto)
    else:
        nodes = model.graph.node if place == "attribute" else model.functions[0].node
        nodes.add(op_type="Constant", output=["k"], name="const").attribute.append(
            onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=proto)
        )
    refused(model, tmp_path, message)


GOOD = [
    tensor(F, [], float_data=[1]),
    tensor(F, [0], raw_data=b""),
    tensor(F, [0, 7]),
    tensor(H, [2], int32_data=[1, 2]),
    tensor(TensorProto.UINT4, [3], int32_data=[1, 2]),
    tensor(TensorProto.COMPLEX128, [1], double_data=[1, 2]),
    tensor(TensorProto.BOOL, [2], int32_data=[0, 1]),
    tensor(TensorProto.UINT32, [1], uint64_data=[3]),
    tensor(TensorProto.INT2, [5], raw_data=bytes(2)),
    tensor(TensorProto.BFLOAT16, [1], raw_data=bytes(2)),
]


@pytest.mark.parametrize("where", ["input", "output", "value_info"])
def test_a_tensor_of_too_many_dimensions_is_named(where: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\nnet (float x) => (float y) <float m> { m = Relu(x)  y = Relu(m) }'
    )
    tensor = getattr(model.graph, where)[0]
    tensor.type.tensor_type.CopyFrom(onnx.helper.make_tensor_type_proto(1, [1] * 65).tensor_type)
    with pytest.raises(GraphError, match=f"'{tensor.name}' has 65 dimensions; numpy, .* knows 64"):
        amp.Program.from_onnx(model)


@pytest.mark.parametrize("proto", GOOD, ids=lambda proto: f"{proto.data_type}{list(proto.dims)}")
def test_every_way_to_hold_content_is_accepted(proto: TensorProto) -> None:
    model = parsed(PLAIN)
    model.graph.initializer.append(proto)
    del model.graph.initializer[0]
    model.graph.node[0].input[1] = "x"
    assert np.asarray(onnx.numpy_helper.to_array(proto)).shape == tuple(proto.dims)
    assert list(amp.Program.from_onnx(model).to_onnx().graph.initializer) == [proto]


def sparse(dims: list[int], indices: Any, values: int = 2) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(
        values=onnx.numpy_helper.from_array(np.ones(values, np.float32), "s"),
        dims=dims,
        indices=onnx.numpy_helper.from_array(np.asarray(indices)),
    )


@pytest.mark.parametrize(
    "proto, message",
    [
        (sparse([4], [0, 4]), "an index of it lies outside"),
        (sparse([4], [-1, 0]), "an index of it lies outside"),
        (sparse([2, 2], [[0, 0], [0, 2]]), "an index of it lies outside"),
        (sparse([4], [0]), "its indices have the shape [1]"),
        (sparse([2, 2], [[0], [1]]), "its indices have the shape [2, 1]"),
        (sparse([4], np.zeros(2, np.int32)), "indices of int32"),
        (sparse([2**20, 2**20], [0, 1]), "above the limit"),
        (sparse([-4], [0, 1]), "negative dimension"),
        (sparse([2**62, 4], [0, 1]), "more elements than 64 bits"),
    ],
)
def test_sparse_tensors_that_leave_their_shape(proto: onnx.SparseTensorProto, message: str, tmp_path: Path) -> None:
    model = parsed(PLAIN)
    model.graph.sparse_initializer.append(proto)
    refused(model, tmp_path, "'s'", message)


# -- nodes -----------------------------------------------------------------------------------------------------
def changed(change: Callable[[onnx.NodeProto], Any], text: str = "y = Softmax<axis = 0>(x)") -> onnx.ModelProto:
    model = parsed(f"g (float[4] x) => (float[4] y) {{ [node] {text} }}")
    change(model.graph.node[0])
    return model


def attribute(**fields: Any) -> Callable[[onnx.NodeProto], Any]:
    def change(node: onnx.NodeProto) -> None:
        del node.attribute[:]
        node.attribute.append(onnx.AttributeProto(**fields))

    return change


A = onnx.AttributeProto
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


# -- functions -------------------------------------------------------------------------------------------------
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


# -- operators of this package's own domain in foreign models -----------------------------------------------------
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
        match=rf"'own' \(amp_transpiler::{type_}\): its inputs, outputs or attributes do not fit|body of 'own'",
    ):
        program.lower(amp.CPUPlace(), {"x": (2, 3)}, program.outputs)


def test_operators_too_old_for_the_casts_of_today_are_refused() -> None:
    model = parsed("g (float[2,3] x) => (float[2,3] y) { h = Relu(x)  y = Sigmoid(h) }")
    model.opset_import[0].version = 5
    with pytest.raises(GraphError, match=r"uses opset 5; .*onnx.version_converter"):
        amp.convert(model)


@pytest.mark.parametrize("name, value", [("to", 0), ("to", 97)])
def test_element_types_in_attributes_exist(name: str, value: int, tmp_path: Path) -> None:
    refused(
        changed(attribute(name=name, type=A.INT, i=value), "y = Cast<to = 1>(x)"),
        tmp_path,
        f"'{name}' as {value}, an element type",
    )


@pytest.mark.parametrize("version", [0, -1, 2**40])
def test_versions_of_operator_sets_that_cannot_be(version: int, tmp_path: Path) -> None:
    model = parsed(PLAIN)
    model.opset_import[1].version = version
    refused(model, tmp_path, f"version {version} of the operator set f")


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
        take_apart(program.operators[0])
    program.verify()
