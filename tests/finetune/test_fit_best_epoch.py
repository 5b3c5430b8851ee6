"""``amp.fit`` ends where the test data gives nothing better, and writes the best epoch."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.cli.main import main
from amp_transpiler.finetune import EpochRecord, FitOptions
from amp_transpiler.finetune.best_epoch import best_epoch, stops
from tests.helpers.fitting import features, linear

#: Few samples, whose labels are learned by heart: the test loss falls for six epochs, and rises.
OVERFITTING: dict[str, Any] = {"lr": 0.3, "mode": "fp32", "batch_size": 8, "optimizer": "sgd"}


def noisy(count: int, seed: int) -> dict[str, np.ndarray]:
    """Four labels of five are chance."""
    data, rng = features(count, seed=seed), np.random.default_rng(seed + 50)
    return {**data, "label": np.where(rng.uniform(size=count) < 0.2, data["label"], rng.integers(0, 3, count))}


def fitted(folder: Path, name: str, **options: Any) -> tuple[bytes, amp.FitResult, list[str]]:
    told: list[str] = []
    given = {"data": noisy(16, 1), "test": noisy(200, 2), **OVERFITTING, **options}
    result = amp.fit(linear(), folder / name, say=told.append, **given)
    return (folder / name).read_bytes(), result, told


def losses(result: amp.FitResult) -> list[float]:
    return [record.test_loss or math.nan for record in result.history if record.epoch]


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_the_best_epoch_is_written_and_the_training_ends(mode: str, tmp_path: Path) -> None:
    whole, every, _ = fitted(tmp_path, "whole.onnx", epochs=12, mode=mode)
    best = int(np.argmin(losses(every))) + 1
    assert 1 < best < 9, "the test means a training that gets worse"
    upto, _, _ = fitted(tmp_path, "upto.onnx", epochs=best, mode=mode)
    stopping = {"epochs": 12, "mode": mode, "patience": 3}
    last, ended, told = fitted(tmp_path, "last.onnx", **stopping)
    kept, restored, said = fitted(tmp_path, "kept.onnx", **stopping, restore_best_weights=True)
    assert losses(ended) == losses(restored) == losses(every)[: best + 3]
    assert ended.best_epoch == restored.best_epoch == best and every.best_epoch is None
    assert kept == upto and last != upto and whole != upto
    assert f"patience=3: ends after epoch {best + 3}, without a better test_loss than that of epoch {best}" in told
    assert f"epoch {best} is the best by test_loss: its weights are written" in said
    assert fitted(tmp_path, "whole2.onnx", epochs=12, mode=mode, restore_best_weights=True)[0] == upto


@pytest.mark.parametrize("stop_after", [2, 5, 6, 7, 8])
def test_a_training_that_is_gone_on_with_keeps_the_same_epoch(stop_after: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "patience": 3,
        "restore_best_weights": True,
        "mode": "pure",
        "optimizer": "adam",
        "lr": 0.05,
    }
    whole, result, _ = fitted(tmp_path, "whole.onnx", epochs=12, **options)
    state = tmp_path / "state"
    fitted(tmp_path, "part.onnx", epochs=stop_after, checkpoint=state, **options)
    part, resumed, _ = fitted(tmp_path, "part.onnx", epochs=12, checkpoint=state, **options)
    assert part == whole and resumed.history == result.history and resumed.best_epoch == result.best_epoch
    last = result.history[-1].epoch
    kept = sorted({result.best_epoch, last - 1, last})
    assert sorted(path.name for path in state.iterdir()) == [f"step_{epoch:08d}" for epoch in kept]
    again, _, told = fitted(tmp_path, "part.onnx", epochs=12, checkpoint=state, **options)
    assert again == whole and any("ends after epoch" in line for line in told), "nothing is left to do"


@pytest.mark.parametrize("shard", [False, True])
def test_several_ranks_write_the_same_epoch_and_go_on_from_it(shard: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"patience": 3, "restore_best_weights": True, "mode": "pure", "shard_optimizer": shard}
    options |= {"optimizer": "momentum", "check_every": 0}

    def ended(name: str, ranks: int = 2, **more: Any) -> bytes:
        state = tmp_path / name
        found = distributed.simulate(
            ranks, lambda: fitted(tmp_path, f"{name}.onnx", checkpoint=state, **options, **more)
        )
        assert all(file == found[0][0] and one.best_epoch == found[0][1].best_epoch for file, one, _ in found)
        return found[0][0]

    whole = ended("whole", epochs=12)
    last = max(int(path.name[-2:]) for path in (tmp_path / "whole").iterdir())
    assert last < 12
    ended("part", epochs=last - 1)
    assert ended("part", epochs=12) == whole
    assert ended("part", ranks=3, epochs=12) == whole, "there is nothing left to train"


def records(*values: float | None) -> list[EpochRecord]:
    return [EpochRecord(epoch, 1.0, test_loss=value, test_metric=value) for epoch, value in enumerate(values)]


@pytest.mark.parametrize(
    ("options", "values", "best", "ends"),
    [
        ({"patience": 2}, [0.1, 3.0, 2.0, 2.0, 1.9], 4, False),  # the model before training is none of them
        ({"patience": 2}, [9.0, 3.0, 2.0, 2.0, 2.0], 2, True),
        ({"patience": 2, "min_delta": 0.5}, [9.0, 3.0, 2.6, 2.55], 1, True),
        ({"patience": 2, "min_delta": 0.5}, [9.0, 3.0, 2.6, 2.4], 3, False),
        ({"patience": 2}, [9.0, math.nan, None], None, True),
        ({"patience": 3}, [9.0, math.nan, math.inf, 7.0, None], 3, False),
        ({"patience": 2, "monitor": "test_accuracy"}, [0.9, 0.3, 0.5, 0.4, 0.5], 2, True),
        ({"patience": 2, "monitor": "test_mae", "loss": "mse"}, [9.0, 0.3, 0.5, 0.4], 1, True),
        ({"restore_best_weights": True}, [9.0, 1.0, 2.0, 3.0, 4.0], 1, False),
        ({"patience": 1}, [], None, False),
    ],
)
def test_which_epoch_is_the_best(options: dict[str, Any], values: list[Any], best: int | None, ends: bool) -> None:
    history, chosen = records(*values), FitOptions(**options)
    assert best_epoch(history, chosen) == best and stops(history, chosen) == ends


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"patience": 0}, "patience is 0; expected a whole number, at least 1"),
        ({"patience": 2, "test": None}, "patience goes by test_loss: give test data"),
        ({"patience": 2, "monitor": "val_loss"}, "monitor is 'val_loss'; expected one of test_loss, test_accuracy"),
        ({"patience": 2, "monitor": "test_accuracy", "metric": "none"}, "expected one of test_loss$"),
        ({"monitor": "test_accuracy"}, "monitor=test_accuracy says which epoch is the best: give patience or restore"),
        ({"patience": 2, "min_delta": -1.0}, "min_delta is -1.0; expected a number from 0 on"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; expected a number from 0 to below 1"),
        ({"label_smoothing": 0.1, "loss": "kl_div"}, "label_smoothing goes with loss=cross_entropy"),
        ({"early_stopping_patience": 3}, "did you mean 'patience'"),
        ({"load_best_model_at_end": True}, "did you mean 'restore_best_weights'"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(amp.AmpError, match=told):
        fitted(tmp_path, "out.onnx", **change)
    assert not (tmp_path / "out.onnx").exists()


def test_a_checkpoint_whose_best_epoch_is_gone_or_was_tested_on_other_data_is_named(tmp_path: Path) -> None:
    state, other = tmp_path / "state", tmp_path / "other"
    _, result, _ = fitted(tmp_path, "a.onnx", epochs=9, checkpoint=state)
    assert int(np.argmin(losses(result))) + 1 < 8
    shutil.copytree(state, other)
    with pytest.raises(amp.errors.ArgumentError, match="restore_best_weights: epoch . is the best by test_loss so far"):
        fitted(tmp_path, "b.onnx", epochs=10, checkpoint=state, restore_best_weights=True)
    with pytest.raises(amp.errors.ArgumentError, match="with other test data, whose test_loss is not to be compared"):
        fitted(tmp_path, "b.onnx", epochs=10, checkpoint=other, patience=3, test=noisy(50, 3))
    with pytest.raises(amp.errors.ArgumentError, match="monitor=test_f1: the epochs of .* were measured by accuracy"):
        fitted(tmp_path, "b.onnx", epochs=10, checkpoint=other, patience=3, metric="f1", monitor="test_f1")
    assert not (tmp_path / "b.onnx").exists()
    assert fitted(tmp_path, "b.onnx", epochs=10, checkpoint=other, test=noisy(50, 3))[1].history[-1].epoch == 10


def test_what_depends_on_the_checkpoints_options_may_be_given_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    fitted(tmp_path, "a.onnx", epochs=1, checkpoint=state, patience=4)
    result = fitted(tmp_path, "a.onnx", epochs=2, checkpoint=state, monitor="test_accuracy")[1]
    assert (result.options.patience, result.options.monitor) == (4, "test_accuracy")
    numbers = {"x": features(16)["x"], "label": features(16)["x"][:, :3]}
    given: dict[str, Any] = {"data": numbers, "checkpoint": tmp_path / "numbers"}
    amp.fit(linear(), tmp_path / "n.onnx", loss="mse", **given)
    assert amp.fit(linear(), tmp_path / "n.onnx", epochs=2, metric="mse", **given).options.loss == "mse"


def test_labels_are_smoothed_in_training_and_test_loss(tmp_path: Path) -> None:
    """A step of SGD, beside the same in float64; a label of -100 does not count."""
    data, e, rate = features(40), 0.2, 0.5
    data["label"][::7] = -100
    given: dict[str, Any] = {"data": data, "test": data, "lr": rate, "mode": "fp32", "batch_size": 40}
    result = amp.fit(linear(), tmp_path / "a.onnx", optimizer="sgd", label_smoothing=e, **given)
    counted = data["label"] != -100
    x, label = data["x"][counted].astype(np.float64), data["label"][counted]
    w, b = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in linear().graph.initializer)
    target = np.eye(3)[label] * (1 - e) + e / 3
    for record in result.history:
        logits = x @ w + b
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        assert record.test_loss == pytest.approx(-(target * logs).sum(1).mean(), rel=1e-5)
        slope = (np.exp(logs) - target) / len(x)
        w, b = w - rate * x.T @ slope, b - rate * slope.sum(0)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(linear(), tmp_path / "in.onnx")
    np.savez(tmp_path / "train.npz", **noisy(16, 1))
    np.savez(tmp_path / "test.npz", **noisy(200, 2))
    files = [str(tmp_path / name) for name in ("in.onnx", "out.onnx", "train.npz", "test.npz")]
    options = ["--lr", "0.3", "--mode", "fp32", "--batch-size", "8", "--optimizer", "sgd", "--epochs", "30"]
    options += ["--label-smoothing", "0.1"]
    arguments = ["train", *files[:2], "--data", files[2], *options]
    best = ["--patience", "2", "--monitor", "test_accuracy", "--min-delta", "0.001", "--restore-best-weights"]
    assert main([*arguments, *best]) == 2
    assert "--patience goes by test_accuracy: give --test data" in capsys.readouterr().err
    assert main([*arguments, "--test", files[3], *best, "--log", str(tmp_path / "log")]) == 0
    told = capsys.readouterr().out
    assert "--patience 2: ends after epoch" in told and "is the best by test_accuracy: its weights are written" in told
    rows = (tmp_path / "log" / "epochs.csv").read_text().splitlines()
    assert "test_accuracy" in rows[0] and len(rows) < 30
    wrong = ["--monitor", "eval_loss", "--patience", "2", "--test", files[3]]
    assert main([*arguments, *wrong]) == 2
    assert "--monitor is 'eval_loss'; expected one of test_loss, test_accuracy" in capsys.readouterr().err
