"""``amp.fit`` on several ranks, which are threads here: the training is that of one rank, whatever their number is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.errors import ArgumentError, DistributedError, FeedError
from amp_transpiler.finetune import checks
from amp_transpiler.finetune.loop import Loop
from amp_transpiler.finetune.options import FitOptions
from tests.helpers.fake_nccl import on_devices
from tests.helpers.fitting import FAST, features, linear, rows

Ran = tuple[bytes, amp.FitResult, list[str]]


def fitted(output: Path, model: onnx.ModelProto | None = None, data: Any = None, **options: Any) -> Callable[[], Ran]:
    """A training to be run by any number of ranks; its file, what it gave, and what this rank said."""

    def run() -> Ran:
        told: list[str] = []
        given = {**FAST, "data": features(45) if data is None else data, "test": features(21, seed=1), **options}
        result = amp.fit(linear() if model is None else model, output, say=told.append, **given)
        return output.read_bytes(), result, told

    return run


def weights(file: bytes) -> dict[str, np.ndarray]:
    return {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load_from_string(file).graph.initializer}


def history(result: amp.FitResult) -> np.ndarray:
    return np.array([[np.nan if v is None else v for v in one.plain().values()] for one in result.history], np.float64)


@pytest.mark.parametrize(
    "ranks, options",
    [  # batches of 16, 16 and 13 samples; in the last case 22, 22 and 1
        (4, {"mode": "fp32", "metric": "f1"}),
        (2, {"mode": "mixed", "accumulate": 2, "batch_size": 7, "clip_norm": 0.5, "allreduce_precision": "float32"}),
        (3, {"mode": "pure", "optimizer": "momentum", "schedule": "cosine", "batch_size": 22, "loss_scale": 1024}),
    ],
)
def test_ranks_learn_what_one_learns_and_report_over_all_samples(
    options: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    options = {**options, "epochs": 3}
    alone, result, said = fitted(tmp_path / "one.onnx", **options)()
    found = distributed.simulate(ranks, fitted(tmp_path / "many.onnx", **options))
    close = {"fp32": 1e-6, "mixed": 5e-3, "pure": 5e-3}[options["mode"]]
    for file, other, _ in found:
        assert file == found[0][0]
        np.testing.assert_array_equal(history(other), history(found[0][1]))
        np.testing.assert_allclose(history(other), history(result), rtol=10 * close, atol=close)
    for name, value in weights(alone).items():
        np.testing.assert_allclose(weights(found[0][0])[name], value, atol=10 * close)
    exchanged = [line for line in found[0][2] if line.startswith(f"a step of each of {ranks} ranks: sent ")]
    assert len(exchanged) == 1 and len(found[0][2]) == len(said) + 1 and not any(other[2] for other in found[1:]), (
        "rank 0 alone speaks"
    )


def normalised() -> onnx.ModelProto:
    """A product, a batch normalisation, an activation and a product."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> net (float[n, 4] x) => (float[n, 3] y)\n'
        "{ h = MatMul (x, v) k = BatchNormalization (h, s, b, m, d) r = Relu (k) y = MatMul (r, w) }"
    )
    rng = np.random.default_rng(5)
    values = {"v": rng.normal(size=(4, 6)), "w": rng.normal(size=(6, 3)), "s": np.ones(6), "b": np.zeros(6)}
    values |= {"m": np.zeros(6), "d": np.ones(6)}
    arrays = (onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items())
    model.graph.initializer.extend(arrays)
    return model


def test_norms_over_all_ranks_train_as_on_one(tmp_path: Path) -> None:
    """With batches of 16, 16 and 13 samples; with statistics of each rank's own they do not."""
    options: dict[str, Any] = {"model": normalised(), "epochs": 2, "batch_norm": "synchronized"}
    alone, result, _ = fitted(tmp_path / "one.onnx", **options)()
    for file, other, _ in distributed.simulate(3, fitted(tmp_path / "many.onnx", **options)):
        np.testing.assert_allclose(history(other), history(result), rtol=1e-4)
        for name, value in weights(alone).items():  # running statistics too
            np.testing.assert_allclose(weights(file)[name], value, atol=1e-5, err_msg=name)
    apart = distributed.simulate(3, fitted(tmp_path / "apart.onnx", **{**options, "batch_norm": "train"}))[0][0]
    assert any(np.abs(weights(apart)[name] - value).max() > 1e-2 for name, value in weights(alone).items())


def test_ranks_with_a_device_each_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And "cuda" is the device of each."""
    options: dict[str, Any] = {"mode": "mixed", "epochs": 2, "metric": "f1"}
    expected = distributed.simulate(2, fitted(tmp_path / "memory.onnx", **options))
    found = on_devices(2, lambda engine, _: fitted(tmp_path / "devices.onnx", place=engine.place, **options)())
    for (file, result, _), (_, other, _) in zip(found, expected, strict=True):
        assert file == found[0][0]
        np.testing.assert_allclose(history(result), history(other), rtol=5e-3, atol=5e-3)
    monkeypatch.setattr(checks, "what_is_missing", lambda _: None)
    chosen = FitOptions()
    places = on_devices(2, lambda engine, _: checks.chosen_place("cuda", chosen), place=amp.CUDAPlace(1))
    assert places == [amp.CUDAPlace(1)] * 2 and checks.chosen_place("cuda", chosen) == amp.CUDAPlace(0)


def test_optimizer_state_that_is_dealt_out_comes_to_the_same_file(tmp_path: Path) -> None:
    """Also where a training of two ranks, whose state was not, goes on on three."""

    def run(ranks: int, epochs: int, name: str, **options: Any) -> tuple[bytes, Any, bytes]:
        folder = tmp_path / name
        call = fitted(tmp_path / "out.onnx", mode="pure", loss_scale=1024, epochs=epochs, checkpoint=folder, **options)
        file, result, _ = distributed.simulate(ranks, call)[0]
        (state,) = amp.latest_checkpoint(folder).glob("*.safetensors")  # type: ignore[union-attr]
        return file, history(result).tobytes(), state.read_bytes()

    assert run(2, 1, "whole") == run(2, 1, "dealt out", shard_optimizer=True)
    assert run(3, 2, "whole") == run(3, 2, "dealt out")
    with pytest.raises(amp.errors.ArgumentTypeError, match="shard_optimizer is 1; expected True or False"):
        amp.fit(linear(), tmp_path / "out.onnx", data=features(9), shard_optimizer=1)


def test_labels_that_do_not_count_weigh_nothing(tmp_path: Path) -> None:
    """Shares of a batch with few labels that count, and with none: still the gradient and the loss of the batch."""
    data = features(12)
    data["label"] = np.where(np.arange(12) % 4 == 1, data["label"], -100)  # on two ranks: all on the second
    options: dict[str, Any] = {"data": data, "batch_size": 6, "optimizer": "sgd", "lr": 0.1, "epochs": 2}
    alone, result, _ = fitted(tmp_path / "one.onnx", **options)()
    for file, other, _ in distributed.simulate(2, fitted(tmp_path / "many.onnx", **options)):
        np.testing.assert_allclose(history(other), history(result), rtol=1e-5, equal_nan=True)
        np.testing.assert_allclose(weights(file)["w"], weights(alone)["w"], rtol=1e-5)


def test_a_fixed_batch_is_that_of_each_rank(tmp_path: Path) -> None:
    model = linear(batch="8")
    whole = fitted(tmp_path / "one.onnx", linear(batch="n"), batch_size=16, data=features(40), test=features(32))()
    options: dict[str, Any] = {"batch_size": None, "data": features(40), "test": features(32)}
    _, result, told = distributed.simulate(2, fitted(tmp_path / "many.onnx", model, **options))[0]
    assert any("each of the 2 ranks takes the batch of 8 that the model fixes: 16 samples to a step" in x for x in told)
    assert any("8 of 40 samples do not fill the model's fixed batch of 16" in line for line in told)
    assert result.history[0].test_loss == pytest.approx(whole[1].history[0].test_loss)


@pytest.mark.filterwarnings("ignore:program 'net' has the state")  # fit silences it; threads share what is silenced
def test_a_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """1, 2, 4, 1 ranks, an epoch each; and an unbroken one on two ranks, which a resumed one equals to the bit."""
    options: dict[str, Any] = {"mode": "mixed", "optimizer": "adamw", "log": tmp_path / "log"}
    whole = fitted(tmp_path / "whole.onnx", epochs=4, **{**options, "log": tmp_path / "whole"})()
    state = tmp_path / "state"
    for epochs, ranks in enumerate((1, 2, 4, 1), 1):
        run = fitted(tmp_path / "part.onnx", checkpoint=state, epochs=epochs, **options)
        found = run() if ranks == 1 else distributed.simulate(ranks, run)[0]
        assert epochs == 1 or "going on after epoch" in found[2][0]
    assert len(rows(tmp_path / "log" / "steps.csv")) == len(rows(tmp_path / "whole" / "steps.csv")) == 12
    assert [int(row["epoch"]) for row in rows(tmp_path / "log" / "epochs.csv")] == [0, 1, 2, 3, 4]
    assert found[1].history[-1].test_loss == pytest.approx(whole[1].history[-1].test_loss, rel=0.05)

    def leg(name: str, epochs: int) -> Callable[[], Ran]:
        more = {**options, "log": tmp_path / f"log_{name}", "checkpoint": tmp_path / name}
        return fitted(tmp_path / f"{name}.onnx", epochs=epochs, **more)

    unbroken = distributed.simulate(2, leg("unbroken", 3))[0]
    distributed.simulate(2, leg("broken", 1))
    resumed = distributed.simulate(2, leg("broken", 3))[0]
    assert resumed[0] == unbroken[0] and resumed[1].history == unbroken[1].history
    for name, key in (("steps.csv", "loss"), ("epochs.csv", "test_loss")):  # steps have times too
        logs = [rows(tmp_path / folder / name) for folder in ("log_broken", "log_unbroken")]
        assert [row[key] for row in logs[0]] == [row[key] for row in logs[1]] and len(logs[0]) > 3
    losses = [float(row["loss"]) for row in rows(tmp_path / "log_unbroken" / "steps.csv")[:3]]
    sizes = [16, 16, 13]
    assert np.dot(losses, sizes) / 45 == pytest.approx(unbroken[1].history[1].loss), "the losses of whole batches"


@pytest.mark.parametrize("every", [2, 0])
def test_state_that_differs_is_found_and_named(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of rank 1 is changed behind the second step: noticed by the step after, before anything is written."""
    step, steps = Loop._step, []

    def planted(self: Loop, share: Any) -> Any:
        found = step(self, share)
        if self.rank == 1 and self.steps == 2:
            self.scope.set_var("b", np.ones(3, np.float32))
        steps.append(self.steps)
        return found

    monkeypatch.setattr(Loop, "_step", planted)
    run = fitted(tmp_path / "out.onnx", epochs=2, check_every=every, checkpoint=tmp_path / "state")
    if not every:
        distributed.simulate(2, run)
        assert max(steps) == 6 and (tmp_path / "out.onnx").exists()
        return
    with pytest.raises(DistributedError, match=r"is 'b' on rank 1.*out.onnx was not written; there is no checkpoint"):
        distributed.simulate(2, run)
    assert max(steps) == 2 and not (tmp_path / "out.onnx").exists()


# -- what cannot be done ---------------------------------------------------------------------------------------------
def raised(ranks: int, run: Callable[[], Any]) -> list[BaseException]:
    """What each rank raises."""

    def caught() -> BaseException:
        with pytest.raises(BaseException) as error:
            run()
        return error.value

    return distributed.simulate(ranks, caught)


def test_a_batch_below_the_number_of_ranks_is_refused(tmp_path: Path) -> None:
    for error in raised(3, fitted(tmp_path / "out.onnx", batch_size=2)):
        assert isinstance(error, ArgumentError)
        assert "batch_size=2: a batch is that of all ranks together, and there are 3" in str(error)


def test_data_that_is_wrong_on_one_rank_ends_all_with_its_words(tmp_path: Path) -> None:
    def run() -> Any:
        data = features(45)
        if distributed.rank() == 1:
            data["x"][3, 2] = np.nan
        return fitted(tmp_path / "out.onnx", data=data)()

    first, second = raised(2, run)
    assert isinstance(second, FeedError) and isinstance(first, DistributedError) and first.ranks == (1,)
    assert "rank 1 failed where the others waited for it: FeedError: data: array 'x' holds nan" in str(first)


@pytest.mark.parametrize("what", ["data", "test data", "options", "model", "checkpoint"])
def test_another_training_on_one_rank_is_named(what: str, tmp_path: Path) -> None:
    def run() -> Any:
        other = distributed.rank() == 1
        if not other:
            return fitted(tmp_path / "out.onnx")()
        model = linear()
        if what == "model":
            model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
        more: dict[str, dict[str, Any]] = {
            "data": {"data": features(45, seed=9)},
            "test data": {"test": features(21, seed=9)},
            "options": {"lr": 0.02},
            "model": {},
            "checkpoint": {"checkpoint": tmp_path / "state"},
        }
        return fitted(tmp_path / "out.onnx", model, **more[what])()

    for error in raised(2, run):
        assert isinstance(error, DistributedError) and error.ranks == (1,)
        assert f"rank 1 found other {what} than rank 0" in str(error)
    assert not (tmp_path / "out.onnx").exists()
