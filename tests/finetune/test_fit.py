"""``amp.fit`` and ``amp-transpile train``: metrics, logs, what is saved, faults, and what leaves the range of 16 bit."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.finetune.log import Log
from amp_transpiler.finetune.metrics import shown
from tests.helpers.exported import exported, samples, scores
from tests.helpers.fitting import FAST, features, linear, rows
from tests.helpers.full_disk import full_disk


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
@pytest.mark.parametrize("mode, save", [("fp32", "pure"), ("pure", "fp32"), ("mixed", "mixed")])
def test_saves_what_is_asked_for_with_the_black_list(mode: str, save: str, tmp_path: Path) -> None:
    data = samples("encoder_dynamo", 40)
    more = {"black_list": ["Softmax", "Gelu"]} if save != "fp32" else {}
    amp.fit(exported("encoder_dynamo"), tmp_path / "out.onnx", data=data, mode=mode, save=save, **more)
    precisions = {op.type: op.precision for op in amp.Program.from_onnx(tmp_path / "out.onnx").operators}
    assert precisions["MatMul"] == ("" if save == "fp32" else "float16")
    assert precisions["Softmax"] == precisions["Gelu"] == ("" if save == "fp32" else "float32")


@pytest.mark.parametrize("save", ["fp32", "pure"])
def test_what_is_saved_has_operators_of_onnx_alone(save: str, tmp_path: Path) -> None:
    """Also where training has one of onnxruntime, as of an RMS norm."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> net (float[batch, 4] x) => (float[batch, 3] y) '
        "<float[4] g = {1, 2, 1, 0.5}, int64[1] last = {-1}, float eps = {1e-3}> "
        "{ s = Mul(x, x)  m = ReduceMean(s, last)  e = Add(m, eps)  r = Sqrt(e)  n = Div(x, r)  h = Mul(n, g)  y = MatMul(h, w) }"
    )
    weights = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    told: list[str] = []
    amp.fit(model, tmp_path / "out.onnx", data=features(40), save=save, say=told.append, **FAST)
    assert any("RMS norms" in line for line in told)
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"), full_check=True)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_a_model_with_16_bit_inputs_and_outputs_trains(half: Any, tmp_path: Path) -> None:
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
        (linear(), {"mode": "pure", "data": {**data, "x": far}}, "because of float16"),
        (at_a_pole(), {"mode": "fp32"}, f"{POLE} 'LogGrad -> p@GRAD'"),
        (
            at_a_pole(),
            {"mode": "mixed"},
            f"{POLE} 'LogGrad -> p@GRAD'",
        ),  # every step was skipped, and the model written
        (at_a_pole(), {"mode": "pure"}, f"{POLE} 'LogGrad -> p@GRAD'"),
    ]
    for model, options, told in cases:
        with pytest.raises(amp.errors.NonFiniteError, match=re.escape(told)):
            amp.fit(model, out, **{"data": data, **options})
        assert not out.exists()


POLE = "the gradients are not finite with the weights as they were given, though the loss is: backward operator"


def at_a_pole() -> onnx.ModelProto:
    """A model with logarithms of 0, where their slope is infinite, and the exponentials of those."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\nnet (float[n, 4] x) => (float[n, 3] y) '
        "{ h = MatMul (x, w)\n r = Relu (h)\n p = Mul (r, h)\n l = Log (p)\n y = Exp (l) }"
    )
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return model


def exploding() -> onnx.ModelProto:
    """A model of finite weights whose output is not."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\nnet (float[n, 4] x) => (float[n, 3] y) '
        "{ h = MatMul (x, w)\n e = Exp (h)\n y = Mul (e, e) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((4, 3), 90, np.float32), "w"))
    return model


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


@pytest.mark.parametrize("board", [True, False])
def test_a_training_goes_on_where_its_log_does_not_fit(
    board: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not board:
        monkeypatch.setitem(sys.modules, "tensorboardX", None)
    told: list[str] = []
    with full_disk(700):
        amp.fit(linear(), tmp_path / "o.onnx", data=features(200), log=tmp_path / "log", say=told.append, **FAST)
    onnx.checker.check_model(tmp_path / "o.onnx")
    (said,) = (line for line in told if "the log ends before the training" in line)
    assert said.endswith("cannot be written: File too large") and f"{tmp_path}/log" in said


def test_a_log_ends_where_its_folder_cannot_be_made(tmp_path: Path) -> None:
    told: list[str] = []
    with Log(tmp_path / "gone" / "log", "accuracy", 0, 0, told.append) as log:
        log.step(None)  # type: ignore[arg-type]
        log.step(None)  # type: ignore[arg-type]
    (said,) = told
    assert said.startswith("the log ends before") and said.endswith(
        "gone/log' cannot be made: No such file or directory"
    )


@pytest.mark.parametrize("name", ["steps.csv", "epochs.csv"])
@pytest.mark.parametrize("content", [b"\xff\xfee\0", b'"' + b"a" * 200_000 + b'"\n'], ids=["utf-16", "long"])
def test_a_training_goes_on_where_its_log_is_no_csv_file(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / name).write_bytes(content)
    told: list[str] = []
    amp.fit(linear(), tmp_path / "o.onnx", data=features(40), log=tmp_path / "log", say=told.append, **FAST)
    (said,) = (line for line in told if "the log ends before the training" in line)
    assert f"{name}' cannot be gone on with: " in said and (tmp_path / "log" / name).read_bytes() == content


def test_without_tensorboardx_the_log_is_csv_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    told: list[str] = []
    amp.fit(linear(), tmp_path / "out.onnx", data=features(40), log=tmp_path / "log", say=told.append, **FAST)
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["epochs.csv", "steps.csv"]
    assert any("pip install" in line and "tensorboardX" in line for line in told)


def test_the_files_load_in_bare_onnxruntime(tmp_path: Path) -> None:
    amp.fit(linear(), tmp_path / "out.onnx", data=features(40), mode="pure")
    session = ort.InferenceSession(str(tmp_path / "out.onnx"), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]


@pytest.mark.parametrize("factor, precision", [(1, "float16"), (1e4, "float32")])
def test_what_leaves_the_range_on_the_data_is_saved_in_fp32(factor: float, precision: str, tmp_path: Path) -> None:
    """Trained in fp32, where 10^6 between two layers is no matter; float16 would make infinity of it."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\nnet (float[n, 4] x) => (float[n, 3] y) '
        "{ h = MatMul (x, w)\n g = MatMul (h, v)\n y = Relu (g) }"
    )
    for name, array in (("w", np.full((4, 8), 100)), ("v", np.full((8, 3), 1e-4))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    data = features(40)
    data["x"] *= factor
    amp.fit(model, tmp_path / "out.onnx", data=data, mode="fp32", save="pure", lr=1e-6)
    products = [op for op in amp.Program.from_onnx(tmp_path / "out.onnx").operators if op.type == "MatMul"]
    assert products[0].precision == precision, products[0].reason


def test_what_leaves_the_range_on_the_data_trains_in_fp32(tmp_path: Path) -> None:
    data = features(160)
    data["x"] *= 1e5
    result = amp.fit(linear(), tmp_path / "out.onnx", data=data, mode="pure", lr=0.01, epochs=20)
    assert result.history[-1].metric > 0.7 and sum(epoch.skipped_steps or 0 for epoch in result.history) < 20


@pytest.mark.parametrize("mode", ["mixed", "pure"])
def test_a_first_loss_that_is_large_loses_no_sample(mode: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("mode", ["mixed", "pure"])
def test_labels_beyond_float16_are_learned_and_served(mode: str, tmp_path: Path) -> None:
    """Prices: the prediction ends up beyond 65504, and gradients of such errors leave float16 at a loss scale of 1."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> net (float[n, 4] x) => (float[n, 1] y) '
        "<float[4, 2] v = {1, 0, -1, 0.5, 0, 1, 0.5, 1}, float[2] c = {0.5, -0.5}, float[2, 1] w = {1, -1}, "
        "float[1] b = {0}> { h = Gemm(x, v, c)  t = Tanh(h)  z = MatMul(t, w)  y = Add(z, b) }"
    )
    data = features(64)
    data["label"] = (2e5 + 3e4 * data["x"][:, 0]).astype(np.float32)
    told: list[str] = []
    options: dict[str, Any] = {
        "data": data,
        "loss": "mse",
        "optimizer": "sgd",
        "lr": 0.2,
        "batch_size": 32,
        "epochs": 60,
    }
    wanted = amp.fit(model, tmp_path / "fp32.onnx", mode="fp32", **options)
    result = amp.fit(model, tmp_path / "out.onnx", mode=mode, say=told.append, **options)
    assert "labels reach 2.545e+05, beyond float16: what makes 'y' stays fp32" in told
    assert result.history[-1].loss == pytest.approx(wanted.history[-1].loss, rel=0.1)
    assert np.abs(scores(tmp_path / "out.onnx", data)[:, 0] - data["label"]).mean() < 3e4


def test_losses_are_told_with_their_digits() -> None:
    told = [shown("loss", value) for value in (0.0, 3.2174e-6, 0.00058, 0.034712, 21.5, 1.537e5)]
    assert told == ["0.0000", "3.217e-06", "0.00058", "0.0347", "21.5000", "1.537e+05"]
