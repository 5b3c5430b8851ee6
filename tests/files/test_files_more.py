"""Paths that people seldom write: names at the limit of the disk, what is said twice, folders named like the model."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import amp_transpiler as amp
from amp_transpiler.cli.main import main

_MODEL = """<ir_version: 10, opset_import: ["" : 21]> g (float[N,32] x) => (float[N,32] y) { y = MatMul(x, w) }"""
_W = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    found = onnx.parser.parse_model(_MODEL)
    found.graph.initializer.append(numpy_helper.from_array(_W, "w"))
    onnx.save_model(found, tmp_path / "in.onnx")
    return tmp_path / "in.onnx"


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("amp-transpile: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("length", [249, 250, 251, 255])
def test_a_name_as_long_as_the_disk_allows_is_written(
    model: Path, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of its data file would be too long; the model has none."""
    output = model.parent / ("o" * (length - 5) + ".onnx")
    assert main(["convert", str(model), str(output), "--check"]) == 0
    assert capsys.readouterr().err == ""
    onnx.checker.check_model(str(output))


def test_a_name_of_external_data_that_no_model_can_hold(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [str(model.parent / "o.onnx"), "--external-data", "\udcff"],
        [str(model.parent / "\udcff.onnx"), "--external-data"],
    ):
        assert main(["convert", str(model), *arguments]) == 2
        assert "not UTF-8" in _error(capsys)
    assert os.listdir(model.parent) == ["in.onnx"]


def test_reports_on_a_model_whose_name_is_not_utf_8(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model.parent / "m\udcff.onnx"
    try:
        model.rename(source)
    except OSError:
        pytest.skip("the disk holds names in UTF-8 alone")
    page, data = (model.parent / f"r\udcff.{kind}" for kind in ("html", "json"))
    arguments = ["convert", str(source), str(source.with_name("o.onnx")), "--report", str(page), "--json", str(data)]
    assert main(arguments) == 0 and capsys.readouterr().err == ""
    assert "m\\udcff.onnx in float16" in page.read_text(encoding="utf-8")
    assert json.loads(data.read_text(encoding="ascii"))["source"] == str(source)


def test_a_check_says_that_a_path_in_another_encoding_cannot_be_opened(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both libraries want UTF-8: what they answer is no word on the model, which is right."""
    folder = model.parent / "d\udcff"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the disk holds names in UTF-8 alone")
    assert main(["convert", str(model), str(folder / "o.onnx"), "--check"]) == 3
    said = capsys.readouterr()
    assert "refuses" not in said.out and "is off by" in said.out
    assert "check failed: neither onnx.checker nor onnxruntime opens the file: its path is not UTF-8" in said.err
    model.rename(folder / "in.onnx")
    assert main(["convert", str(folder / "in.onnx"), str(model), "--check"]) == 0
    assert "is off by" in capsys.readouterr().out


def test_a_working_folder_that_was_removed(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = model.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    data = model.parent / "data.npz"
    np.savez(data, x=np.zeros((4, 32), np.float32), label=np.zeros((4, 32), np.float32))
    train = ["train", str(model), str(model.parent / "t.onnx"), "--data", str(data), "--loss", "mse"]
    for arguments in (
        ["convert", str(model), "o.onnx"],
        ["convert", str(model), str(model.parent / "o.onnx"), "--report", "r.html"],
        [*train, "--checkpoint", "runs"],
        [*train, "--log", "log"],
    ):
        assert main(arguments) == 1
        assert f"'{arguments[-1]}' cannot be written: " in _error(capsys)
    assert main(["convert", str(model), str(model.parent / "o.onnx")]) == 0
    with pytest.raises(amp.errors.ModelFileWriteError, match=r"'o.onnx' cannot be written: there is no folder '\.'"):
        amp.Program.from_onnx(model).to_onnx("o.onnx")


def test_a_file_in_the_place_of_a_folder_is_told_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(model), str(model / "out.onnx")]) == 1
    assert _error(capsys).count("cannot be written") == 1


def test_of_locations_said_twice_the_one_that_is_read_is_protected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime reads the last of them, and so does the conversion: a report over it would destroy the weights."""
    found = onnx.parser.parse_model(_MODEL)
    tensor = found.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=_W.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for name in ("first", "last"):
        (tmp_path / name).write_bytes(_W.tobytes())
        tensor.external_data.add(key="location", value=name)
    onnx.save_model(found, tmp_path / "in.onnx")
    arguments = ["convert", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--report", str(tmp_path / "last")]
    assert main(arguments) == 2
    assert "are the same file" in _error(capsys)
    assert (tmp_path / "last").read_bytes() == _W.tobytes()


@pytest.mark.parametrize("option", ["--checkpoint", "--log"])
def test_a_folder_that_is_named_like_the_model_is_refused_before_training(
    model: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.zeros((40, 32), np.float32)
    np.savez(model.parent / "d.npz", x=x, label=x)
    start = ["train", str(model), str(model.parent / "out"), "--data", str(model.parent / "d.npz"), "--loss", "mse"]
    assert main([*start, option, f"{model.parent}/./out"]) == 2
    assert "the same name" in _error(capsys)
    for path in ("a" * 300, "a/" * 3000):
        assert main([*start, option, path]) == 1
        assert "too long" in _error(capsys)
    assert sorted(os.listdir(model.parent)) == ["d.npz", "in.onnx"]


@pytest.mark.parametrize("command", [["convert", "--calibration"], ["train", "--loss", "mse", "--data"]])
def test_a_folder_that_may_not_be_listed(
    command: list[str], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model.parent / "secret"
    folder.mkdir()
    plain = {"scandir": os.scandir, "listdir": os.listdir}

    def refusing(name: str) -> Any:  # permissions do not hold root back
        def call(path: Any = ".") -> Any:
            if os.fspath(path) == str(folder):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return plain[name](path)

        return call

    for name in plain:
        monkeypatch.setattr(os, name, refusing(name))
    assert main([command[0], str(model), str(model.parent / "out.onnx"), *command[1:], str(folder)]) == 2
    assert "secret" in _error(capsys)
    assert sorted(plain["listdir"](model.parent)) == ["in.onnx", "secret"]


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 3000, "x\0y"])
def test_folders_that_cannot_be(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = amp.Program()
    with pytest.raises(amp.AmpError):
        amp.load_checkpoint(path, program)
    with pytest.raises(amp.AmpError):
        amp.TensorBoardWriter(path)
    assert os.listdir(tmp_path) == []


def test_explain_prints_nothing_before_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = onnx.parser.parse_model(_MODEL.replace("MatMul(x, w)", "Add(x, x)"))
    found.graph.input[0].ClearField("type")
    onnx.save_model(found, tmp_path / "in.onnx")
    assert main(["explain", str(tmp_path / "in.onnx")]) == 1
    assert "no element type" in _error(capsys)


def _many(kind: str) -> onnx.ModelProto:
    if kind == "an input":
        found = onnx.parser.parse_model(_MODEL.replace("float[N,32] x", f"float[{','.join('1' * 65)}] x"))
        return found
    found = onnx.parser.parse_model(_MODEL.replace("MatMul(x, w)", "Add(x, w)").replace("y)", "z, float[N,32] y)"))
    del found.graph.output[0]
    if kind == "an initializer":
        found.graph.initializer.append(TensorProto(name="w", data_type=1, dims=[1] * 65, raw_data=bytes(4)))
        return found
    axes = numpy_helper.from_array(np.arange(2, 66), "axes")
    found.graph.initializer.append(axes)
    found.graph.node[0].CopyFrom(helper.make_node("Unsqueeze", ["x", "axes"], ["y"]))
    found.graph.output[0].ClearField("type")
    return found


@pytest.mark.parametrize("kind", ["an input", "an initializer", "a result"])
def test_more_dimensions_than_numpy_knows(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save_model(_many(kind), tmp_path / "in.onnx")
    assert main(["convert", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--check"]) == 1
    assert "dimensions; numpy" in _error(capsys)
    assert os.listdir(tmp_path) == ["in.onnx"]


def test_weights_of_a_wrong_rank_of_a_recurrent_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ONNX's own inference does not look at them."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[4,4,4] x) => (float[a,b,c,d] y)
        { y = GRU<hidden_size = 3>(x, w, w) }"""
    found = onnx.parser.parse_model(text)
    found.graph.initializer.append(numpy_helper.from_array(_W, "w"))
    onnx.save_model(found, tmp_path / "in.onnx")
    assert main(["convert", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--check"]) in (1, 3)
    assert "Traceback" not in capsys.readouterr().err
