"""``amp.fit`` and ``amp-transpile train``: arguments, data, batches, metrics, logs, faults, resuming."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main
from amp_transpiler.finetune.data import Samples, batch_sizes
from amp_transpiler.finetune.metrics import Metric
from amp_transpiler.runtime.session import cuda_missing
from tests.helpers.exported import exported, loss_and_accuracy, samples, scores

FAST: dict[str, Any] = {"lr": 0.01, "mode": "fp32", "batch_size": 16}


def linear(outputs: int = 3, batch: str = "n") -> onnx.ModelProto:
    """A linear model of four features."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]>\n'
        f"net (float[{batch}, 4] x) => (float[{batch}, {outputs}] y) {{ y = Gemm (x, w, b) }}"
    )
    rng = np.random.default_rng(5)
    for name, shape in (("w", (4, outputs)), ("b", (outputs,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


def features(count: int, outputs: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return {"x": x, "label": x[:, :outputs].argmax(1)}


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
def test_f6_an_output_that_is_read_is_refused(
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
        ("--checkpoint data.npz", "--checkpoint 'data.npz' is a file"),
        ("--log data.npz", "--log 'data.npz' is a file"),
        ("--checkpoint no/where", "there is no folder"),
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
        ({"epoch": 3}, "no option 'epoch'; did you mean epochs"),
        ({"epochs": 1.5}, "epochs is 1.5; expected a whole number"),
        ({"lr": "0.1"}, "lr is '0.1'; expected a number"),
        ({"freeze": "w"}, "freeze is 'w'; expected a list"),
        ({"mode": "fp16"}, "mode is 'fp16'; expected one of fp32, mixed, pure-fp16"),
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
        ("empty", "holds no samples"),
    ],
)
@pytest.mark.parametrize("where", ["data", "test"])
def test_data_that_does_not_fit_is_named_with_its_place(where: str, what: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(amp.errors.FeedError, match=re.escape(told)):
        amp.fit(linear(), tmp_path / "out.onnx", **{"data": features(40), where: spoiled(what)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags, way", [(True, "--loss mse"), (True, "--loss bce_with_logits"), (False, "loss=mse")])
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


def test_without_a_gpu_the_command_line_names_its_own_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if cuda_missing(0) is None:
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    onnx.save(linear(), "model.onnx")
    np.savez("data.npz", **features(40))
    assert main(["train", "model.onnx", "out.onnx", "--data", "data.npz", "--place", "cuda"]) == 1
    err = capsys.readouterr().err
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


# -- batches -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "count, batch, accumulate",
    [
        (100, 32, 1),
        (96, 32, 1),
        (5, 32, 1),
        (100, 8, 3),
        (97, 8, 4),
        (7, 2, 3),
        (13, 2, 3),
        (6, 2, 3),
        (25, 2, 3),
        (3, 8, 3),
    ],
)
def test_f12_every_sample_is_in_one_batch_and_every_window_is_complete(count: int, batch: int, accumulate: int) -> None:
    sizes = batch_sizes(count, batch, accumulate)
    assert sum(sizes) == count and min(sizes) > 0 and len(sizes) % accumulate == 0
    assert max(sizes) <= batch + 1
    whole = batch_sizes(count, batch, accumulate, whole=True)
    assert set(whole) <= {batch} and len(whole) == count // (batch * accumulate) * accumulate


def test_f12_the_short_last_batch_counts_in_training_and_test(tmp_path: Path) -> None:
    """One step of plain SGD on 7 samples in batches of 4: against the gradient by hand."""
    data = features(7)
    rng = np.random.default_rng([0, 1])
    result = amp.fit(
        linear(), tmp_path / "out.onnx", data=data, test=data, mode="fp32", optimizer="sgd", lr=0.5, batch_size=4
    )
    w, b = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in linear().graph.initializer)
    order, losses = rng.permutation(7), []
    for rows in (order[:4], order[4:]):
        x, y = data["x"][rows].astype(np.float64), data["label"][rows]
        logits = x @ w + b
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        losses.append(-np.log(p[np.arange(len(y)), y]).mean())
        p[np.arange(len(y)), y] -= 1
        w, b = w - 0.5 * x.T @ p / len(y), b - 0.5 * p.mean(0)
    trained = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    np.testing.assert_allclose(trained["w"], w, rtol=1e-5)
    np.testing.assert_allclose(trained["b"], b, rtol=1e-5)
    epoch = result.history[-1]
    assert epoch.loss == pytest.approx((losses[0] * 4 + losses[1] * 3) / 7, rel=1e-5), "means are over samples"
    loss, accuracy = loss_and_accuracy(tmp_path / "out.onnx", data)
    assert epoch.test_loss == pytest.approx(loss, rel=1e-5) and epoch.test_metric == pytest.approx(accuracy)


@pytest.mark.parametrize("name", ["cnn_torchscript_batch1", "encoder_dynamo_batch1"])
def test_f12_a_fixed_batch_is_named_and_freed_on_request(name: str, tmp_path: Path) -> None:
    model, data = exported(name), samples(name, 37)
    told: list[str] = []
    amp.fit(model, tmp_path / "one.onnx", data=data, say=told.append, mode="fp32", lr=1e-3)
    assert any(
        "exported with a fixed batch of 1, and is trained in batches of 1; batch_size=32" in line for line in told
    )
    assert onnx.load(tmp_path / "one.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    onnx.save(exported(name), tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    amp.fit(tmp_path / "model.onnx", tmp_path / "many.onnx", data=data, say=told.append, **FAST)
    assert any("fixed batch of 1: freed of it" in line for line in told)
    free = exported(name.removesuffix("_batch1"))
    onnx.save(free, tmp_path / "free.onnx")
    amp.fit(free, tmp_path / "same.onnx", data=data, **FAST)
    np.testing.assert_allclose(
        scores(tmp_path / "many.onnx", data), scores(tmp_path / "same.onnx", data), rtol=1e-4, atol=1e-5
    )


def test_f12_a_batch_that_cannot_be_freed_is_an_error_that_says_why(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\nnet (float[2, 4] x) => (float[2, 3] y) '
        "{ c = Softmax <axis = 0> (x)\n y = MatMul (c, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    with pytest.raises(
        amp.errors.ArgumentError, match="fixed batch of 2, and cannot be freed of it: output 'y' of a larger"
    ):
        amp.fit(model, tmp_path / "out.onnx", data=features(40), batch_size=8)
    told: list[str] = []
    amp.fit(model, tmp_path / "out.onnx", data=features(41), test=features(7), say=told.append)
    assert any("1 of 41 samples do not fill the model's fixed batch of 2" in line for line in told)
    assert any("1 of 7 samples" in line for line in told)


# -- metrics -----------------------------------------------------------------------------------------------
def test_metrics_over_uneven_batches() -> None:
    rng = np.random.default_rng(3)
    logits, label = rng.normal(size=(50, 7)).astype(np.float32), rng.integers(0, 7, 50)
    label[4] = -100
    counted = label >= 0
    ranks = (-logits).argsort(1)[counted]
    right = label[counted]
    per_class = [
        2 * ((ranks[:, 0] == c) & (right == c)).sum() / ((ranks[:, 0] == c).sum() + (right == c).sum())
        for c in range(7)
    ]
    expected = {
        "accuracy": (ranks[:, 0] == right).mean(),
        "top5": (ranks[:, :5] == right[:, None]).any(1).mean(),
        "f1": np.mean(per_class),
    }
    for name, value in expected.items():
        metric = Metric(name, "cross_entropy")
        for rows in (slice(0, 30), slice(30, 50)):
            metric.update(logits[rows], label[rows])
        assert metric.value() == pytest.approx(value), name
    yes = (rng.random(50) > 0.5).astype(np.float32)
    scores = logits[:, 0]
    true = ((scores > 0) & (yes > 0)).sum()
    for name, value in {
        "f1": 2 * true / ((scores > 0).sum() + (yes > 0).sum()),
        "accuracy": ((scores > 0) == (yes > 0)).mean(),
        "mae": np.abs(1 / (1 + np.exp(-scores)) - yes).mean(),
    }.items():
        metric = Metric(name, "bce_with_logits")
        metric.update(scores, yes)
        assert metric.value() == pytest.approx(value, rel=1e-5), name
    metric = Metric("mse", "mse")
    metric.update(logits[:20], logits[:20] + 2)
    metric.update(logits[20:], logits[20:])
    assert metric.value() == pytest.approx(4 * 20 / 50, rel=1e-5)


def test_regression_tells_the_mean_absolute_error(tmp_path: Path) -> None:
    x = features(40)["x"]
    data = {"x": x, "label": (x @ np.array([[1], [2], [-1], [0.5]])).astype(np.float64)[:, 0]}
    lines: list[str] = []
    result = amp.fit(
        linear(1),
        tmp_path / "out.onnx",
        data=data,
        test=data,
        loss="mse",
        say=lines.append,
        epochs=30,
        lr=0.1,
        mode="fp32",
    )
    error = np.abs(scores(tmp_path / "out.onnx", data)[:, 0] - data["label"]).mean()
    assert result.preparation.trainable == ("w", "b"), "the bias of one output is a weight too"
    assert result.history[-1].test_metric == pytest.approx(error, rel=1e-4) and error < 0.5
    assert re.search(r"^epoch 30: loss [\d.]+, mae [\d.]+, test loss [\d.]+, test mae [\d.]+$", "\n".join(lines), re.M)


# -- what is written ---------------------------------------------------------------------------------------
def test_saves_what_is_asked_for_with_the_black_list(tmp_path: Path) -> None:
    data = samples("encoder_dynamo", 40)
    for mode, save in (("fp32", "pure-fp16"), ("pure-fp16", "fp32"), ("mixed", "mixed")):
        more = {"black_list": ["Softmax", "Gelu"]} if save != "fp32" else {}
        amp.fit(exported("encoder_dynamo"), tmp_path / "out.onnx", data=data, mode=mode, save=save, **more)
        precisions = {op.type: op.precision for op in amp.Program.from_onnx(tmp_path / "out.onnx").operators}
        assert precisions["MatMul"] == ("" if save == "fp32" else "float16")
        assert precisions["Softmax"] == precisions["Gelu"] == ("" if save == "fp32" else "float32")


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_f7_a_model_with_16_bit_inputs_and_outputs_trains(half: Any, tmp_path: Path) -> None:
    name = "float16" if half is np.float16 else "bfloat16"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]>\nnet ({name}[n, 4] x) => ({name}[n, 3] y) '
        "{ h = MatMul (x, w)\n y = Softmax (h) }"
    )
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(half)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    told: list[str] = []
    amp.fit(model, tmp_path / "out.onnx", data=features(64), epochs=8, say=told.append, **FAST)
    assert any("ends in Softmax" in line for line in told), "the loss looks through the output's cast"
    trained = onnx.load(tmp_path / "out.onnx")
    assert [t.data_type for t in trained.graph.initializer] == [onnx.TensorProto.FLOAT]
    assert trained.graph.input[0].type.tensor_type.elem_type == model.graph.input[0].type.tensor_type.elem_type
    assert trained.graph.output[0].type.tensor_type.elem_type == model.graph.output[0].type.tensor_type.elem_type


# -- faults ------------------------------------------------------------------------------------------------
def test_a_loss_that_is_not_finite_names_what_is_at_fault(tmp_path: Path) -> None:
    out, data = tmp_path / "out.onnx", features(160)
    far = data["x"] * np.where(np.arange(160) < 32, 1, 1e5)[:, None]  # behind the batch that is measured beforehand
    broken = linear()
    w = onnx.numpy_helper.to_array(broken.graph.initializer[0]).copy()
    w[2, 1] = np.nan
    broken.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(w, "w"))
    cases: list[tuple[onnx.ModelProto, dict[str, Any], str]] = [
        (broken, {}, "the model itself is at fault, not the training: its weight 'w' holds nan at index [2, 1]"),
        (broken, {"mode": "fp32"}, "the model itself is at fault"),
        (
            exploding(),
            {"mode": "fp32"},
            "the model as it was given is at fault, not the training: before the first step, in fp32",
        ),
        (linear(), {"mode": "fp32", "lr": 1e38, "optimizer": "sgd"}, "lower the learning rate (lr=1e+38)"),
        (
            linear(),
            {"mode": "mixed", "lr": 1e30, "optimizer": "sgd", "batch_size": 8},
            "lower the learning rate (lr=1e+30)",
        ),
        (linear(), {"mode": "pure-fp16", "data": {**data, "x": far}}, "because of float16"),
    ]
    for model, options, told in cases:
        with pytest.raises(amp.errors.NonFiniteError, match=re.escape(told)):
            amp.fit(model, out, **{"data": data, **options})
        assert not out.exists()


def exploding() -> onnx.ModelProto:
    """A model of finite weights whose output is not."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\nnet (float[n, 4] x) => (float[n, 3] y) '
        "{ h = MatMul (x, w)\n e = Exp (h)\n y = Mul (e, e) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((4, 3), 90, np.float32), "w"))
    return model


# -- log ---------------------------------------------------------------------------------------------------
def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_a_log_has_every_step_and_epoch(mode: str, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

    assert RecordWriter
    data = features(70)
    result = amp.fit(
        linear(), tmp_path / "out.onnx", data=data, test=data, epochs=2, log=tmp_path / "log", **{**FAST, "mode": mode}
    )
    steps, epochs = rows(tmp_path / "log" / "steps.csv"), rows(tmp_path / "log" / "epochs.csv")
    assert [int(row["step"]) for row in steps] == list(range(10)), "5 batches an epoch, the last one of 6"
    assert [int(row["epoch"]) for row in epochs] == [0, 1, 2]
    weights = np.array([16, 16, 16, 16, 6])
    losses = np.array([float(row["loss"]) for row in steps]).reshape(2, 5)
    np.testing.assert_allclose([float(row["loss"]) for row in epochs[1:]], losses @ weights / 70, rtol=1e-5)
    assert float(epochs[2]["test_accuracy"]) == result.history[2].test_metric
    found: set[str] = set()
    (events,) = (tmp_path / "log").glob("events.out.tfevents.*")
    content, at = events.read_bytes(), 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        found.update(value.tag for value in Event.FromString(content[at + 12 : at + 12 + size]).summary.value)
        at += size + 16
    assert {"train/loss", "train/grad_norm", "epoch/test_loss", "epoch/test_accuracy"} <= found


def test_without_tensorboardx_the_log_is_csv_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    told: list[str] = []
    amp.fit(linear(), tmp_path / "out.onnx", data=features(40), log=tmp_path / "log", say=told.append, **FAST)
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["epochs.csv", "steps.csv"]
    assert any("pip install" in line and "tensorboardX" in line for line in told)


# -- resuming ----------------------------------------------------------------------------------------------
def trained(folder: Path, name: str, **options: Any) -> tuple[bytes, amp.FitResult, list[str]]:
    told: list[str] = []
    data = samples("encoder_dynamo", 90)
    result = amp.fit(
        exported("encoder_dynamo"),
        folder / name,
        **{
            "data": data,
            "test": data,
            "say": told.append,
            "lr": 0.01,
            "batch_size": 16,
            "dropout": {"node_gelu": 0.1},
            **options,
        },
    )
    return (folder / name).read_bytes(), result, told


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "pure-fp16", "accumulate": 2, "schedule": "cosine", "warmup_steps": 3, "clip_norm": 1.0},
        {"mode": "mixed", "dtype": "bfloat16", "optimizer": "momentum"},
        {"mode": "fp32", "schedule": "linear"},
    ],
)
def test_a_training_that_was_broken_off_ends_where_a_whole_one_ends(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "epochs": 3, "log": tmp_path / "log"}
    whole, result, _ = trained(tmp_path, "whole.onnx", **{**options, "log": tmp_path / "whole"})
    batches, left = Samples.batches, iter(range(18))  # an epoch has 6 and its evaluation as many, one of them before

    def broken(self: Samples, sizes: list[int], rng: Any) -> Any:
        for batch in batches(self, sizes, rng):
            if next(left, None) is None:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(Samples, "batches", broken)
    with pytest.raises(KeyboardInterrupt, match="part.onnx was not written; the checkpoint of epoch 1 in .* stands"):
        trained(tmp_path, "part.onnx", checkpoint=tmp_path / "state", **options)
    monkeypatch.setattr(Samples, "batches", batches)
    assert not (tmp_path / "part.onnx").exists()
    part, resumed, told = trained(tmp_path, "part.onnx", checkpoint=tmp_path / "state", **options)
    assert "going on after epoch 1" in told[0]
    assert part == whole and resumed.history == result.history
    for name in ("steps.csv", "epochs.csv"):
        assert (tmp_path / "log" / name).read_text() == (tmp_path / "whole" / name).read_text(), (
            "nothing twice, nothing lost"
        )


def test_f12_what_is_given_wins_over_the_checkpoint_and_is_told(tmp_path: Path) -> None:
    state = {"checkpoint": tmp_path / "state", "mode": "mixed"}
    trained(tmp_path, "a.onnx", epochs=1, **state)
    copies = [tmp_path / f"state{number}" for number in range(3)]
    import shutil

    for copy in copies:
        shutil.copytree(tmp_path / "state", copy)
    same, _, told = trained(tmp_path, "b.onnx", **{**state, "checkpoint": copies[0]}, epochs=2)
    assert any("epochs=2 from now on, where the checkpoint has 1" in line for line in told)
    other, result, told = trained(tmp_path, "c.onnx", **{**state, "checkpoint": copies[1], "lr": 1e-7}, epochs=2)
    assert any("lr=1e-07 from now on, where the checkpoint has 0.01" in line for line in told)
    assert other != same
    before, after = (
        loss_and_accuracy(tmp_path / name, samples("encoder_dynamo", 90))[0] for name in ("a.onnx", "c.onnx")
    )
    assert after == pytest.approx(before, rel=1e-3), "a rate of 1e-7 moves next to nothing"
    left, result, _ = trained(tmp_path, "d.onnx", checkpoint=copies[2], epochs=2)
    assert left == same and result.options.mode == "mixed", "what is not given is the checkpoint's"


@pytest.mark.parametrize(
    "change, told",
    [
        ({"mode": "pure-fp16"}, "another training: mode=pure-fp16 (the checkpoint has mixed)"),
        ({"optimizer": "sgd", "dtype": "bfloat16"}, "dtype=bfloat16 (the checkpoint has float16), optimizer=sgd"),
        ({"data": samples("encoder_dynamo", 90, seed=7)}, "on other data than data: array 'tokens' differs"),
        ({"model": exported("encoder_dynamo", seed=9)}, "of another model"),
    ],
)
def test_f12_what_makes_it_another_training_is_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    given = {"model": exported("encoder_dynamo"), "data": samples("encoder_dynamo", 90)}
    amp.fit(output=tmp_path / "a.onnx", checkpoint=tmp_path / "state", mode="mixed", **given)  # type: ignore[arg-type]
    with pytest.raises(amp.errors.ArgumentError, match=re.escape(told)):
        amp.fit(output=tmp_path / "b.onnx", checkpoint=tmp_path / "state", epochs=2, **{**given, **change})  # type: ignore[arg-type]
    assert not (tmp_path / "b.onnx").exists()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    program = amp.Program.from_onnx(linear())
    scope = amp.Scope()
    amp.Executor(threads=1).run(program.startup, scope=scope)
    amp.save_checkpoint(tmp_path / "state", program, scope, step=4)
    with pytest.raises(amp.errors.CheckpointError, match="is not a checkpoint of amp.fit"):
        amp.fit(linear(), tmp_path / "out.onnx", data=features(40), checkpoint=tmp_path / "state")


def test_the_files_load_in_bare_onnxruntime(tmp_path: Path) -> None:
    amp.fit(linear(), tmp_path / "out.onnx", data=features(40), mode="pure-fp16")
    session = ort.InferenceSession(str(tmp_path / "out.onnx"), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]


def test_what_leaves_the_range_on_the_data_is_saved_in_fp32(tmp_path: Path) -> None:
    """Trained in fp32, where 10^6 between two layers is no matter; float16 would make infinity of it."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\nnet (float[n, 4] x) => (float[n, 3] y) '
        "{ h = MatMul (x, w)\n g = MatMul (h, v)\n y = Relu (g) }"
    )
    for name, array in (("w", np.full((4, 8), 100)), ("v", np.full((8, 3), 1e-4))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    for factor, precision in ((1, "float16"), (1e4, "float32")):
        data = features(40)
        data["x"] *= factor
        amp.fit(model, tmp_path / "out.onnx", data=data, mode="fp32", save="pure-fp16", lr=1e-6)
        products = [op for op in amp.Program.from_onnx(tmp_path / "out.onnx").operators if op.type == "MatMul"]
        assert products[0].precision == precision, products[0].reason


def test_f12_a_class_token_is_repeated_for_every_sample(tmp_path: Path) -> None:
    def model(batch: str, more: str) -> onnx.ModelProto:
        text = (
            f'<ir_version: 10, opset_import: ["" : 20]>\nnet (float[{batch}, 2, 2] x) => (float[{batch}, 3] y) {{ {more} '
            "h = MatMul (all, w)\n r = Tanh (h)\n axes = Constant <value_ints = [1]> ()\n y = ReduceMean <keepdims = 0> (r, axes) }"
        )
        built = onnx.parser.parse_model(text)
        rng = np.random.default_rng(4)
        for name, shape in (("token", (1, 1, 2)), ("w", (2, 3))):
            built.graph.initializer.append(
                onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
            )
        return built

    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2, 2)).astype(np.float32)
    data = {"x": x, "label": rng.integers(0, 3, 40)}
    amp.fit(model("1", "all = Concat <axis = 1> (token, x)"), tmp_path / "freed.onnx", data=data, **FAST)
    repeated = (
        "n = Shape <start = 0, end = 1> (x)\n rest = Constant <value_ints = [1, 2]> ()\n "
        "size = Concat <axis = 0> (n, rest)\n tokens = Expand (token, size)\n all = Concat <axis = 1> (tokens, x)"
    )
    amp.fit(model("n", repeated), tmp_path / "free.onnx", data=data, **FAST)
    first, second = (scores(tmp_path / name, data) for name in ("freed.onnx", "free.onnx"))
    np.testing.assert_allclose(first, second, rtol=1e-5)
    before = {t.name: onnx.numpy_helper.to_array(t) for t in model("1", "all = Identity (x)").graph.initializer}
    after = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "freed.onnx").graph.initializer}
    assert (before["token"] != after["token"]).all(), "the token is trained"


def test_what_leaves_the_range_on_the_data_trains_in_fp32(tmp_path: Path) -> None:
    data = features(160)
    data["x"] *= 1e5
    result = amp.fit(linear(), tmp_path / "out.onnx", data=data, mode="pure-fp16", lr=0.01, epochs=20)
    assert result.history[-1].metric > 0.7 and sum(epoch.skipped_steps or 0 for epoch in result.history) < 20


@pytest.mark.parametrize("mode", ["mixed", "pure-fp16"])
def test_f26_a_first_loss_that_is_large_loses_no_sample(mode: str, tmp_path: Path) -> None:
    """mse of a target that was not normalised: the scale is lowered before the first update, and every batch counts."""
    data = features(64)
    data["label"] = (300 * data["x"][:, :3] + 200).astype(np.float32)
    told: list[str] = []
    options: dict[str, Any] = {
        "data": data,
        "loss": "mse",
        "lr": 1e-3,
        "batch_size": 16,
        "optimizer": "adam",
        "say": told.append,
    }
    result = amp.fit(linear(), tmp_path / "a.onnx", mode=mode, **options)
    wanted = amp.fit(linear(), tmp_path / "b.onnx", mode="fp32", **options)
    assert result.history[-1].skipped_steps == 0
    (line,) = [line for line in told if "no sample is lost" in line]
    scale = float(re.search(r"loss_scale=(\S+) begins", line)[1])  # type: ignore[index]
    assert 1 <= scale < 32768 and result.history[-1].loss_scale == scale and "at the loss scale 32768," in line
    assert result.history[-1].loss == pytest.approx(wanted.history[-1].loss, rel=1e-2)
    told.clear()
    again = amp.fit(linear(), tmp_path / "c.onnx", mode=mode, loss_scale=scale, **options)
    assert not any("overflow" in line for line in told)
    assert again.history[-1].loss == pytest.approx(result.history[-1].loss, rel=1e-4), "bad steps change nothing"


def test_another_loss_scale_can_be_given_when_a_training_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": features(40), "checkpoint": tmp_path / "state", "batch_size": 16}
    amp.fit(linear(), tmp_path / "a.onnx", epochs=1, **options)
    result = amp.fit(linear(), tmp_path / "a.onnx", epochs=2, loss_scale=64, **options)
    assert [record.loss_scale for record in result.history] == [32768, 64]
