"""What is wrong with a model as a protobuf is said by name, by every command, before anything else sees the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import amp_transpiler as amp
from amp_transpiler.errors import GraphError, ModelFileError
from tests.helpers.malformed import PLAIN, parsed, refused

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


@pytest.mark.parametrize("version", [0, -1, 2**40])
def test_versions_of_operator_sets_that_cannot_be(version: int, tmp_path: Path) -> None:
    model = parsed(PLAIN)
    model.opset_import[1].version = version
    refused(model, tmp_path, f"version {version} of the operator set f")
