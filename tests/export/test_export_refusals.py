"""What export_training refuses, and that a folder is whole or as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler import files
from amp_transpiler.export import folder as writing
from amp_transpiler.nn import functional as F
from tests.helpers.checkpoints import Small, build

CPU = amp.CPUPlace()


@pytest.fixture(scope="module")
def net() -> Small:
    return build()


@pytest.fixture(scope="module")
def scope(net: Small) -> amp.Scope:
    return net.start()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"place": "gpu"}, ValueError, "export_training: place is 'gpu'"),
        ({"place": [CPU, 1]}, TypeError, "export_training: place is 1; expected a place"),
        ({"place": []}, ValueError, "no place; .* at least one"),
        ({"place": [CPU, amp.WebGPUPlace(0), amp.CPUPlace(emulate="webgpu")]}, ValueError, "two places for cpu"),
        ({"feed_shapes": {"y": (2, 3)}}, ValueError, "'y' is no feed of program .*; its feeds are x, label"),
        ({"feed_shapes": {"x": (2, 8)}}, ValueError, r"feed 'x' .* declared as \[6, 8\]; \[2, 8\]"),
        ({"feed_shapes": {"x": np.zeros((6, 8))}}, ValueError, r"the shape of feed 'x' is array\(.*; expected sizes"),
        ({"feed_shapes": {"x": 6}}, ValueError, "the shape of feed 'x' is 6; expected sizes"),
        ({"feed_shapes": {"x": (0, 8)}}, ValueError, r"the shape of feed 'x' is \(0, 8\); expected .* from 1 on"),
        ({"outputs": "x"}, TypeError, "outputs is a list of variables or names"),
        ({"outputs": ["nothing"]}, ValueError, "outputs: .*'nothing'"),
        ({"outputs": ["x"]}, ValueError, "export_training: outputs: nothing in program .* computes 'x'"),
        ({"fetch_list": ["fc_0.w_0"]}, ValueError, "'fc_0.w_0' is state"),
        ({"test_program": 3}, TypeError, "test_program is 3"),
        ({"test_program": amp.Program("empty")}, ValueError, "'empty' has no variable"),
        ({"scope": amp.Scope()}, LookupError, "run its startup program first"),
    ],
)
def test_wrong_arguments_write_nothing(
    net: Small, scope: amp.Scope, arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    given = {"place": CPU, "scope": scope, **arguments}
    with pytest.raises(amp.AmpError, match=message) as raised:
        net.main.export_training(tmp_path / "step", **given)
    assert isinstance(raised.value, error)
    assert not any(tmp_path.iterdir())


def test_shapes_that_do_not_fit_together_write_nothing(tmp_path: Path) -> None:
    main, startup, scope = amp.Program("open"), amp.Program("startup"), amp.Scope()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, label = amp.data("x", [None, 4]), amp.data("label", [None], "int64")
        amp.optimizer.SGD(0.1).minimize(F.mean(F.cross_entropy(amp.nn.fc(x, 3), label)))
    amp.Executor().run(startup, scope=scope)
    with pytest.raises(ValueError, match=r"refuses the step at these shapes: x \[8, 4\], label \[7\]"):
        main.export_training(tmp_path / "step", CPU, {"x": (8, 4), "label": (7,)}, scope=scope)
    assert not any(tmp_path.iterdir())
    main.export_training(tmp_path / "step", CPU, {"x": (8, 4), "label": (8,)}, scope=scope)


def test_a_program_without_a_step_is_refused(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no training step .*minimize"):
        net.test.export_training(tmp_path / "step", CPU, scope=scope)


def test_open_feeds_and_unknown_predictions_are_named(tmp_path: Path) -> None:
    main, startup, scope = amp.Program("open"), amp.Program("startup"), amp.Scope()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None, 4], "float32")
        code = amp.nn.fc(x, 2)
        loss = F.mean(F.square(amp.nn.fc(code, 4) - x))
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    amp.Executor().run(startup, scope=scope)
    with pytest.raises(ValueError, match=r"not to be told from its loss; name it: outputs="):
        main.export_training(tmp_path / "step", CPU, {"x": (2, 4)}, scope=scope)
    with pytest.raises(amp.AmpError, match="x"):
        main.export_training(tmp_path / "step", CPU, outputs=[code], scope=scope)
    assert not any(tmp_path.iterdir())
    folder = main.export_training(tmp_path / "step", CPU, {"x": (2, 4)}, outputs=[code], scope=scope)
    assert [out.name for out in onnx.load(folder / "infer.onnx").graph.output] == [code.name]


def test_where_an_export_was_killed_the_next_one_writes(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    workspace = files.Workspace(tmp_path)
    if workspace._lock is not None:
        os.close(workspace._lock)  # as the end of the process does
    net.main.export_training(tmp_path, CPU, scope=scope)
    assert (tmp_path / "manifest.json").is_file() and not list(tmp_path.glob(".*"))


def test_folders_with_other_things_in_them_stay(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty, and holds no exported step"):
        net.main.export_training(tmp_path, CPU, scope=scope, overwrite=True)
    with pytest.raises(ValueError, match="is a file"):
        net.main.export_training(tmp_path / "notes.txt", CPU, scope=scope)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is a symbolic link"):
        net.main.export_training(tmp_path / "link", CPU, scope=scope, overwrite=True)
    with pytest.raises(OSError, match="cannot be made"):
        net.main.export_training(tmp_path / "none" / "step", CPU, scope=scope)
    assert (tmp_path / "notes.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
    (tmp_path / "notes.txt").unlink()
    if hasattr(os, "mkfifo"):  # which would be waited for
        os.mkfifo(tmp_path / "manifest.json")
        with pytest.raises(ValueError, match="is not empty, and holds no exported step"):
            net.main.export_training(tmp_path, CPU, scope=scope, overwrite=True)


def test_a_failure_leaves_what_was_there(
    net: Small, scope: amp.Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last model cannot be written: a new folder is not there, an old one is as it was."""
    folder = net.main.export_training(tmp_path / "old", CPU, scope=scope)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    plain, count = writing.serialized, []

    def full(model: onnx.ModelProto) -> bytes:
        count.append(model)
        if len(count) % 3 == 0:
            raise OSError(28, "No space left on device")
        return plain(model)

    monkeypatch.setattr(writing, "serialized", full)
    for target in (tmp_path / "new", folder):
        with pytest.raises(OSError, match="No space left"):
            net.main.export_training(target, CPU, scope=scope, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_large_constants_lie_beside_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of some bytes in the place of 2 GB."""
    main, startup, scope = amp.Program(), amp.Program("startup"), amp.Scope()
    table = np.arange(4096, dtype=np.float32).reshape(16, 256)
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, label = amp.data("x", [4, 16], "float32"), amp.data("label", [4, 1], "int64")
        loss = F.cross_entropy(amp.nn.fc(x @ table, 3), label)
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    amp.Executor().run(startup, scope=scope)
    monkeypatch.setattr(writing, "LIMIT", 4096)
    folder = main.export_training(tmp_path / "step", CPU, scope=scope)
    manifest = json.loads((folder / "manifest.json").read_text())
    (place,) = manifest["places"]
    assert place["models"]["train"]["data"] == "train.onnx.data" in place["files"]
    assert (folder / "train.onnx.data").stat().st_size >= table.nbytes
    assert (folder / "train.onnx").stat().st_size < table.nbytes
    ort.InferenceSession(str(folder / "train.onnx"))
