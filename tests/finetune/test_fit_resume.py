"""``amp.fit`` goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.errors import CheckpointError
from amp_transpiler.finetune.data import Samples
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.finetune.training_run import Run
from tests.helpers.exported import exported, loss_and_accuracy, samples
from tests.helpers.fitting import features, linear, trained
from tests.helpers.forgeries import sign


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "pure", "accumulate": 2, "schedule": "cosine", "warmup_steps": 3, "clip_norm": 1.0},
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

    def broken(self: Samples, *arguments: Any) -> Any:
        for batch in batches(self, *arguments):
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


def test_what_is_given_wins_over_the_checkpoint_and_is_told(tmp_path: Path) -> None:
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a training in mixed precision."""
    folder = tmp_path_factory.mktemp("trained")
    data = samples("encoder_dynamo", 90)
    amp.fit(exported("encoder_dynamo"), folder / "a.onnx", data=data, checkpoint=folder / "state", mode="mixed")
    return folder / "state"


@pytest.mark.parametrize(
    "change, told",
    [
        ({"mode": "pure"}, "another training: mode=pure (the checkpoint has mixed)"),
        ({"optimizer": "sgd", "dtype": "bfloat16"}, "dtype=bfloat16 (the checkpoint has float16), optimizer=sgd"),
        ({"keep_tied": ["*bias"]}, "keep_tied=['*bias'] (the checkpoint has [])"),
        ({"data": samples("encoder_dynamo", 90, seed=7)}, "on other data than data: array 'tokens' differs"),
        ({"model": exported("encoder_dynamo", seed=9)}, "of another model"),
    ],
)
def test_what_makes_it_another_training_is_named(
    change: dict[str, Any], told: str, checkpoint: Path, tmp_path: Path
) -> None:
    given = {"model": exported("encoder_dynamo"), "data": samples("encoder_dynamo", 90)}
    with pytest.raises(amp.errors.ArgumentError, match=re.escape(told)):
        amp.fit(  # type: ignore[arg-type]
            output=tmp_path / "b.onnx",
            checkpoint=checkpoint,
            log=tmp_path / "log",
            epochs=2,
            **{**given, **change},
        )
    assert not (tmp_path / "b.onnx").exists() and not (tmp_path / "log").exists()


def test_a_checkpoint_with_the_words_of_an_earlier_version_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "model": exported("encoder_dynamo"),
        "data": samples("encoder_dynamo", 90),
        "checkpoint": tmp_path / "state",
    }
    plain = FitOptions.plain

    def earlier(self: FitOptions) -> dict[str, Any]:
        known = {name: value for name, value in plain(self).items() if name != "keep_tied"}
        return known | {"mode": "pure-fp16", "dtype": "fp16"}

    monkeypatch.setattr(FitOptions, "plain", earlier)
    amp.fit(output=tmp_path / "a.onnx", mode="pure", **given)  # type: ignore[arg-type]
    monkeypatch.setattr(FitOptions, "plain", plain)
    for number, word in enumerate(("pure", "pure-fp16", None), 2):
        mode: dict[str, Any] = {} if word is None else {"mode": word, "keep_tied": []}
        result = amp.fit(output=tmp_path / "b.onnx", epochs=number, **mode, **given)  # type: ignore[arg-type]
        assert (result.options.mode, result.options.dtype, len(result.history)) == ("pure", "float16", number)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    program = amp.Program.from_onnx(linear())
    scope = amp.Scope()
    amp.Executor(threads=1).run(program.startup, scope=scope)
    amp.save_checkpoint(tmp_path / "state", program, scope, step=4)
    with pytest.raises(amp.errors.CheckpointError, match="is not a checkpoint of amp.fit"):
        amp.fit(linear(), tmp_path / "out.onnx", data=features(40), checkpoint=tmp_path / "state")


def test_another_loss_scale_can_be_given_when_a_training_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": features(40), "checkpoint": tmp_path / "state", "batch_size": 16}
    amp.fit(linear(), tmp_path / "a.onnx", epochs=1, **options)
    result = amp.fit(linear(), tmp_path / "a.onnx", epochs=2, loss_scale=64, **options)
    assert [record.loss_scale for record in result.history] == [32768, 64]


@pytest.mark.skipif(os.name != "posix", reason="folders have no locks there")
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", ["checkpoint", "log"])
def test_two_trainings_do_not_write_into_one_folder(
    name: str, made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one, which begins while the first trains or was checked before it began, ends and changes nothing."""
    given: dict[str, Any] = {"data": features(40), "epochs": 2, "say": lambda line: None, name: tmp_path / "folder"}
    if made:
        amp.fit(linear(), tmp_path / "before.onnx", **{**given, "epochs": 1})
    kind = amp.errors.CheckpointWriteError if name == "checkpoint" else amp.errors.ModelFileWriteError
    train, refused = Run.train, []

    def both(self: Run, *arguments: Any) -> Any:
        if not refused:
            refused.append(True)
            with pytest.raises(kind, match=f"^{name} '.*folder': another training that has not ended writes there"):
                amp.fit(linear(), tmp_path / "second.onnx", **given)
        return train(self, *arguments)

    monkeypatch.setattr(Run, "train", both)
    amp.fit(linear(), tmp_path / "first.onnx", **given)
    monkeypatch.undo()
    assert refused and (tmp_path / "first.onnx").exists() and not (tmp_path / "second.onnx").exists()
    amp.fit(linear(), tmp_path / "third.onnx", **given)


@pytest.mark.parametrize(
    "forged",
    [
        lambda said: said.update(options=[1]),
        lambda said: said.update(history=["epoch"]),
        lambda said: said["history"][0].update(test_loss="low"),
        lambda said: said["history"][0].update(epoch="x", loss="y"),
        lambda said: said["identity"].update(data=[1]),
        lambda said: said["identity"].update(data=[]),
        lambda said: said.update(identity=[1]),
        lambda said: said.update(steps=float("inf")),
    ],
)
def test_a_forged_record_of_a_training_is_none(forged: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    data, state = features(40), tmp_path / "state"
    amp.fit(linear(), tmp_path / "a.onnx", data=data, test=data, checkpoint=state)
    (folder,) = state.iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    forged(meta["extra"]["fit"])
    sign(folder, meta)
    with pytest.raises(CheckpointError, match="is not a checkpoint of amp.fit"):
        amp.fit(linear(), tmp_path / "b.onnx", data=data, test=data, checkpoint=state, epochs=2, patience=3)
