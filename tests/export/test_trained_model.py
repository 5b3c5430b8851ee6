"""The model of an exported step: served, and with the weights of a checkpoint what the executor infers, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main
from amp_transpiler.export import folder as writing
from amp_transpiler.ir.wire import contents
from tests.helpers.checkpoints import Small, build

CPU = amp.CPUPlace()
CASES: dict[str, dict[str, Any]] = {
    "pure fp16": {},
    "pure bfloat16": {"mode": "pure-bf16", "scaling": "static"},
    "mixed": {"mode": "amp"},
    "fp32": {"mode": "fp32", "scaling": "none"},
}


def exported(tmp_path: Path, **case: Any) -> tuple[Small, amp.Scope, Path]:
    """A step, and a checkpoint of some steps later."""
    net = build(**case)
    scope = net.start()
    folder = net.main.export_training(tmp_path / "step", CPU, outputs=[net.output], scope=scope)
    net.train(scope, 0, 3)
    amp.save_checkpoint(tmp_path / "trained", net.main, scope, step=3)
    return net, scope, folder


def weights(path: Path) -> dict[str, bytes]:
    return {tensor.name: tensor.raw_data for tensor in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_weights_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    net, scope, folder = exported(tmp_path, **CASES[case])
    amp.write_trained_model(folder, tmp_path / "trained.onnx", tmp_path / "trained")
    expected = tmp_path / "expected.onnx"
    amp.save_inference_model(expected, ["x"], [net.output], net.exe, net.main, scope=scope)
    assert weights(tmp_path / "trained.onnx") == weights(expected) != weights(folder / "model.onnx")
    assert (tmp_path / "trained.onnx").read_bytes() == expected.read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert {one["state"] for one in manifest["serving"]["weights"]} >= {"fc_0.w_0", "fc_1.w_0", "batch_norm_0.w_1"}
    if case != "pure bfloat16":  # onnxruntime has no bfloat16 arithmetic on CPU
        x = net.feed(0)["x"]
        session = ort.InferenceSession(tmp_path / "trained.onnx")
        found = session.run([net.output.name], {"x": x})[0]
        test = net.main.clone(for_test=True)
        assert np.allclose(found, net.exe.run(test, {"x": x}, [net.output.name], scope=scope)[0], atol=2e-3)


def test_without_a_checkpoint_it_is_as_it_was_exported(tmp_path: Path) -> None:
    _, _, folder = exported(tmp_path)
    amp.write_trained_model(folder, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == (folder / "model.onnx").read_bytes()


def test_the_command_takes_the_last_of_several_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, folder = exported(tmp_path)
    out = tmp_path / "trained.onnx"
    assert main(["trained-model", str(folder), str(out), "--checkpoint", str(tmp_path / "trained")]) == 0
    assert f"{out.stat().st_size:,} bytes" in capsys.readouterr().out
    amp.write_trained_model(folder, tmp_path / "other.onnx", tmp_path / "trained" / "step_00000003")
    assert out.read_bytes() == (tmp_path / "other.onnx").read_bytes()


def test_large_weights_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of some bytes in the place of 2 GB."""
    monkeypatch.setattr(writing, "LIMIT", 64)
    monkeypatch.setattr(writing, "_WORTH", 48)
    net, scope, folder = exported(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["serving"]["data"] == "model.onnx.data" in manifest["files"]
    assert {one["file"] for one in manifest["serving"]["weights"]} == {"model.onnx", "model.onnx.data"}
    amp.write_trained_model(folder, tmp_path / "trained.onnx", tmp_path / "trained")
    amp.save_inference_model(tmp_path / "expected.onnx", ["x"], [net.output], net.exe, net.main, scope=scope)
    assert weights(tmp_path / "trained.onnx") == weights(tmp_path / "expected.onnx")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, _, folder = exported(tmp_path)
    out, trained = tmp_path / "trained.onnx", tmp_path / "trained"
    other = build(hidden=6)
    amp.save_checkpoint(tmp_path / "other", other.main, other.start())
    with pytest.raises(amp.errors.CheckpointMismatchError, match="is one of another program"):
        amp.write_trained_model(folder, out, tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        amp.write_trained_model(folder, out, tmp_path / "none")
    with pytest.raises(ValueError, match="are the same file"):
        amp.write_trained_model(folder, folder / "train.onnx", trained)
    with pytest.raises(TypeError, match="path is 3; expected the path of a file"):
        amp.write_trained_model(folder, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is no exported step: there is no '.*manifest.json'; give the folder that"):
        amp.write_trained_model(tmp_path, out)
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    (changed / "model.onnx").write_bytes((changed / "model.onnx").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model.onnx' was changed"):
        amp.write_trained_model(changed, out, trained)
    if hasattr(os, "mkfifo"):  # which would be waited for
        (changed / "model.onnx").unlink()
        os.mkfifo(changed / "model.onnx")
        with pytest.raises(ValueError, match=r"model.onnx' cannot be read: it is no ordinary file"):
            amp.write_trained_model(changed, out, trained)
    manifest = json.loads((changed / "manifest.json").read_text(encoding="utf-8"))
    (changed / "manifest.json").write_text(json.dumps(manifest | {"version": 2}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"version 2; expected amp_transpiler.training_step version 1"):
        amp.write_trained_model(changed, out, trained)
    serving = manifest["serving"]
    beyond = [one | {"offset": 10**9} for one in serving["weights"]]
    for damaged in ({"serving": {}}, {"serving": serving | {"weights": beyond}}, {"files": {}}):
        (changed / "manifest.json").write_text(json.dumps(manifest | damaged), encoding="utf-8")
        with pytest.raises(amp.errors.ModelFileError, match=r"manifest.json' is damaged"):
            amp.write_trained_model(changed, out, trained)
    (changed / "manifest.json").write_text(json.dumps(manifest | {"serving": None}), encoding="utf-8")
    with pytest.raises(ValueError, match="need operators that onnxruntime alone does not have"):
        amp.write_trained_model(changed, out, trained)
    assert not out.exists()


@pytest.mark.parametrize(
    "forged",
    [
        lambda said: said.update(serving=None, program={}),
        lambda said: said.update(program="name fingerprint"),
        lambda said: [one.pop("sha256") for one in said["files"].values()],
        lambda said: said["serving"]["weights"][0].update(offset=said["serving"]["weights"][0]["offset"] + 0.5),
        lambda said: said["serving"].update(file=["model.onnx"]),
        lambda said: (said["serving"].update(file="a\0b"), said["files"].update({"a\0b": said["files"]["model.onnx"]})),
        lambda said: (said["serving"].update(data="../x"), said["files"].update({"../x": said["files"]["model.onnx"]})),
    ],
)
def test_a_forged_manifest_is_called_damaged(forged: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    _, _, folder = exported(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    forged(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(amp.errors.ModelFileError, match=r"manifest.json' is damaged"):
        amp.write_trained_model(folder, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_contents_are_found_where_they_lie(tmp_path: Path) -> None:
    """Whatever stands before them, and not where content is no raw bytes."""
    held = {f"w{i}": np.arange(i * i, dtype=np.float32) for i in range(1, 20)}
    made = [onnx.numpy_helper.from_array(array, name) for name, array in held.items()]
    listed = onnx.helper.make_tensor("listed", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    names = [*held, "listed"]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [name], [f"{name}_out"]) for name in names],
        "g",
        [],
        [onnx.helper.make_tensor_value_info(f"{name}_out", 1, None) for name in names],
        [*made, listed],
    )
    content = onnx.helper.make_model(graph).SerializeToString()
    found = contents(content)
    assert {name: content[at : at + size] for name, (at, size) in found.items()} == {
        name: array.tobytes() for name, array in held.items()
    }
