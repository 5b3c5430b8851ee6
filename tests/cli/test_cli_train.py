"""``amp-transpile train`` on a small model: what it writes, what it says, what it refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main
from amp_transpiler.cli.training_options import training_options
from amp_transpiler.errors import ArgumentError
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.nn import functional as F


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with model.onnx (its batch is free) and two files of data of which the label is easy to learn."""
    program, startup = amp.Program("net"), amp.Program("startup")
    startup.seed = 3
    with amp.program_guard(program, startup), amp.unique_name.guard():
        x = amp.data("x", [None, 6], "float32")
        h = amp.nn.batch_norm(amp.nn.fc(x, 16, act="relu", name="body"))
        program.outputs = [F.softmax(amp.nn.fc(h, 3, name="head"))]
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(startup, scope=scope)
    program.clone(for_test=True).to_onnx(tmp_path / "model.onnx", scope=scope)
    rng = np.random.default_rng(0)
    for name, count in (("train", 640), ("test", 200)):
        x = rng.normal(size=(count, 6)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, label=x[:, :3].argmax(1))
    return tmp_path


def accuracy(model: Path, data: Path) -> float:
    held = np.load(data)
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"x": held["x"]})
    return float((scores.argmax(1) == held["label"]).mean())


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_trains_in_every_mode(task: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = task / "tuned.onnx"
    before = accuracy(task / "model.onnx", task / "test.npz")
    assert (
        main(
            [
                "train",
                str(task / "model.onnx"),
                str(out),
                "--data",
                str(task / "train.npz"),
                "--test",
                str(task / "test.npz"),
                "--mode",
                mode,
                "--lr",
                "0.01",
                "--epochs",
                "6",
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "1 BatchNormalization train" in told and "ends in Softmax" in told and "epoch 6: loss" in told
    assert ("skipped steps 0" in told) == (mode != "fp32")
    model = onnx.load(out)
    onnx.checker.check_model(model, full_check=True)
    assert [i.name for i in model.graph.input] == ["x"], "neither the label nor the loss are left"
    halves = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16]
    assert bool(halves) == (mode != "fp32")
    assert before < 0.6 < 0.85 < accuracy(out, task / "test.npz")


def test_saves_fp32_after_pure_training_from_the_masters(task: Path) -> None:
    arguments = [
        "train",
        str(task / "model.onnx"),
        str(task / "out.onnx"),
        "--data",
        str(task / "train.npz"),
        "--mode",
        "pure",
        "--save",
        "fp32",
        "--quiet",
    ]
    assert main(arguments) == 0
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(task / "out.onnx").graph.initializer}
    head = weights["head.w_0"]
    assert head.dtype == np.float32 and (head != head.astype(np.float16)).any()


def test_frozen_parameters_stay(task: Path) -> None:
    arguments = [
        "train",
        str(task / "model.onnx"),
        str(task / "out.onnx"),
        "--data",
        str(task / "train.npz"),
        "--mode",
        "fp32",
        "--freeze",
        "body*",
        "--quiet",
        "--lr",
        "0.01",
        "--batch-norm",
        "train",
        "batch_norm_*=frozen",
    ]
    assert main(arguments) == 0
    before, after = (
        {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(task / name).graph.initializer}
        for name in ("model.onnx", "out.onnx")
    )
    for kept in ("body.w_0", "batch_norm_0.w_1", "batch_norm_0.w_2"):
        np.testing.assert_array_equal(before[kept], after[kept])
    assert (before["head.w_0"] != after["head.w_0"]).any()


@pytest.mark.parametrize("tied", [True, False])
def test_layers_that_share_a_vector_may_go_on_sharing_it(tied: bool, tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        net (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 0.5, -0.5, 1}, float[2, 2] v = {1, 0.5, 0.5, 1}, float[2] b = {0, 0}>
        { p = MatMul(x, w)  q = Add(p, b)  r = Relu(q)  s = MatMul(r, v)  y = Add(s, b) }""")
    onnx.save(model, tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(40, 2)).astype(np.float32), label=rng.integers(0, 2, 40))
    files = [str(tmp_path / name) for name in ("model.onnx", "out.onnx", "data.npz")]
    options = ["--keep-tied", "b", "--mode", "fp32", "--quiet"] if tied else ["--mode", "fp32", "--quiet"]
    assert main(["train", *files[:2], "--data", files[2], "--lr", "0.1", *options]) == 0
    graph = onnx.load(tmp_path / "out.onnx").graph
    vectors = [t for t in graph.initializer if list(t.dims) == [2]]
    assert len(vectors) == (1 if tied else 2) and all(onnx.numpy_helper.to_array(t).any() for t in vectors)


def test_goes_on_from_a_checkpoint_as_if_nothing_had_happened(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "train",
        str(task / "model.onnx"),
        "OUT",
        "--data",
        str(task / "train.npz"),
        "--mode",
        "pure",
        "--lr",
        "0.01",
        "--warmup-steps",
        "4",
        "--clip-norm",
        "1",
        "--accumulate",
        "2",
        "--optimizer",
        "adamw",
    ]
    arguments[2] = str(task / "whole.onnx")
    assert main([*arguments, "--epochs", "3", "--checkpoint", str(task / "a")]) == 0
    arguments[2] = str(task / "part.onnx")
    assert main([*arguments, "--epochs", "1", "--checkpoint", str(task / "b")]) == 0
    assert main([*arguments, "--epochs", "3", "--checkpoint", str(task / "b")]) == 0
    assert "going on after epoch 1" in capsys.readouterr().out
    assert (task / "part.onnx").read_bytes() == (task / "whole.onnx").read_bytes()


@pytest.mark.parametrize(
    "arguments, status, told",
    [
        (["--data", "missing.npz"], 2, "missing.npz"),
        (["--data", "test.npz", "--batch-size", "999"], 1, "200 samples, fewer than a batch of 999"),
        (["--data", "train.npz", "--label", "class"], 1, "no array 'class'.*x, label"),
        (["--data", "train.npz", "--trainable", "decoder*"], 2, "trainable: pattern 'decoder\\*' matches no parameter"),
        (["--data", "train.npz", "--output", "logits"], 2, "--output logits"),
        (["--data", "train.npz", "--dropout", "head"], 2, "--dropout takes NAME=NUMBER"),
        (["--data", "train.npz", "--loss", "mse"], 1, "'label' has the shape \\[640\\]"),
        (["--data", "train.npz", "--accumulate", "2", "--mode", "fp32"], 2, "--accumulate goes with"),
    ],
)
def test_what_it_refuses(
    task: Path, arguments: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    arguments = [str(task / a) if a.endswith(".npz") else a for a in arguments]
    assert main(["train", str(task / "model.onnx"), str(task / "out.onnx"), *arguments]) == status
    error = capsys.readouterr().err
    assert re.search(told, error), error
    assert not (task / "out.onnx").exists()


def test_an_interrupt_leaves_the_checkpoints(
    task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from amp_transpiler.finetune.data import Samples

    arguments = [
        "train",
        str(task / "model.onnx"),
        str(task / "out.onnx"),
        "--data",
        str(task / "train.npz"),
        "--epochs",
        "3",
        "--checkpoint",
        str(task / "ck"),
    ]
    whole = Samples.batches

    def stopped(self: Samples, *arguments: Any) -> object:
        for batch in whole(self, *arguments):
            if next(steps, None) is None:
                os.kill(os.getpid(), stop)
            yield batch

    monkeypatch.setattr(Samples, "batches", stopped)
    for case in (  # an epoch has 20 steps; the second goes on from the first
        (signal.SIGINT, 30, 130, "interrupted"),
        (signal.SIGTERM, 10, 143, "terminated"),
    ):
        stop, after, status, word = case
        steps = iter(range(after))
        assert main(arguments) == status
        told = capsys.readouterr().err
        assert f"amp-transpile: {word}; " in told
        assert "out.onnx was not written; the checkpoint of epoch 1 in" in told and "goes on from it" in told
        assert not (task / "out.onnx").exists() and [p.name for p in (task / "ck").iterdir()] == ["step_00000001"]


def test_a_cache_of_models_serves_the_next_training(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = task / "cache"
    arguments = ["--data", str(task / "train.npz"), "--epochs", "1", "--mode", "pure", "--quiet"]
    found = []
    for name, more in (("plain", []), ("first", ["--cache-dir", str(cache)]), ("second", ["--cache-dir", str(cache)])):
        out = task / f"{name}.onnx"
        assert main(["train", str(task / "model.onnx"), str(out), *arguments, *more]) == 0
        found.append((out.read_bytes(), {path.name: path.stat().st_mtime_ns for path in cache.glob("*")}))
    (plain, none), (first, made), (second, used) = found
    assert plain == first == second and not none
    assert made.keys() == used.keys() and any(used[name] > made[name] for name in made), "read, not made anew"
    capsys.readouterr()
    (task / "file").write_text("")
    wrong = ["--cache-dir", str(task / "file")]
    assert main(["train", str(task / "model.onnx"), str(task / "no.onnx"), *arguments, *wrong]) == 1
    assert "--cache-dir" in capsys.readouterr().err and not (task / "no.onnx").exists()


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (["frozen"], "frozen"),
        (["body.*=frozen"], {"body.*": "frozen"}),
        (["frozen", "re:a=b|c=train"], {"*": "frozen", "re:a=b|c": "train"}),
        (["eval"], r"--batch-norm is 'eval'; expected one of train, synchronized, frozen"),
        (["body.*=eval"], r"--batch-norm of 'body.\*' is 'eval'; expected one of train"),
        (["body.*="], r"--batch-norm of 'body.\*' is ''; expected one of train"),
    ],
)
def test_batch_norms_train_by_words_and_patterns(words: list[str], ways: str | dict[str, str]) -> None:
    if isinstance(ways, str) and ways.startswith("--"):
        with pytest.raises(ArgumentError, match=ways):
            FitOptions(flags=True, **training_options({"batch_norm": words}))
    else:
        assert FitOptions(flags=True, **training_options({"batch_norm": words})).plain()["batch_norm"] == ways
