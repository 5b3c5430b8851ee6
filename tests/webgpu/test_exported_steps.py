"""An exported step for WebGPU trains on the device under bare onnxruntime, and its state goes on elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import amp_transpiler as amp
from tests.helpers.checkpoints import BAD, HALF, STEPS, Small, build
from tests.helpers.compiled_runners import cpp
from tests.helpers.runners import bare, batches, losses, node, trained
from tests.helpers.webgpu_sessions import built_in

pytestmark = [
    pytest.mark.webgpu,
    pytest.mark.skipif(not built_in(), reason="the runners register no plugin"),
]
#: A device may give a number for NaN in a step that is bad.
GOOD = [step for step in range(STEPS) if step not in BAD]


def exported(home: Path) -> tuple[Small, amp.Scope, Path, Path]:
    """A folder for CPU and the device, and batches."""
    net = build()
    scope = net.start()
    folder = net.main.export_training(home / "step", [amp.CPUPlace(), amp.WebGPUPlace(0)], scope=scope)
    return net, scope, folder, batches(home / "data.safetensors", [net.feed(s) for s in range(STEPS)])


def test_a_step_trains_on_the_device_and_its_state_goes_on_on_cpu(tmp_path: Path) -> None:
    """Beside the CPU lowering, within what fp16 says; steps that overflow are the same."""
    net, scope, folder, data = exported(tmp_path)
    found = bare(folder, data, HALF, tmp_path / "half", place="webgpu")
    told = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["loss_scale"]["found_inf"]
    assert [number for number, step in enumerate(found) if step[told]] == [number for number in BAD if number < HALF]

    moved = amp.Scope()
    loaded = amp.load_checkpoint(tmp_path / "half", net.main, moved)
    assert loaded.exact and loaded.step == HALF
    first = np.frombuffer(b"".join(net.train(scope, 0, STEPS)), np.float32)
    rest = np.frombuffer(b"".join(net.train(moved, HALF, STEPS)), np.float32)
    together = np.concatenate([losses(found, net.loss.name), rest])
    assert np.allclose(together[GOOD], first[GOOD], rtol=2e-3)


@pytest.mark.parametrize("runner", ["Node", "C++"])
def test_runners_in_other_languages_train_on_the_device(runner: str, tmp_path: Path) -> None:
    command = node() if runner == "Node" else cpp(tmp_path)
    if not command:
        pytest.skip("no node with packages of npm, or no compiler and headers for C++: make test-runners brings them")
    net, _, folder, data = exported(tmp_path)
    named = ["--provider", "webgpu"] if runner == "Node" else [folder, "webgpu"]
    found = losses(trained(command, folder, data, STEPS, tmp_path / "end", *named), net.loss.name)
    expected = losses(bare(folder, data, STEPS, tmp_path / "other", place="webgpu"), net.loss.name)
    assert np.allclose(found[GOOD], expected[GOOD], rtol=1e-3)
    assert amp.load_checkpoint(tmp_path / "end", net.main, amp.Scope()).step == STEPS
