"""What is no usable model file is refused, by name, before anything is written."""

import os

import onnx
import onnx.parser
import pytest

from amp_transpiler.conversion.converting import convert
from amp_transpiler.errors import ArgumentTypeError, GraphError, ModelFileError, ModelFileNotFoundError
from amp_transpiler.program import Program
from tests.helpers.onnx_goldens import EVERYTHING, everything, external_model, ir3, text

GOOD = text(EVERYTHING).SerializeToString()


def test_paths_that_are_no_models(tmp_path):
    with pytest.raises(ModelFileNotFoundError, match=r"nowhere\.onnx"):
        Program.from_onnx(tmp_path / "nowhere.onnx")
    with pytest.raises(ModelFileError, match="cannot be read"):
        Program.from_onnx(tmp_path)
    with pytest.raises(ArgumentTypeError, match="int"):
        Program.from_onnx(3)


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("empty", b"", "is empty"),
        ("text", b"this is no model\n" * 20, "is not an ONNX model"),
        ("json", b'{"irVersion": "8"}', "is not an ONNX model"),
        ("runtime", b"\x14\x00\x00\x00ORTM\x0c\x00\x10\x00", "give the .onnx file that it was made of"),
        ("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        ("half", GOOD[: len(GOOD) // 2], "cut short"),
        ("header", onnx.ModelProto(ir_version=8).SerializeToString(), "cut short"),
    ],
)
def test_contents_that_are_no_model(name, content, expected, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=expected) as caught:
        Program.from_onnx(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_cut_anywhere_loses_nothing_of_its_graph(tmp_path):
    model = everything()
    content = model.SerializeToString()
    path = tmp_path / "cut.onnx"
    accepted = 0
    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            program = Program.from_onnx(path)
        except (ModelFileError, GraphError):
            continue
        accepted += 1
        assert program.to_onnx().graph == model.graph, length
    assert accepted < 10, "only where a field behind the graph ends can a cut go unnoticed"


def bad(source, tmp_path):
    path = tmp_path / "bad.onnx"
    onnx.save_model(text(source) if isinstance(source, str) else source, path)
    with pytest.raises((GraphError, ModelFileError)) as caught:
        Program.from_onnx(path)
    assert "bad.onnx" in str(caught.value)
    return str(caught.value)


HEAD = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x, float16[2] h) => (float[2] y)'


def test_malformed_graphs_are_refused(tmp_path):
    message = bad(HEAD + "{ [one] a = Add(x, b)\n [two] b = Relu(a)\n y = Neg(b) }", tmp_path)
    assert "cycle" in message and "'one'" in message and "'two'" in message
    message = bad(HEAD + "{ [reader] y = Add(x, ghost) }", tmp_path)
    assert "'reader' (Add)" in message and "'ghost'" in message
    message = bad(HEAD + "{ [one] y = Relu(x)\n [two] y = Neg(x) }", tmp_path)
    assert "'two' (Neg)" in message and "'y'" in message
    message = bad(HEAD + "{ [writer] x = Relu(h)\n y = Neg(x) }", tmp_path)
    assert "'writer' (Relu)" in message
    message = bad(HEAD + "{ z = Relu(x) }", tmp_path)
    assert "output 'y'" in message
    message = bad(HEAD + "{ [clash] y = Add(x, h) }", tmp_path)
    assert "'clash' (Add)" in message and "float32" in message and "float16" in message
    message = bad(HEAD + "{ [many] y = Relu(x, x) }", tmp_path)
    assert "'many' (Relu)" in message
    message = bad(HEAD.replace("21", "99") + "{ y = Relu(x) }", tmp_path)
    assert "operator set ai.onnx 99" in message
    message = bad(HEAD.replace("10", "99") + "{ y = Relu(x) }", tmp_path)
    assert "format version 99" in message
    message = bad(HEAD + "<float[2] h2 = {1.0, 2.0}, float16[2] m> { m = Relu(x)\n y = Add(m, h2) }", tmp_path)
    assert "Relu" in message and "'m'" in message
    model = ir3()
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    assert "'w' is declared as float64, but elsewhere it is float32" in bad(model, tmp_path)


def test_a_missing_operator_set_is_refused(tmp_path):
    model = everything()
    del model.opset_import[0]
    assert "no version of the operator set ai.onnx" in bad(model, tmp_path)


def test_duplicate_initializers_and_short_tensors_are_refused(tmp_path):
    model = ir3()
    model.graph.initializer.append(model.graph.initializer[0])
    assert "'v'" in bad(model, tmp_path)
    model = ir3()
    model.graph.initializer[0].dims[0] = 200
    assert "'v'" in bad(model, tmp_path)


@pytest.mark.parametrize(
    ("damage", "expected", "kind"),
    [
        (lambda folder: (folder / "weights/m.data").unlink(), "is missing", ModelFileNotFoundError),
        (lambda folder: os.truncate(folder / "weights/m.data", 100), "too short", ModelFileError),
        (lambda folder: os.truncate(folder / "weights/m.data", 0), "too short", ModelFileError),
    ],
    ids=["missing", "short", "empty"],
)
def test_damaged_external_data(tmp_path, damage, expected, kind):
    path, _, _ = external_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(kind, match=expected) as caught:
        Program.from_onnx(path)
    assert "'w'" in str(caught.value) and "m.onnx" in str(caught.value) and "m.data" in str(caught.value)


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("location", "../m.data", "does not lie in"),
        ("location", "/etc/passwd", "does not lie in"),
        ("location", "", "does not lie in"),
        ("length", "7", "refers to 7 bytes"),
        ("offset", "-4", "offset is '-4'; expected a number"),
        ("offset", "many", "offset is 'many'; expected a number"),
    ],
)
def test_external_references_that_cannot_be(tmp_path, key, value, expected):
    path, model, _ = external_model(tmp_path)
    for entry in model.graph.initializer[0].external_data:
        entry.value = value if entry.key == key else entry.value
    onnx.save_model(model, path)
    with pytest.raises(ModelFileError, match=expected):
        Program.from_onnx(path)
    for read in (Program.from_onnx, convert):
        with pytest.raises(
            ModelFileError, match=r"path of the model, or what onnx.load\(path\) reads; Program.from_onnx"
        ):
            read(external_model(tmp_path)[1])
