"""What commands say where files cannot be written, and what stands then."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_transpiler as amp
from amp_transpiler.cli import main
from amp_transpiler.errors import ModelFileWriteError
from amp_transpiler.file_targets import check_target
from amp_transpiler.files import Group, put, write_files
from tests.helpers.external_nets import X, contents, convert, net, outputs


# -- what is no ordinary file ------------------------------------------------------------------------------
def test_devices_pipes_sockets_folders_and_links_are_no_targets(
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


# -- what is said --------------------------------------------------------------------------------------------
def test_interrupts_and_full_disks_say_what_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = net(tmp_path)
    before = contents(tmp_path)
    request = [path, tmp_path / "out.onnx", "--check", "--report", tmp_path / "r.html", "--json", tmp_path / "r.json"]

    for stop, ends in (
        (signal.SIGINT, (130, "amp-transpile: interrupted; nothing was written\n")),
        (signal.SIGTERM, (143, "amp-transpile: terminated; nothing was written\n")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("amp_transpiler.cli.convert.check", lambda *_, stop=stop: os.kill(os.getpid(), stop))
            status, _, err = convert(capsys, *request)
        assert (status, err) == ends and contents(tmp_path) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
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


def test_a_check_that_fails_says_that_the_file_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = net(tmp_path)
    status, _, err = convert(capsys, path, tmp_path / "out.onnx", "--check", "--tolerance", "1e-9")
    assert status == 3 and f"'{tmp_path / 'out.onnx'}' written all the same" in err
    assert (tmp_path / "out.onnx").exists() and ".amp_write" not in err


def test_sizes_and_casts_are_those_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
