"""``amp.fit`` and ``amp-transpile train``: arguments and data that do not fit are named before anything runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main
from amp_transpiler.finetune.data import Samples
from amp_transpiler.finetune.options import FitKeywords, FitOptions
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime.missing import what_is_missing
from tests.helpers.fitting import features, linear
from tests.helpers.where import ROOT


# -- files that may not be written -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "spelled",
    [
        ["model.onnx", "model.onnx"],
        ["model.onnx", "./sub/../model.onnx"],
        ["model.onnx", "hard.onnx"],
        ["model.onnx", "data.npz"],
        ["model.onnx", "test.npz"],
        ["external.onnx", "external.onnx.data"],
        ["model.onnx", "folder/x.npy"],
    ],
)
def test_an_output_that_is_read_is_refused(
    spelled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "folder").mkdir()
    onnx.save(linear(), tmp_path / "model.onnx")
    onnx.save(
        linear(),
        tmp_path / "external.onnx",
        save_as_external_data=True,
        location="external.onnx.data",
        size_threshold=0,
    )
    (tmp_path / "hard.onnx").hardlink_to(tmp_path / "model.onnx")
    for name in ("data", "test"):
        np.savez(tmp_path / f"{name}.npz", **features(40))
    for name, array in features(40).items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    source = "folder" if spelled[1].startswith("folder") else "data.npz"
    assert (
        main(
            [
                "train",
                str(tmp_path / spelled[0]),
                str(tmp_path / spelled[1]),
                "--data",
                str(tmp_path / source),
                "--test",
                str(tmp_path / "test.npz"),
            ]
        )
        == 2
    )
    assert "are the same file" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# -- arguments ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given, told",
    [
        ("--accumulate 0", "--accumulate is 0"),
        ("--batch-size -3", "--batch-size is -3"),
        ("--batch-size 0", "--batch-size is 0"),
        ("--loss-scale 0", "--loss-scale is 0"),
        ("--loss-scale nan", "--loss-scale is nan"),
        ("--clip-norm 0", "--clip-norm is 0"),
        ("--clip-norm inf", "--clip-norm is inf"),
        ("--epochs -1", "--epochs is -1"),
        ("--epochs 0", "--epochs is 0"),
        ("--lr nan", "--lr is nan"),
        ("--lr -1", "--lr is -1"),
        ("--seed -1", "--seed is -1"),
        ("--warmup-steps -1", "--warmup-steps is -1"),
        ("--weight-decay -1", "--weight-decay is -1"),
        ("--dropout x=1", "--dropout: the rate of 'x' is 1"),
        ("--metric mae", "--metric mae does not go with --loss"),
        ("--black-list MatMul --mode fp32", "--black-list: training and file are fp32"),
        ("--loss-scale 8 --mode fp32", "--loss-scale goes with --mode mixed"),
        ("--black-list Nope", "'Nope'"),
        ("--trainable w --freeze w", "both name 'w'"),
        ("--label x", "--label x: the model has a tensor"),
        (
            "--label classes",
            "'classes'; the program is fed x, classes, and there is x, label; --label names the labels",
        ),
        ("--checkpoint data.npz", "--checkpoint 'data.npz' is a file"),
        ("--log data.npz", "--log 'data.npz' is a file"),
        ("--checkpoint no/where", "there is no folder"),
        ("--checkpoint /proc/here", "--checkpoint '/proc/here' cannot be"),
        ("--log /proc/here", "--log '/proc/here' cannot be"),
        ("--accumulate 99", "holds 40 samples, fewer than"),
        ("--batch-size 99", "holds 40 samples, fewer than a batch of 99"),
        ("--output z", "--output z"),
    ],
)
def test_every_argument_is_checked_before_the_first_step(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(linear(), "model.onnx")
    np.savez("data.npz", **features(40))
    ran: list[Any] = []
    monkeypatch.setattr(Samples, "batches", lambda *arguments: ran.append(arguments))
    assert main(["train", "model.onnx", "out.onnx", "--data", "data.npz", *given.split()]) in (1, 2)
    assert told in capsys.readouterr().err
    assert not ran and sorted(path.name for path in tmp_path.iterdir()) == ["data.npz", "model.onnx"]


@pytest.mark.parametrize(
    "given, told",
    [
        ({"epoch": 3}, "no option 'epoch'; did you mean 'epochs'"),
        ({"learning_rate": 0.1}, "no option 'learning_rate'; did you mean 'lr'"),
        ({"nothing": 0.1}, "no option 'nothing'; it takes label, loss, "),
        ({"epochs": 1.5}, "epochs is 1.5; expected a whole number"),
        ({"lr": "0.1"}, "lr is '0.1'; expected a number"),
        ({"freeze": "w"}, "freeze is 'w'; expected a list"),
        ({"mode": "fp16"}, "mode is 'fp16'; expected one of fp32, mixed, pure"),
        ({"place": "tpu"}, "place is 'tpu'"),
        ({"values": ["x"]}, "values is"),
        ({"data": 3}, "data is 3; expected the path"),
        ({"checkpoint": 3}, "checkpoint is 3"),
    ],
)
def test_keywords_are_checked_too(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises((amp.AmpError), match=re.escape(told)):
        amp.fit(linear(), tmp_path / "out.onnx", **{"data": features(40), **given})
    assert not list(tmp_path.iterdir())


# -- data --------------------------------------------------------------------------------------------------
def spoiled(what: str) -> dict[str, np.ndarray]:
    data = features(40)
    x, label = data["x"].copy(), data["label"].copy()
    if what in ("nan", "inf"):
        x[7, 2] = float(what)
    elif what == "class":
        label[11] = 3
    elif what == "negative":
        label[11] = -1
    elif what == "rank":
        x = x[:, :3]
    elif what == "count":
        label = label[:39]
    elif what == "half":
        label = label + 0.5
    elif what == "times":
        label = label.astype("datetime64[s]")
    elif what == "empty":
        x, label = x[:0], label[:0]
    return {"x": x, "label": label}


@pytest.mark.parametrize(
    "what, told",
    [
        ("nan", "array 'x' holds nan at index [7, 2]"),
        ("inf", "array 'x' holds inf at index [7, 2]"),
        (
            "class",
            "label array 'label' holds 3 at index [11]; the loss cross_entropy on this output takes classes from 0 to 2",
        ),
        ("negative", "holds -1 at index [11]"),
        ("rank", "array 'x' has the shape [40, 3]; the program is fed [n, 4]"),
        ("count", "differ in the number of samples"),
        ("half", "label array 'label' is float64 and holds "),
        ("times", "label array 'label' is datetime64[s]; the loss cross_entropy takes classes"),
        ("empty", "holds no samples"),
    ],
)
@pytest.mark.parametrize("where", ["data", "test"])
def test_data_that_does_not_fit_is_named_with_its_place(where: str, what: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(amp.errors.FeedError, match=re.escape(told)):
        amp.fit(linear(), tmp_path / "out.onnx", **{"data": features(40), where: spoiled(what)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags, way", [(True, "--loss mse"), (True, "--loss kl_div"), (False, "loss=mse")])
def test_labels_that_are_no_classes_name_the_losses_that_take_them(flags: bool, way: str, tmp_path: Path) -> None:
    data = spoiled("half")
    with pytest.raises(amp.errors.FeedTypeError, match="whole numbers.*" + way):
        amp.fit(linear(), tmp_path / "out.onnx", data=data, flags=flags)
    scores = {**data, "label": data["x"][:, :3]}  # [40, 3], as mse takes them
    with pytest.raises(amp.errors.FeedTypeError, match="whole numbers.*" + way):
        amp.fit(linear(), tmp_path / "out.onnx", data=scores, flags=flags)
    amp.fit(linear(), tmp_path / "out.onnx", data=scores, loss="mse")


@pytest.mark.parametrize(
    "wrong", ["--test missing.npz", "--test short.npz", "--data short.npz", "--black-list Nope", "--test classes.npz"]
)
def test_what_is_refused_is_refused_before_anything_is_told(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(linear(), "model.onnx")
    for name, data in (("data", features(40)), ("short", spoiled("count")), ("classes", spoiled("class"))):
        np.savez(f"{name}.npz", **data)
    assert main(["train", "model.onnx", "out.onnx", "--data", "data.npz", *wrong.split()]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("amp-transpile: ") and err.count("\n") == 1


@pytest.mark.parametrize("place", [amp.CUDAPlace(0), amp.WebGPUPlace(0)], ids=repr)
def test_without_a_gpu_the_command_line_names_its_own_option(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if what_is_missing(place) is None:
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    onnx.save(linear(), "model.onnx")
    np.savez("data.npz", **features(40))
    assert main(["train", "model.onnx", "out.onnx", "--data", "data.npz", "--place", place.kind]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"amp-transpile: --place {place.kind}: ")
    assert (
        err.endswith("Train on the processor instead: --place cpu\n")
        and "Executor" not in err
        and "CPUPlace" not in err
    )


def test_a_warning_on_the_command_line_is_one_plain_line(tmp_path: Path) -> None:
    """A parameter that the loss does not depend on: in a process of its own, as pytest catches warnings."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\n'
        "net (float[n, 4] x) => (float[n, 3] y, float[n, 3] z)"
        "{ y = Gemm (x, w, b)\n z = MatMul (x, v) }"
    )
    model.graph.initializer.extend(
        [*linear().graph.initializer, onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "v")]
    )
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **features(40))
    ran = subprocess.run(
        [sys.executable, "-m", "amp_transpiler.cli", "train", "model.onnx", "out.onnx", "--data", "data.npz"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in ran.stderr.splitlines() if "get no gradient" in line]
    assert len(lines) == 1 and lines[0].startswith("amp-transpile: warning: trainable parameters get no gradient")
    assert "'v'" in lines[0] and "--freeze" in lines[0] and ".py" not in ran.stderr and "warn" not in ran.stdout


def test_one_file_serves_calibration_and_training(tmp_path: Path) -> None:
    """float64 and uint8, labels [N, 1], arrays that the model does not know: read alike by both."""
    onnx.save(linear(), tmp_path / "model.onnx")
    x = np.random.default_rng(0).integers(0, 9, (40, 4))
    files = []
    for number, (kind, labels) in enumerate(((np.uint8, np.uint8), (np.float64, np.float64), (np.float32, np.int64))):
        path = tmp_path / f"{number}.npz"
        label = x[:, :3].argmax(1).astype(labels)
        np.savez(path, x=x.astype(kind), label=label[:, None] if number else label, names=np.array(["a", "b"]))
        out = tmp_path / f"out{number}.onnx"
        assert (
            main(["train", str(tmp_path / "model.onnx"), str(out), "--data", str(path), "--mode", "fp32", "--quiet"])
            == 0
        )
        assert main(["convert", str(out), str(tmp_path / "half.onnx"), "--calibration", str(path), "--quiet"]) == 0
        files.append(out.read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize(
    "flags, way",
    [
        (True, "(--black-list), or all of them (--mode fp32); else train with --place cpu"),
        (False, "(black_list), or all of them (mode=fp32); else train with place=cpu"),
    ],
)
def test_an_operator_without_a_kernel_leads_to_what_the_caller_can_write(
    flags: bool, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object, **more: object) -> None:
        raise amp.errors.PlaceError(
            "no CUDA kernel for Det 'y'", "Run it with Executor(place, allow_cpu_fallback=True)"
        )

    monkeypatch.setattr(amp.Executor, "run", refused)
    with pytest.raises(amp.errors.PlaceError, match="no CUDA kernel for Det") as found:
        amp.fit(linear(), tmp_path / "out.onnx", data=features(40), log=tmp_path / "log", flags=flags)
    assert str(found.value).endswith(way) and "Executor" not in str(found.value)
    assert not list(tmp_path.iterdir())


def test_type_checkers_know_every_option() -> None:
    assert get_type_hints(FitKeywords) == get_type_hints(FitOptions)
