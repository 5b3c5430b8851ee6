"""Content of large initializers goes past protobuf, from the file and into it: nobody can tell by what comes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import amp_transpiler as amp
from amp_transpiler.errors import GraphError, ModelFileError
from amp_transpiler.ir import onnx_out
from amp_transpiler.ir.tensors import HeldTensor, tensor_array
from amp_transpiler.ir.wire import with_contents, without_contents


def model(*more: TensorProto, lead: int = 0) -> onnx.ModelProto:
    """Products with 1.6 MB and 160 kB, after an initializer whose name has more than ``lead`` letters."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((640, width)).astype(np.float32) / 25 for width in (640, 64)]
    weights = [numpy_helper.from_array(array, name) for array, name in zip(values, "vw", strict=True)]
    first = numpy_helper.from_array(np.zeros(3, np.float32), "b" * (lead + 1))
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[2, 640] x) => (float[2, 64] y) { h = MatMul(x, v) k = Relu(h) y = MatMul(k, w) }
    """
    made = onnx.parser.parse_model(text)
    made.graph.initializer.extend([first, *weights, *more])
    return made


def written(made: onnx.ModelProto | bytes, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    return path


@pytest.mark.parametrize("lead", range(8))
def test_contents_are_those_of_the_file(tmp_path: Path, lead: int) -> None:
    made = model(lead=lead)
    program = amp.Program.from_onnx(written(made, tmp_path))
    for tensor in made.graph.initializer[1:]:
        data = program.var(tensor.name).data
        assert isinstance(data, HeldTensor)
        found = np.asarray(data)
        np.testing.assert_array_equal(found, numpy_helper.to_array(tensor))
        assert found.flags.aligned and not found.flags.writeable


def test_a_file_leaves_as_it_came(tmp_path: Path) -> None:
    path = written(model(), tmp_path)
    back = amp.Program.from_onnx(path).to_onnx(tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes() == back.SerializeToString(deterministic=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_converted_file_is_the_model_that_is_given_back(tmp_path: Path, dtype: str) -> None:
    path = written(model(), tmp_path)
    back = amp.convert(path, dtype=dtype).to_onnx(tmp_path / "half.onnx")
    assert (tmp_path / "half.onnx").read_bytes() == back.SerializeToString(deterministic=True)
    from_memory = amp.convert(onnx.load(path), dtype=dtype).to_onnx()
    assert [t for t in back.graph.initializer] == [t for t in from_memory.graph.initializer]
    assert all(t.raw_data for t in back.graph.initializer)


def test_what_goes_out_comes_in_again() -> None:
    labelled = numpy_helper.from_array(np.arange(5000, dtype=np.int64), "labelled")
    labelled.doc_string = "after the content"
    labelled.metadata_props.add(key="a", value="b")
    file = model(labelled).SerializeToString()
    light, found = without_contents(memoryview(file))
    assert [*found] == [1, 2, 3] and len(light) < 1000
    assert [len(t.raw_data) for t in onnx.load_from_string(light).graph.initializer] == [12, 0, 0, 0]
    pieces = with_contents(light, {number: length for number, (_, length) in found.items()})
    places = {number: file[offset : offset + length] for number, (offset, length) in found.items()}
    assert b"".join(places[piece] if isinstance(piece, int) else piece for piece in pieces) == file


def test_a_file_without_large_contents_is_left_as_it_is_wherever_it_ends() -> None:
    made = model()
    del made.graph.initializer[1:]
    file = bytes(made.SerializeToString())
    for end in range(len(file) + 1):
        assert without_contents(memoryview(file[:end])) == (file[:end], {})


def test_odd_tensors_keep_their_content(tmp_path: Path) -> None:
    labelled = numpy_helper.from_array(np.ones((70, 70), np.float32), "labelled")
    labelled.doc_string = "a text"
    integers = numpy_helper.from_array(np.arange(5000, dtype=np.int64), "integers")
    shape = numpy_helper.from_array(np.ones(1024, np.float64), "shape")
    made = model(labelled, integers, shape)
    program = amp.Program.from_onnx(written(made, tmp_path))
    for tensor in (labelled, integers, shape):
        assert program.var(tensor.name).data == tensor
    assert program.to_onnx().graph.initializer[-3:] == [labelled, integers, shape]


def test_two_graphs_in_one_file_are_one(tmp_path: Path) -> None:
    other = onnx.ModelProto()
    other.graph.initializer.append(numpy_helper.from_array(np.ones((70, 70), np.float32), "more"))
    program = amp.Program.from_onnx(written(model().SerializeToString() + other.SerializeToString(), tmp_path))
    assert program.var("more").shape == (70, 70) and program.var("w").shape == (640, 64)


@pytest.mark.parametrize("size", [0, 1000, 4100, 16384])
def test_content_of_a_wrong_length_is_refused(tmp_path: Path, size: int) -> None:
    wrong = TensorProto(name="wrong", data_type=TensorProto.FLOAT, dims=[64, 65], raw_data=bytes(size))
    with pytest.raises(ModelFileError, match=rf"'wrong' \(float32\[64, 65\]\) is cut short.* raw_data holds {size}"):
        amp.Program.from_onnx(written(model(wrong), tmp_path))


def test_more_than_one_file_holds_is_refused_before_any_of_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = amp.Program.from_onnx(model())
    for name in "vw":
        program.var(name).data = np.broadcast_to(np.float32(0), (2**14, 2**14))  # which takes no memory
    monkeypatch.setattr(onnx_out, "model_of", None)  # what copies
    with pytest.raises(ModelFileError, match="model 'g' is larger than the 2 GB .*external_data=True"):
        program.to_onnx(tmp_path / "model.onnx", external_data=False)
    assert not list(tmp_path.iterdir())


def field(number: int, content: bytes) -> bytes:
    """A field of a message, as it stands in a file."""
    head, length = [number << 3 | 2], len(content)
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    return bytes([*head, length]) + content


def test_of_content_that_stands_twice_the_last_counts(tmp_path: Path) -> None:
    tensor = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[64, 65], raw_data=bytes(4 * 64 * 65))
    ones = np.ones((64, 65), np.float32)
    made = model()
    graph = made.graph.SerializeToString() + field(5, tensor.SerializeToString() + field(9, ones.tobytes()))
    made.ClearField("graph")
    program = amp.Program.from_onnx(written(made.SerializeToString() + field(7, graph), tmp_path))
    np.testing.assert_array_equal(tensor_array(program.var("t")), ones)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, part: float) -> None:
    whole = model().SerializeToString()
    with pytest.raises((ModelFileError, GraphError)):
        amp.Program.from_onnx(written(whole[: int(len(whole) * part)], tmp_path))
