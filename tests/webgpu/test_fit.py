"""What is made of a model file, trained on WebGPU: ``amp.fit``, ``amp-transpile train`` and the search for a culprit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main
from tests.helpers.fitting import features, linear

pytestmark = pytest.mark.webgpu


def _fitted(path: Path, place: str, **options: Any) -> tuple[dict[str, np.ndarray], list[float]]:
    result = amp.fit(linear(), path, data=features(64), place=place, epochs=3, batch_size=16, lr=0.05, **options)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    return weights, [epoch.loss for epoch in result.history]


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_fit_learns_what_it_learns_on_the_processor(mode: str, tmp_path: Path) -> None:
    found, losses = _fitted(tmp_path / "gpu.onnx", "webgpu", mode=mode)
    expected, host = _fitted(tmp_path / "cpu.onnx", "cpu", mode=mode)
    tolerance = 1e-5 if mode == "fp32" else 5e-3
    np.testing.assert_allclose(losses, host, rtol=tolerance)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].astype(np.float32), value.astype(np.float32), atol=4 * tolerance)
    assert losses[-1] < losses[0]


def test_the_command_line_trains_there_and_goes_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(linear(), "model.onnx")
    np.savez("data.npz", **features(64))
    common = ["--data", "data.npz", "--place", "webgpu", "--mode", "pure", "--checkpoint", "kept"]
    assert main(["train", "model.onnx", "half.onnx", "--epochs", "2", *common]) == 0
    assert main(["train", "model.onnx", "whole.onnx", "--epochs", "4", *common]) == 0
    out = capsys.readouterr().out
    assert "going on after epoch 2" in out
    unbroken = ["--data", "data.npz", "--place", "webgpu", "--mode", "pure", "--epochs", "4"]
    assert main(["train", "model.onnx", "unbroken.onnx", *unbroken]) == 0
    assert Path("whole.onnx").read_bytes() == Path("unbroken.onnx").read_bytes()


def test_a_culprit_is_found_there() -> None:
    main_program, startup = amp.Program(), amp.Program()
    with amp.program_guard(main_program, startup), amp.unique_name.guard():
        x = amp.data("x", [2, 4], "float32")
        hidden = amp.nn.fc(x, 4)
        loss = amp.nn.functional.mean(hidden * hidden)
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(loss, startup)
    scope, exe = amp.Scope(), amp.Executor(amp.WebGPUPlace(0))
    exe.run(startup, scope=scope)
    optimizer.amp_init(exe.place, scope)
    feed = {"x": np.full((2, 4), 6e4, np.float32)}
    exe.run(main_program, feed, [loss], scope=scope)
    host = amp.Executor(amp.CPUPlace())
    found = [amp.find_culprit(main_program, feed, scope=scope, executor=each) for each in (exe, host)]
    told = [(each.kind, each.operator, each.variable, each.inputs != ()) for each in found if each is not None]
    assert len(told) == 2 and told[0] == told[1] and told[0][0] == "operator"
