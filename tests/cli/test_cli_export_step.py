"""``amp-transpile export-step`` on a small model: what it writes trains, and what does not fit is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main
from amp_transpiler.nn import functional as F
from tests.helpers.runners import bare, batches


def written(folder: Path, batch: int | None) -> Path:
    """A model of two layers, exported for inference."""
    program, startup = amp.Program("net"), amp.Program("startup")
    startup.seed = 3
    with amp.program_guard(program, startup), amp.unique_name.guard():
        h = amp.nn.fc(amp.data("x", [batch, 6], "float32"), 16, act="relu", name="body")
        program.outputs = [F.softmax(amp.nn.fc(h, 3, name="head"))]
    scope = amp.Scope()
    amp.Executor(threads=1).run(startup, scope=scope)
    program.to_onnx(folder / "model.onnx", scope=scope)
    return folder / "model.onnx"


def feeds(steps: int, batch: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    images = [rng.standard_normal((batch, 6)).astype(np.float32) for _ in range(steps)]
    return [{"x": x, "label": x[:, :3].argmax(1)} for x in images]


@pytest.mark.parametrize("batch", [None, 1], ids=["free batch", "fixed batch"])
def test_what_is_written_trains(batch: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, step = written(tmp_path, batch), tmp_path / "step"
    options = ["--mode", "pure", "--lr", "0.05", "--schedule", "cosine", "--steps", "60", "--loss-scale", "128"]
    assert main(["export-step", str(model), str(step), "--shape", "x=16,6", *options]) == 0
    told = capsys.readouterr().out
    assert "the model ends in Softmax" in told and "train.onnx" in told
    manifest = json.loads((step / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["learning_rates"][0]["schedule"] == {"type": "CosineAnnealingDecay", "learning_rate": 0.05} | {
        "T_max": 60,
        "eta_min": 0,
    }
    models = manifest["places"][0]["models"]
    assert [feed["shape"] for feed in models["train"]["feeds"]] == [[16, 6], [16]]
    assert [feed["name"] for feed in models["infer"]["feeds"]] == ["x"]
    loss = manifest["losses"][0]
    found = [each[loss] for each in bare(step, batches(tmp_path / "data", feeds(60, 16)), 60, tmp_path / "end")]
    assert np.mean(found[-5:]) < np.mean(found[:5]) / 3


def test_training_on_a_runners_checkpoint_names_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, step, state = written(tmp_path, None), tmp_path / "step", tmp_path / "state"
    assert main(["export-step", str(model), str(step), "--shape", "x=16,6", "--quiet"]) == 0
    data = feeds(2, 16)
    bare(step, batches(tmp_path / "data", data), 2, state)
    np.savez(tmp_path / "train.npz", **{name: np.concatenate([each[name] for each in data]) for name in data[0]})
    train = ["train", str(model), str(tmp_path / "out.onnx"), "--data", str(tmp_path / "train.npz"), "--epochs", "1"]
    capsys.readouterr()
    assert main([*train, "--checkpoint", str(state)]) == 1
    way = re.search(
        f"`amp-transpile (trained-model FOLDER trained.onnx --checkpoint {state})`", capsys.readouterr().err
    )
    assert way
    trained = str(tmp_path / "trained.onnx")
    words = {"FOLDER": str(step), "trained.onnx": trained}
    assert main([words.get(word, word) for word in way[1].split()]) == 0
    assert main(["train", trained, *train[2:]]) == 0


@pytest.mark.parametrize(
    ("place", "mode", "told"), [("webgpu", "mixed", 1), ("webgpu", "fp32", 0), ("cpu", "mixed", 0)]
)
def test_that_16_bit_is_no_faster_on_a_place_is_told(
    place: str, mode: str, told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ["export-step", str(written(tmp_path, None)), str(tmp_path / "step"), "--shape", "x=4,6"]
    assert main([*step, "--place", place, "--mode", mode]) == 0
    line = "16 bit is no faster on WebGPU: sums that kernels would round in 16 bit are widened (docs/places.md); --mode fp32"
    assert capsys.readouterr().out.count(line) == told


def test_frozen_parameters_are_state_that_nothing_replaces(tmp_path: Path) -> None:
    model, step = written(tmp_path, None), tmp_path / "step"
    command = ["export-step", str(model), str(step), "--shape", "x=4,6", "--freeze", "body*", "--quiet", "--portable"]
    assert main(command) == 0
    said = json.loads((step / "manifest.json").read_text(encoding="utf-8"))
    (place,) = said["places"]
    train = place["models"]["train"]
    assert place["portable"]
    frozen = [name for name in train["states"] if name.startswith("body")]
    assert frozen and not set(frozen) & set(train["updates"])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--shape", "x=4,7"], 2, r"--shape x=4,7: input 'x' has the shape \[\?,6\]"),
        (["--shape", "x=4"], 2, r"--shape x=4: input 'x' has the shape \[\?,6\]"),
        (["--shape", "x=0,6"], 2, r"--shape x=0,6: a size is 0; expected numbers from 1 on"),
        (["--shape", "x=4,6", "xx=4,6"], 2, r"--shape xx=4,6: the model has no such input; it has x"),
        (
            ["--shape", "x=4,6", "label=5"],
            2,
            r"--label label: its shape is \[4\], by that of the inputs, and not \[5\]",
        ),
        ([], 2, r"give its sizes, as in --shape x=8,6"),
        (["--shape", "x=4,6", "--mode", "half"], 2, r"--mode"),
        (["--shape", "x=4,6", "--optimizer", "adamax"], 2, r"--optimizer"),
        (["--shape", "x=4,6", "--steps", "-4"], 2, r"--steps is -4; expected a whole number, at least 1"),
        (["--shape", "x=4,6", "--schedule", "cosine"], 2, r"--schedule cosine goes down to 0 .* --steps"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, None)
    assert main(["export-step", str(model), str(tmp_path / "step"), "--quiet", *arguments]) == status
    told = capsys.readouterr().err
    assert len(told.strip().splitlines()) == 1
    assert re.search(message, told), told
    assert not (tmp_path / "step").exists()


def test_a_folder_is_replaced_on_demand_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, step = written(tmp_path, None), tmp_path / "step"
    command = ["export-step", str(model), str(step), "--shape", "x=4,6", "--quiet"]
    assert main(command) == 0
    assert main(command) == 2 and "; --overwrite replaces it" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--accumulate", "2"]) == 0
    assert (step / "accumulate.onnx").is_file()
    assert main([*command, "--overwrite"]) == 0
    assert not (step / "accumulate.onnx").exists(), "files of the step that was there before are gone"
    onnx.checker.check_model(str(step / "train.onnx"))


def test_what_would_do_nothing_is_no_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of several ranks, and of a loop that an exported step leaves to others."""
    for option in ("--shard-optimizer", "--allreduce-precision", "--check-every", "--epochs"):
        with pytest.raises(SystemExit):
            main(["export-step", str(written(tmp_path, None)), str(tmp_path / "step"), "--shape", "x=4,6", option])
        assert f"unrecognized arguments: {option}" in capsys.readouterr().err
