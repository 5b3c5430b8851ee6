"""Which paths are written, and that files appear whole, together, or not at all; nothing of a model names a file."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import amp_transpiler as amp
from amp_transpiler import files
from amp_transpiler.cli import main
from amp_transpiler.errors import ArgumentError, ModelFileError, ModelFileWriteError
from amp_transpiler.files import Group, check_outputs, check_target, put, write_files

X = np.random.default_rng(5).standard_normal((2, 64)).astype(np.float32)


def external(tensor: TensorProto, location: str, offset: int = 0) -> bytes:
    """Make the tensor external; gives its bytes."""
    raw = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(len(raw)))):
        tensor.external_data.add(key=key, value=value)
    return raw


def net(folder: Path, name: str = "net.onnx", data: str = "net.onnx.data", seed: int = 0) -> Path:
    """y = Relu(x @ w) with w external, and uint8 tensors that no conversion changes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,64] x) => (float[N,64] y, uint8[2048] k) { h = MatMul(x, w)\n y = Relu(h)\n k = Identity(u) }""")
    w = numpy_helper.from_array(rng.standard_normal((64, 64)).astype(np.float32) / 8, "w")
    u = numpy_helper.from_array(rng.integers(0, 256, 2048).astype(np.uint8), "u")
    raw = external(w, data)
    (folder / data).write_bytes(raw + external(u, data, len(raw)))
    model.graph.initializer.extend([w, u])
    onnx.save_model(model, folder / name)
    return folder / name


def outputs(path: Path) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, {"x": X})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too, and what it holds; links by where they lead."""
    return {
        str(p.relative_to(folder)): os.readlink(p).encode() if p.is_symlink() else p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def convert(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = main(["convert", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


# -- names in a model ------------------------------------------------------------------------------------
def test_f1_locations_in_a_model_name_no_file_that_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mal, victim = tmp_path / "mal", tmp_path / "victim"
    path = net(mal)
    model = onnx.load(path, load_external_data=False)
    for number, location in enumerate((".bashrc", ".ssh/authorized_keys", "other.onnx", "other.onnx.data")):
        tensor = numpy_helper.from_array(np.full(4096, number, np.uint8), f"t{number}")
        (mal / location).parent.mkdir(exist_ok=True)
        (mal / location).write_bytes(external(tensor, location))
        model.graph.initializer.append(tensor)
        model.graph.node.append(onnx.helper.make_node("Identity", [tensor.name], [f"o{number}"]))
        model.graph.output.append(onnx.helper.make_tensor_value_info(f"o{number}", TensorProto.UINT8, [4096]))
    hidden = numpy_helper.from_array(np.full(8192, 9, np.uint8), "hidden")
    (mal / "attribute").write_bytes(external(hidden, "attribute"))
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["c"], value=hidden))
    model.graph.output.append(onnx.helper.make_tensor_value_info("c", TensorProto.UINT8, [8192]))
    onnx.save_model(model, path)
    (victim / ".ssh").mkdir(parents=True)
    for location in (".bashrc", ".ssh/authorized_keys", "other.onnx", "other.onnx.data", "attribute"):
        (victim / location).write_text("mine")
    expected = outputs(path)
    before = contents(victim)
    assert convert(capsys, path, victim / "out.onnx")[0] == 0
    after = contents(victim)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"out.onnx", "out.onnx.data"}
    shutil.rmtree(mal)
    found = outputs(victim / "out.onnx")
    assert all(np.array_equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))
    amp.Program.from_onnx(victim / "out.onnx").to_onnx(victim / "again.onnx")
    assert set(contents(victim)) - set(after) == {"again.onnx", "again.onnx.data"}


def test_f2_a_neighbour_keeps_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = net(tmp_path / "AA", "model.onnx", "model.onnx.data", seed=1)
    other = net(tmp_path / "BB", "model.onnx", "model.onnx.data", seed=2)
    before, expected = contents(other.parent), outputs(one)
    assert convert(capsys, one, other.parent / "out.onnx", "--black-list", "MatMul")[0] == 0
    after = contents(other.parent)
    assert {name: after[name] for name in before} == before
    assert np.allclose(outputs(other.parent / "out.onnx")[0], expected[0], rtol=1e-2, atol=1e-2)


def test_f3_what_the_input_consists_of_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path)
    os.link(tmp_path / "net.onnx.data", tmp_path / "hard.bin")
    (tmp_path / "soft.bin").symlink_to("net.onnx.data")
    os.link(path, tmp_path / "twin.onnx")
    (tmp_path / "loop").symlink_to("loop")
    samples = tmp_path / "samples"
    samples.mkdir()
    np.savez(samples / "a.npz", x=X)
    before = contents(tmp_path)
    requests = [
        *[
            [path, tmp_path / "half.onnx", "--external-data", name]
            for name in ("net.onnx.data", "net.onnx", "hard.bin", "soft.bin", "twin.onnx", "half.onnx", "..", "samples")
        ],
        [path, path],
        [path, tmp_path / "twin.onnx"],
        [path, tmp_path / "net.onnx.data"],
        [path, tmp_path / "hard.bin"],
        [path, tmp_path / "soft.bin"],
        [path, tmp_path / "loop"],
        *[
            [path, tmp_path / "half.onnx", option, tmp_path / name]
            for option in ("--report", "--json")
            for name in ("net.onnx", "net.onnx.data", "hard.bin", "half.onnx", "half.onnx.data", "samples", "loop")
        ],
        [path, tmp_path / "half.onnx", "--report", tmp_path / "r", "--json", tmp_path / "." / "r"],
        [path, samples / "a.npz", "--calibration", samples],
        [path, tmp_path / "half.onnx", "--calibration", samples / "a.npz", "--json", samples / "a.npz"],
        [path, tmp_path / "half.onnx", "--report", tmp_path / "x\0y"],
        [path, tmp_path / "half.onnx", "--report", tmp_path / ("n" * 300)],
        [path, str(tmp_path / "new.onnx") + "/"],
    ]
    for request in requests:
        status, _, err = convert(capsys, *request)
        assert status in (1, 2) and err.count("\n") == 1, (request, err)
        assert contents(tmp_path) == before, request


def test_f3_a_program_does_not_overwrite_the_weights_that_it_maps(tmp_path: Path) -> None:
    path = net(tmp_path)
    before = contents(tmp_path)
    for program in (amp.Program.from_onnx(path), amp.convert(path), amp.convert(path, mode="mixed").clone()):
        for target, choice in (("half.onnx", "net.onnx.data"), ("half.onnx", "net.onnx"), ("net.onnx.data", None)):
            with pytest.raises(ArgumentError, match="choose another name"):
                program.to_onnx(tmp_path / target, external_data=choice)
    given = onnx.load(path, load_external_data=False)
    with pytest.raises(ArgumentError, match="choose another name"):
        amp.Program.from_onnx(given, external_data_dir=tmp_path).to_onnx(tmp_path / "net.onnx.data")
    assert contents(tmp_path) == before
    expected = outputs(path)
    program = amp.Program.from_onnx(path)
    program.to_onnx(path, external_data="net.onnx.data")  # in place, as asked: whole, from the file that it replaces
    assert all(np.array_equal(a, b) for a, b in zip(outputs(path), expected, strict=True))
    assert sorted(contents(tmp_path)) == ["net.onnx", "net.onnx.data"]


def test_a_data_file_that_nobody_named_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path / "in")
    out = tmp_path / "out.onnx"
    (tmp_path / "out.onnx.data").write_text("mine")
    status, _, err = convert(capsys, path, out)
    assert status == 2 and "out.onnx.data' is there, and is not the data of a model" in err
    with pytest.raises(ArgumentError, match="is there, and is not the data"):
        amp.Program.from_onnx(path).to_onnx(out)
    assert set(contents(tmp_path)) == {"in/net.onnx", "in/net.onnx.data", "out.onnx.data"}
    assert convert(capsys, path, out, "--external-data", "out.onnx.data")[0] == 0  # named
    assert convert(capsys, path, out)[0] == 0  # it is the model's own now
    left = (tmp_path / "out.onnx.data").read_bytes()
    amp.Program.from_onnx(path).to_onnx(tmp_path / "in" / "inside.onnx", external_data=False)
    status, told, _ = convert(capsys, tmp_path / "in" / "inside.onnx", out)
    assert status == 0 and f"'{out}.data' lies there from before; {out} has no use for it" in told
    assert (tmp_path / "out.onnx.data").read_bytes() == left, "nothing is removed"


def test_f7_training_takes_along_the_external_data_that_it_does_not_touch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = net(tmp_path)
    np.savez(tmp_path / "data.npz", x=X, label=np.zeros((2, 64), np.float32))
    given = ["--data", str(tmp_path / "data.npz"), "--loss", "mse", "--epochs", "1", "--batch-size", "2"]
    assert main(["train", str(path), str(tmp_path / "out.onnx"), *given]) == 0
    size = (tmp_path / "out.onnx").stat().st_size
    assert f"{size:,} bytes" in capsys.readouterr().out
    assert np.array_equal(outputs(tmp_path / "out.onnx")[1], outputs(path)[1])


# -- what is no ordinary file ------------------------------------------------------------------------------
def test_f3_devices_pipes_sockets_folders_and_links_are_no_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    Path("folder").mkdir()
    Path("file").write_text("old")
    for link, to in (("link", "file"), ("dangling", "nowhere"), ("loop", "loop"), ("to_device", os.devnull)):
        Path(link).symlink_to(to)
    refused = {
        "pipe": "a pipe",
        "socket": "a socket",
        "folder": "a folder",
        "link": "a symbolic link",
        "": "no name",
        "dangling": "a symbolic link",
        "loop": "a symbolic link",
        "to_device": "a symbolic link",
        os.devnull: "a device",
        "/dev/full": "a device",
        "loop/out": "symbolic links",
        "file/out": "no folder",
        "none/out": "no folder",
        ".": "a folder",
        "folder/..": "a folder",
        "a\0b": "no name",
        "new/": "a folder|no folder",
    }
    for target, complaint in refused.items():
        with pytest.raises(ModelFileWriteError, match=complaint):
            check_target(target)
        with pytest.raises(ModelFileWriteError):
            write_files([(target, put(b"new"))])
    model = net(tmp_path / "in")
    before = {p: p.lstat().st_ino for p in tmp_path.iterdir()}
    for target in ("pipe", "socket", "folder", "link", "dangling", "loop"):
        status, _, err = convert(capsys, model, target)
        assert status == 1 and "cannot be written" in err, target
    assert {p: p.lstat().st_ino for p in tmp_path.iterdir()} == before and Path("file").read_text() == "old"
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    Path("way").symlink_to("folder")
    write_files([("way/out", put(b"new"))])  # the way to a file may be a link
    assert Path("folder/out").read_bytes() == b"new"


def test_train_says_at_once_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path)
    np.savez(tmp_path / "data.npz", x=X, label=np.zeros((2, 64), np.float32))
    (tmp_path / "link").symlink_to("nowhere")
    before = contents(tmp_path)
    for out in (os.devnull, tmp_path, tmp_path / "none" / "o.onnx", tmp_path / "a\0b", tmp_path / "link", ""):
        status = main(["train", str(path), str(out), "--data", str(tmp_path / "data.npz"), "--loss", "mse"])
        told = capsys.readouterr()
        assert status == 1 and told.err.count("\n") == 1 and "epoch" not in told.out, out
    assert contents(tmp_path) == before


def test_train_removes_what_a_killed_run_left_in_its_folders(tmp_path: Path) -> None:
    """Also where all epochs were over, so that nothing is saved any more."""
    pytest.importorskip("fcntl")
    path = net(tmp_path)
    np.savez(tmp_path / "data.npz", x=X, label=np.zeros((2, 64), np.float32))
    command = [
        "train",
        str(path),
        str(tmp_path / "out.onnx"),
        "--data",
        str(tmp_path / "data.npz"),
        "--loss",
        "mse",
        "--epochs",
        "1",
        "--batch-size",
        "2",
        "--checkpoint",
        str(tmp_path / "saved"),
        "--quiet",
    ]
    assert main(command) == 0
    saved = os.listdir(tmp_path / "saved")
    left = tmp_path / "saved" / ".amp_write.left.tmp"
    (left / "new").mkdir(parents=True)
    (left / "amp_transpiler.lock").touch()
    assert main(command) == 0 and os.listdir(tmp_path / "saved") == saved


def test_logs_are_not_written_into_links_and_devices(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("file")
    for writer in (amp.monitor.CsvWriter, amp.monitor.JsonlWriter):
        for target in (tmp_path / "link", tmp_path, os.devnull, tmp_path / "none" / "x"):
            with pytest.raises(ModelFileWriteError):
                writer(target)
    assert (tmp_path / "file").read_text() == "mine"


def test_f6_outputs_that_are_inputs(tmp_path: Path) -> None:
    for name in ("in.onnx", "train.npz", "test.npz"):
        (tmp_path / name).write_text(name)
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.npy").write_text("x")
    os.link(data / "x.npy", tmp_path / "same.npy")
    read = {"IN.onnx": [tmp_path / "in.onnx"], "--data": [data], "--test": [tmp_path / "test.npz"]}
    for target in ("in.onnx", "test.npz", "data/x.npy", "same.npy", "data/../in.onnx"):
        with pytest.raises(ArgumentError, match="are the same file"):
            check_outputs({"OUT.onnx": tmp_path / target}, read)
    check_outputs({"OUT.onnx": tmp_path / "out.onnx", "--log": None}, read)
    assert sorted(os.listdir(tmp_path)) == ["data", "in.onnx", "same.npy", "test.npz", "train.npz"]


# -- locations ---------------------------------------------------------------------------------------------
def test_f4_links_out_of_the_folder_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path / "model")
    secret = tmp_path / "secret"
    (path.parent / "net.onnx.data").rename(secret)
    inside = path.parent / "store"
    inside.mkdir()
    for target, works in ((secret, False), (Path("../secret"), False), (inside / "data", True)):
        (path.parent / "net.onnx.data").unlink(missing_ok=True)
        (path.parent / "net.onnx.data").symlink_to(target)
        if works:
            shutil.copy(secret, inside / "data")
            assert amp.Program.from_onnx(path).has_var("w")
            continue
        with pytest.raises(ModelFileError, match="link out of the model's folder"):
            amp.Program.from_onnx(path)
        status, _, err = convert(capsys, path, tmp_path / "out.onnx")
        assert status == 1 and "'w'" in err and not (tmp_path / "out.onnx").exists()
    (path.parent / "sub").symlink_to(tmp_path)  # a folder on the way is a link
    (tmp_path / "net.onnx.data").write_bytes(secret.read_bytes())
    with pytest.raises(ModelFileError, match="link out of the model's folder"):
        amp.Program.from_onnx(net_at(path, "sub/net.onnx.data"))


def net_at(path: Path, location: str) -> Path:
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = location
    onnx.save_model(model, path)
    return path


def test_f4_the_cache_of_a_model_hub_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """snapshots/<rev>/onnx/model.onnx -> ../../../blobs/<hash>, its data likewise; but not out of the blobs."""
    plain = net(tmp_path / "plain", "model.onnx", "model.onnx_data")
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123" / "onnx"
    snapshot.mkdir(parents=True)
    for name, blob in (("model.onnx", "5ea1"), ("model.onnx_data", "beef")):
        shutil.copy(plain.parent / name, cache / "blobs" / blob)
        (snapshot / name).symlink_to(f"../../../blobs/{blob}")
    before = contents(cache)
    assert convert(capsys, snapshot / "model.onnx", tmp_path / "out.onnx", "--check")[0] == 0
    assert np.allclose(outputs(tmp_path / "out.onnx")[0], outputs(plain)[0], rtol=1e-2, atol=1e-2)
    status, _, err = convert(capsys, snapshot / "model.onnx", snapshot / "model.onnx_data")
    assert status == 2 and "same file" in err and contents(cache) == before
    (cache / "secret").write_bytes((cache / "blobs" / "beef").read_bytes())
    (snapshot / "model.onnx_data").unlink()
    (snapshot / "model.onnx_data").symlink_to("../../../secret")
    with pytest.raises(ModelFileError, match="link out of the model's folder"):
        amp.Program.from_onnx(snapshot / "model.onnx")


def test_locations_that_cannot_be(tmp_path: Path) -> None:
    path = net(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for location, complaint in (
        ("a\0b", "does not lie in"),
        ("n" * 5000, "cannot be read"),
        ("C:\\x", "does not lie in"),
        ("a/../net.onnx.data", "does not lie in"),
        ("\\\\host\\x", "does not lie in"),
        ("pipe", "no ordinary file"),
        (".", "does not lie in|no ordinary file"),
    ):
        with pytest.raises(ModelFileError, match=complaint) as caught:
            amp.Program.from_onnx(net_at(path, location))
        assert len(str(caught.value)) < 1000 and "\0" not in str(caught.value)


# -- what is said --------------------------------------------------------------------------------------------
def test_f8_interrupts_and_full_disks_say_what_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = net(tmp_path)
    before = contents(tmp_path)
    request = [path, tmp_path / "out.onnx", "--check", "--report", tmp_path / "r.html", "--json", tmp_path / "r.json"]

    def interrupted(*args: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("amp_transpiler.cli.convert.check", interrupted)
        status, _, err = convert(capsys, *request)
    assert status == 130 and "nothing was written" in err and contents(tmp_path) == before
    sync = os.fsync
    for allowed in range(40):  # the disk is full at each point
        left = iter(range(allowed))

        def full(handle: int, left: Any = left) -> None:
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            sync(handle)

        with monkeypatch.context() as patch:
            patch.setattr("amp_transpiler.files.os.fsync", full)
            status, _, err = convert(capsys, *request)
        if status == 0:
            break
        assert status == 1 and "No space left" in err and "nothing changed" in err and contents(tmp_path) == before
    made = {"out.onnx", "out.onnx.data", "r.html", "r.json"}
    assert allowed >= 4 and set(contents(tmp_path)) == set(before) | made
    commit = Group.commit

    def late(group: Group) -> None:
        commit(group)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Group, "commit", late)
        status, _, err = convert(capsys, *request)
    assert status == 130 and all(name in err for name in made) and "nothing was written" not in err, err


def test_output_that_nobody_reads_does_not_keep_files_from_being_written(tmp_path: Path) -> None:
    path = net(tmp_path)
    command = [sys.executable, "-m", "amp_transpiler.cli"]
    with open("/dev/full", "w") as full:  # every line fails
        found = subprocess.run(
            [*command, "convert", path, tmp_path / "a.onnx"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    assert found.returncode == 1 and found.stderr.count("\n") == 1 and (tmp_path / "a.onnx").exists()
    assert "standard output cannot be written: No space left on device" in found.stderr
    reader, writer = os.pipe()
    os.close(reader)
    found = subprocess.run(
        [*command, "convert", path, tmp_path / "b.onnx"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (found.returncode, found.stderr) == (0, "") and (tmp_path / "b.onnx").exists()


def test_a_model_that_comes_through_a_pipe_is_read_once(tmp_path: Path) -> None:
    amp.Program.from_onnx(net(tmp_path)).to_onnx(tmp_path / "inside.onnx", external_data=False)
    found = subprocess.run(
        [sys.executable, "-m", "amp_transpiler.cli", "convert", "/dev/stdin", tmp_path / "out.onnx"],
        input=(tmp_path / "inside.onnx").read_bytes(),
        capture_output=True,
    )
    assert found.returncode == 0, found.stderr
    assert np.allclose(outputs(tmp_path / "out.onnx")[0], outputs(tmp_path / "inside.onnx")[0], rtol=1e-2, atol=1e-2)


def test_f8_a_check_that_fails_says_that_the_file_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path)
    status, _, err = convert(capsys, path, tmp_path / "out.onnx", "--check", "--tolerance", "1e-9")
    assert status == 3 and f"'{tmp_path / 'out.onnx'}' written all the same" in err
    assert (tmp_path / "out.onnx").exists() and ".amp_write" not in err


def test_f11_sizes_and_casts_are_those_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path / "in", data="weights.bin")
    (tmp_path / "in" / "net.onnx.data").write_bytes(bytes(10**6))  # of an earlier export
    was = sum((tmp_path / "in" / name).stat().st_size for name in ("net.onnx", "weights.bin"))
    for options, names in ((["--external-data", "w.bin"], ("out.onnx", "w.bin")), ([], ("out.onnx", "out.onnx.data"))):
        (tmp_path / "out.onnx").unlink(missing_ok=True)
        status, out, _ = convert(capsys, path, tmp_path / "out.onnx", *options)
        size = sum((tmp_path / name).stat().st_size for name in names)
        assert status == 0 and f"{was:,} -> {size:,} bytes" in out
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[4,4] x, int64[4,4] i) => (float[4,4] y) { f = Cast <to = 1> (i)\n h = MatMul(x, f)\n y = Relu(h) }""")
    onnx.save_model(model, tmp_path / "own.onnx")
    status, out, _ = convert(capsys, tmp_path / "own.onnx", tmp_path / "half.onnx")
    casts = sum(node.op_type == "Cast" for node in onnx.load(tmp_path / "half.onnx").graph.node)
    assert status == 0 and f", {casts - 1} casts inserted," in out and "of 3 operators" in out


def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = net(tmp_path)
    before = contents(tmp_path)
    free = shutil.disk_usage(tmp_path)._replace(free=4000)
    monkeypatch.setattr("amp_transpiler.files.shutil.disk_usage", lambda folder: free)
    status, _, err = convert(capsys, path, tmp_path / "out.onnx")
    assert status == 1 and "4,000 are free" in err
    with pytest.raises(ModelFileWriteError, match="needs .* bytes, and 4,000 are free"):
        amp.Program.from_onnx(path).to_onnx(tmp_path / "out.onnx")
    assert contents(tmp_path) == before


# -- whole, together, or not at all ----------------------------------------------------------------------------
OLD = {"m.onnx": b"old model", "m.data": b"old data", "page": b"old page"}
NEW = {"m.data": b"new data", "page": b"new page", "m.onnx": b"new model"}
CALLS = ("rename", "replace", "fsync", "mkdir", "open")


def laid(home: Path, held: dict[str, bytes]) -> None:
    home.mkdir()
    for name, content in held.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_bytes(content)


def write_all(home: Path, new: dict[str, bytes] = NEW) -> None:
    write_files([(home / name, put(content)) for name, content in new.items()])


def killed_at(stop: int, call: Callable[..., None], *arguments: Any) -> bool:
    """Run ``call`` in a process that dies before its call number ``stop`` that touches names; whether it did."""
    child = os.fork()
    if child == 0:
        count = iter(range(10**6))

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*given: Any, **named: Any) -> Any:
                if next(count) == stop:
                    os._exit(9)
                return real(*given, **named)

            return wrapped

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        call(*arguments)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("held", [OLD, {}, {"m.data": b"old data"}], ids=["over", "fresh", "part"])
def test_a_kill_at_any_call_leaves_old_or_new(tmp_path: Path, held: dict[str, bytes]) -> None:
    pytest.importorskip("fcntl")
    seen = set()
    for stop in range(200):
        home = tmp_path / str(stop)
        laid(home, held)
        died = killed_at(stop, write_all, home)
        visible = {n: c for n, c in contents(home).items() if ".amp_write" not in n}
        assert all(c in (held.get(n), NEW[n]) for n, c in visible.items()), "no part of a file under its name"
        pair = visible.get("m.onnx"), visible.get("m.data")
        assert pair[0] is None or pair in ((held.get("m.onnx"), held.get("m.data")), (NEW["m.onnx"], NEW["m.data"])), (
            "a model beside the data of another"
        )
        write_files([(home / "else", put(b""))])  # the next run
        after = contents(home)
        assert after.pop("else") == b"" and after in (held, NEW), stop
        seen.add(after == NEW)
        if not died:
            break
    assert stop > 15 and seen == {True, False}


def test_a_kill_at_any_call_with_files_in_two_folders(tmp_path: Path) -> None:
    """Each folder has its old files or its new ones."""
    pytest.importorskip("fcntl")
    old = {"r/page": b"old", "r/m.json": b"old", "m.onnx": b"old", "m.data": b"old"}
    new = dict.fromkeys(old, b"new")
    for stop in range(0, 200, 3):
        home = tmp_path / str(stop)
        laid(home, old)
        died = killed_at(stop, write_all, home, new)
        write_files([(home / "else", put(b"")), (home / "r" / "else", put(b""))])
        after = contents(home)
        assert len(after) == 6 and after["r/page"] == after["r/m.json"] and after["m.onnx"] == after["m.data"], stop
        if not died:
            break
    assert stop > 15 and set(after.values()) == {b"new", b""}


def test_a_file_that_came_after_a_kill_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    reached = False
    for stop in range(200):
        home = tmp_path / str(stop)
        laid(home, OLD)
        if not killed_at(stop, write_all, home):
            break
        if not (home / "m.onnx").exists():
            reached = True
            (home / "m.onnx").write_text("somebody else's")
            write_files([(home / "else", put(b""))])
            assert (home / "m.onnx").read_text() == "somebody else's"
    assert reached


@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_rename_that_fails_takes_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    for stop in range(20):
        home = tmp_path / str(stop)
        laid(home, OLD)
        count = iter(range(100))

        def failing(real: Callable[..., Any], count: Any = count, stop: int = stop) -> Callable[..., Any]:
            def wrapped(*given: Any) -> Any:
                if next(count) == stop:
                    raise error
                return real(*given)

            return wrapped

        with monkeypatch.context() as patch:
            for name in ("rename", "replace"):
                patch.setattr(os, name, failing(getattr(os, name)))
            try:
                write_all(home)
            except (ModelFileWriteError, KeyboardInterrupt):
                assert contents(home) == OLD
                continue
        assert contents(home) == NEW
        break
    assert stop == 6  # three moved aside, three put in place


def test_a_workspace_that_came_out_of_an_archive_moves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    home, private = tmp_path / "home", tmp_path / "private"
    private.mkdir()
    (private / "key").write_text("mine")
    for stop in range(200):  # one that a real kill left between two renames, as somebody could pack it up
        laid(home, OLD)
        assert killed_at(stop, write_all, home)
        if not (home / "m.onnx").exists():
            break
        shutil.rmtree(home)
    shutil.copytree(home, tmp_path / "copy")
    work = next((tmp_path / "copy").glob(".amp_write.*"))
    shutil.rmtree(work / "new")
    (work / "new").symlink_to(private)
    journal = json.loads((work / "journal.json").read_text())
    for files_, inode in (([["key", None]], journal["workspace"]), ([["../key", None]], 1)):
        (work / "journal.json").write_text(json.dumps({"workspace": inode, "files": files_}))
        packed = shutil.copytree(tmp_path / "copy", tmp_path / str(inode), symlinks=True)
        write_files([(packed / "else", put(b""))])
        assert os.listdir(private) == ["key"] and not (packed / "key").exists()
    write_files([(home / "else", put(b""))])
    assert contents(home) == NEW | {"else": b""}, "where it was left it is made good"


def test_only_what_killed_runs_of_ours_left_is_removed(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    users = [
        ".out.onnx.data.abc.tmp",
        ".out.onnx.1234.tmp",
        ".amp_write.txt",
        ".amp_write.mine.tmp/work",
        ".amp_write_backup.tmp/a",
        ".other.tmp/b",
    ]
    for name in users:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / ".amp_write.link.tmp").symlink_to(".other.tmp")
    for name in ("live", "dead"):
        left = tmp_path / f".amp_write.{name}.tmp"
        left.mkdir()
        (left / "amp_transpiler.lock").touch()
        (left / "new").mkdir()
    (tmp_path / ".amp_write.born.tmp").mkdir()
    with open(tmp_path / ".amp_write.live.tmp" / "amp_transpiler.lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_files([(tmp_path / "out.onnx", put(b"new"))])
        names = set(os.listdir(tmp_path))
    assert ".amp_write.live.tmp" in names and not {".amp_write.dead.tmp", ".amp_write.born.tmp"} & names
    assert all((tmp_path / name).read_text() == "mine" for name in users)
    assert (tmp_path / ".amp_write.link.tmp").is_symlink()


def test_many_write_into_one_folder_at_once(tmp_path: Path) -> None:
    def many(number: int) -> None:
        for turn in range(12):
            names = [f"{number}.data", f"{number}.onnx"]
            write_files([(tmp_path / name, put(f"{number} {turn}".encode())) for name in names])

    children = []
    for number in range(6):
        child = os.fork()
        if child == 0:
            try:
                many(number)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert contents(tmp_path) == {f"{n}.{kind}": f"{n} 11".encode() for n in range(6) for kind in ("data", "onnx")}


def test_what_cannot_be_put_back_is_kept_and_put_in_place_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    home = tmp_path / "home"
    laid(home, OLD)
    real, count = os.rename, iter(range(100))

    def failing(*given: Any) -> None:
        if next(count) >= 2:
            raise OSError(30, "Read-only file system")
        real(*given)

    monkeypatch.setattr(os, "rename", failing)
    group = Group()
    with pytest.raises(ModelFileWriteError, match=r"cannot be put back.*\.amp_write.*next write"), group:
        for name, content in NEW.items():
            group.add(home / name, put(content))
        group.commit()
    monkeypatch.undo()
    held = [path for path in home.rglob("*") if path.is_file()]
    assert {path.read_bytes() for path in held} >= {*OLD.values(), *NEW.values()}, "nothing is lost"
    for workspace in group._workspaces.values():
        os.close(workspace._lock)  # as the end of the process does
    write_files([(home / "else", put(b""))])
    assert contents(home) == NEW | {"else": b""}


def test_two_names_for_one_new_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="two outputs"), Group() as group:
        group.add(tmp_path / "a", put(b"1"))
        group.add(tmp_path / "." / "a", put(b"2"))
    assert not list(tmp_path.iterdir())


def test_a_workspace_that_is_taken_for_left_behind_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process cleans up between the birth of a workspace and its lock."""
    made, taken = files.tempfile.mkdtemp, []

    def stolen(*given: Any) -> str:
        folder = made(*given)
        if len(taken) < 2:
            taken.append(folder)
            files.remove_leftovers(tmp_path)
        return folder

    monkeypatch.setattr(files.tempfile, "mkdtemp", stolen)
    write_files([(tmp_path / "a", put(b"1"))])
    assert len(taken) == 2 and contents(tmp_path) == {"a": b"1"} and os.listdir(tmp_path) == ["a"]
