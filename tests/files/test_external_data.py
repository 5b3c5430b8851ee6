"""External data is mapped; files appear whole or not at all."""

import os
import re
import stat

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from amp_transpiler import files
from amp_transpiler.errors import ArgumentError, GraphError, ModelFileError, ModelFileNotFoundError, ModelFileWriteError
from amp_transpiler.ir import external, serializing
from amp_transpiler.ir.tensors import ExternalTensor, tensor_array
from amp_transpiler.program import Program
from tests.helpers.onnx_goldens import FUNCTIONS, external_model, run, same, text


def test_external_data_is_mapped_and_comes_out_equal(tmp_path):
    path, model, arrays = external_model(tmp_path)
    program = Program.from_onnx(path)
    for name, array in arrays.items():
        data = program.var(name).data
        assert isinstance(data, ExternalTensor) and data.shape == array.shape and data.dtype == array.dtype
        assert np.array_equal(np.asarray(data), array)
    base = np.asarray(program.var("w").data)
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap), "the content is mapped, not read"
    assert program.to_onnx() == model
    x = {"x": np.ones((1, 64), np.float32)}
    expected = run(str(path), x)

    other = tmp_path / "elsewhere"
    other.mkdir()
    program.to_onnx(other / "copy.onnx")
    assert sorted(p.name for p in other.iterdir()) == ["copy.onnx", "copy.onnx.data"]
    loaded, original = onnx.load(other / "copy.onnx"), onnx.load(path)
    for model_ in (loaded, original):
        for tensor in model_.graph.initializer:
            tensor.ClearField("data_location")
    assert loaded == original
    assert same(run(str(other / "copy.onnx"), x), expected)
    program.to_onnx(tmp_path / "beside.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "beside.onnx",
        "beside.onnx.data",
        "elsewhere",
        "m.onnx",
        "weights",
    ]
    assert same(run(str(tmp_path / "beside.onnx"), x), expected)
    assert Program.from_onnx(model, external_data_dir=tmp_path).to_onnx() == model
    assert program.clone().to_onnx() == model


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("text_", ["{}_0", " {}0 ", "+{}0", "-{}0", "\u0660", "{}0\n", "0x{}0", "9" * 5000])
def test_external_offsets_and_lengths_are_ascii_digits(text_, key, tmp_path):
    path, model, _ = external_model(tmp_path)
    entry = next(e for t in model.graph.initializer for e in t.external_data if e.key == key)
    entry.value = text_.format(entry.value[:-1] or "0")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match=f"external {key} is {re.escape(repr(entry.value[:40]))}"):
        Program.from_onnx(path)


@pytest.mark.parametrize("change", ["over", "cut"])
def test_external_data_that_is_written_over_in_place_is_not_taken(change, tmp_path):
    path, _, _ = external_model(tmp_path)
    program = Program.from_onnx(path)
    file = program.var("w").data.file
    content = file.read_bytes()
    if change == "cut":
        os.truncate(file, 10)
    else:
        with open(file, "r+b") as stream:
            stream.write(bytes(len(content)))
        os.utime(file, ns=(1, 1))  # two writes within a tick of the clock
    with pytest.raises(
        ModelFileError, match=f"'{file}' was written over since its model was read; read the model again"
    ):
        program.to_onnx(tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_external_data_that_another_file_takes_the_place_of_is_still_there(tmp_path):
    path, _, arrays = external_model(tmp_path)
    program = Program.from_onnx(path)
    file = program.var("w").data.file
    (tmp_path / "new").write_bytes(bytes(file.stat().st_size))
    os.replace(tmp_path / "new", file)
    assert np.array_equal(np.asarray(program.var("w").data), arrays["w"])


def test_external_data_can_be_embedded_and_put_outside(tmp_path):
    path, _, arrays = external_model(tmp_path)
    x = {"x": np.ones((1, 64), np.float32)}
    expected = run(str(path), x)
    out = tmp_path / "out"
    out.mkdir()
    Program.from_onnx(path).to_onnx(out / "inside.onnx", external_data=False)
    assert [p.name for p in out.iterdir()] == ["inside.onnx"]
    inside = Program.from_onnx(out / "inside.onnx")
    assert Program.from_onnx(path).to_onnx(external_data=False) == inside.to_onnx()
    for name, array in arrays.items():
        assert np.array_equal(tensor_array(inside.var(name)), array)
    for choice, name in ((True, "a.onnx.data"), ("b.bin", "b.bin")):
        target = out / f"{name[0]}.onnx"
        inside.to_onnx(target, external_data=choice)
        assert (out / name).stat().st_size == 64 * 32 * 4, "tensors under 1 KiB stay inside"
        assert same(run(str(target), x), expected)
        onnx.checker.check_model(str(target))


def test_external_data_of_attributes_goes_along(tmp_path):
    tensor = TensorProto(name="c", dims=[4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="c.bin")
    (tmp_path / "c.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    model = text('<ir_version: 10, opset_import: ["" : 21]> g (float[4] x) => (float[4] y) { y = Add(x, c) }')
    model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=tensor))
    onnx.save_model(model, tmp_path / "m.onnx")
    program = Program.from_onnx(tmp_path / "m.onnx")
    out = tmp_path / "out"
    out.mkdir()
    program.to_onnx(out / "m.onnx")
    assert [p.name for p in out.iterdir()] == ["m.onnx"]
    onnx.external_data_helper.load_external_data_for_model(model, str(tmp_path))
    model.graph.node[0].attribute[0].t.ClearField("data_location")
    assert onnx.load(out / "m.onnx", load_external_data=False) == model
    (tmp_path / "c.bin").unlink()
    with pytest.raises(ModelFileNotFoundError, match=r"'c'.*c\.bin"):
        Program.from_onnx(tmp_path / "m.onnx")


def test_external_data_of_functions_goes_along(tmp_path):
    model = text("""<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float[4] x) => (float[4] y) { y = own.Shift(x) }
        <domain: "own", opset_import: ["" : 21]> Shift (x) => (y) { c = Constant <value = float[4] {0,0,0,0}> ()
          y = Add(x, c) }""")
    constant = model.functions[0].node[0].attribute[0].t
    constant.CopyFrom(TensorProto(name="c", dims=[4], data_type=1, data_location=TensorProto.EXTERNAL))
    constant.external_data.add(key="location", value="c.bin")
    (tmp_path / "c.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    onnx.save_model(model, tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    Program.from_onnx(tmp_path / "m.onnx").to_onnx(tmp_path / "out" / "m.onnx")
    found = run(str(tmp_path / "out" / "m.onnx"), {"x": np.ones(4, np.float32)})
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["m.onnx"]
    assert same(found, [np.array([1, 2, 3, 4], np.float32)])
    (tmp_path / "c.bin").unlink()
    with pytest.raises(ModelFileNotFoundError, match=r"c\.bin"):
        Program.from_onnx(tmp_path / "m.onnx")


def test_tensors_that_share_their_bytes_share_them_again(tmp_path):
    path, model, arrays = external_model(tmp_path)
    twin = model.graph.initializer.add()
    twin.CopyFrom(model.graph.initializer[0])
    twin.name = "twin"
    model.graph.node.add(op_type="MatMul", input=["x", "twin"], output=["z"])
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", 32]))
    onnx.save_model(model, path)
    out = tmp_path / "out"
    out.mkdir()
    Program.from_onnx(path).to_onnx(out / "m.onnx")
    assert (out / "m.onnx.data").stat().st_size == arrays["w"].nbytes
    x = {"x": np.ones((1, 64), np.float32)}
    assert same(run(str(out / "m.onnx"), x), run(str(path), x))


def test_beyond_the_size_limit_weights_go_outside(tmp_path, monkeypatch):
    path, _, _ = external_model(tmp_path)
    Program.from_onnx(path).to_onnx(tmp_path / "inside.onnx", external_data=False)
    program = Program.from_onnx(tmp_path / "inside.onnx")
    monkeypatch.setattr(serializing, "LIMIT", 4096)
    out = tmp_path / "out"
    out.mkdir()
    program.to_onnx(out / "big.onnx")
    assert sorted(p.name for p in out.iterdir()) == ["big.onnx", "big.onnx.data"]
    x = {"x": np.ones((1, 64), np.float32)}
    assert same(run(str(out / "big.onnx"), x), run(str(path), x))


def test_values_from_a_scope(tmp_path):
    path, _, arrays = external_model(tmp_path)
    program = Program.from_onnx(path)
    w = np.full((64, 32), 2, np.float32)
    model = program.to_onnx(scope=Values(w=w))
    assert np.array_equal(numpy_helper.to_array(model.graph.initializer[0]), w)
    assert model.graph.initializer[1].data_location == TensorProto.EXTERNAL
    program.to_onnx(path, scope=Values(w=w))  # over the very file that is mapped
    back = Program.from_onnx(path)
    assert np.array_equal(tensor_array(back.var("w")), w) and np.array_equal(tensor_array(back.var("b")), arrays["b"])
    assert np.array_equal(tensor_array(program.var("w")), arrays["w"]), "the mapped content is not the new file's"
    with pytest.raises(GraphError, match=r"'w' as float16\[64, 32\].*float32\[64, 32\]"):
        program.to_onnx(scope=Values(w=w.astype(np.float16)))


def test_a_persistable_variable_without_a_value_is_an_input():
    program = Program("p")
    x = program.add_input("x", "float32", (2,))
    state = program.add_variable("state", "float32", (2,), persistable=True)
    y = program.add_variable("y", "float32", (2,))
    program.add_operator("Add", [x, state], [y])
    program.outputs = [y]
    assert [i.name for i in program.to_onnx().graph.input] == ["x", "state"]
    model = program.to_onnx(scope=Values(state=np.array([1, 2], np.float32)))
    assert [i.name for i in model.graph.input] == ["x"]
    assert same(run(model, {"x": np.zeros(2, np.float32)}), [np.array([1, 2], np.float32)])


class Values(dict):
    def find_var(self, name):
        return self.get(name)


# -- writing whole or not at all --------------------------------------------------------------------
def test_a_failed_write_leaves_everything_as_it_was(tmp_path, monkeypatch):
    path, _, _ = external_model(tmp_path)
    program = Program.from_onnx(path)
    target = tmp_path / "out"
    target.mkdir()
    program.to_onnx(target / "m.onnx", external_data=True)
    before = {p.name: p.read_bytes() for p in target.iterdir()}

    def full(self, stream):
        stream.write(b"something")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(external.Layout, "_write_data", full)
    with pytest.raises(ModelFileWriteError, match="No space left"):
        program.to_onnx(target / "m.onnx", external_data=True)
    with pytest.raises(ModelFileWriteError, match="No space left"):
        program.to_onnx(target / "new.onnx", external_data=True)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before


def test_a_full_disk_while_the_model_is_written(tmp_path, monkeypatch):
    program = Program.from_onnx(text(FUNCTIONS))

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ModelFileWriteError, match=r"m\.onnx"):
        program.to_onnx(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_paths_that_cannot_be_written(tmp_path):
    program = Program.from_onnx(text(FUNCTIONS))
    with pytest.raises(ModelFileWriteError, match=r"nowhere"):
        program.to_onnx(tmp_path / "nowhere" / "m.onnx")
    with pytest.raises(ModelFileWriteError, match="folder"):
        program.to_onnx(tmp_path)
    assert not list(tmp_path.iterdir())
    for choice in ("a/b", "", "m.onnx"):
        with pytest.raises(ArgumentError):
            program.to_onnx(tmp_path / "m.onnx", external_data=choice)
    with pytest.raises(ArgumentError, match="path"):
        program.to_onnx(external_data=True)


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_written_files_have_ordinary_permissions(tmp_path):
    program = Program.from_onnx(text(FUNCTIONS))
    program.to_onnx(tmp_path / "m.onnx")
    (tmp_path / "plain").write_bytes(b"")
    mode = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "m.onnx").stat().st_mode) == mode
    (tmp_path / "m.onnx").chmod(0o600)
    program.to_onnx(tmp_path / "m.onnx")
    assert stat.S_IMODE((tmp_path / "m.onnx").stat().st_mode) == 0o600


def test_a_malformed_program_is_not_written(tmp_path):
    program = Program.from_onnx(text(FUNCTIONS))
    lost = program.add_variable("lost", "float32", (2,))
    program.operators[1].set_input(0, lost)
    with pytest.raises(GraphError, match="reads 'lost'"):
        program.to_onnx(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
