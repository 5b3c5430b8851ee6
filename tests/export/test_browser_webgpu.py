"""WebGPU in headless Chromium, with real 16-bit arithmetic, computed by Mesa on the processor: ``make test-runners``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import amp_transpiler as amp
from tests.helpers.browser import (
    MISSING,
    WEBGPU,
    in_browser,
    served,
    software_webgpu,
    there,
    until_right,
    without_server,
)
from tests.helpers.page_folders import make_folders
from tests.helpers.runners import OVERFLOW, PYTHON, RUNNERS, Digits, losses, moved, trained, webgpu

pytestmark = [pytest.mark.skipif(not there(), reason=MISSING), pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module", autouse=True)
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    found = software_webgpu(tmp_path_factory.mktemp("chromium"))
    if isinstance(found, str):
        pytest.skip(found)
    with mock.patch.dict(os.environ, found):
        yield


def test_a_run_passes_through_a_browser_on_webgpu(tmp_path: Path) -> None:
    """Two convolutions in pure float16: executor on CPU, WebGPU, executor. The overflow is in the middle part."""
    steps, batch = 63, 4
    step = Digits.made(tmp_path, steps, batch)
    found, scope = moved(step, webgpu(), tmp_path)
    scales = {v.name for v in step.main.variables if v.persistable and "loss_scaling" in v.name}
    assert step.bad == [OVERFLOW] and scales
    assert all(scope.find_var(name) == step.end.find_var(name) for name in scales)
    off = np.abs(found - step.losses) / np.maximum(1, step.losses)
    assert off[: steps // 3 + 3].max() < 2**-8 and off.max() < 0.1
    assert not np.array_equal(found, step.losses)  # it did compute elsewhere


def test_a_portable_step_goes_on_on_webgpu(tmp_path: Path) -> None:
    """Batches of 64, six steps in bare Python, and from there six more on the device, with the same folder."""
    step = Digits.made(tmp_path, 12, 64, portable=True)
    bare = [PYTHON or sys.executable, str(RUNNERS / "bare.py")]
    trained(bare, step.folder, step.data, 6, tmp_path / "half")
    expected = losses(trained(bare, step.folder, step.data, 6, tmp_path / "end", tmp_path / "half"), step.loss)
    found = losses(trained(webgpu(), step.folder, step.data, 6, tmp_path / "there", tmp_path / "half"), step.loss)
    assert np.allclose(found, expected, rtol=2**-8) and expected[-1] < step.losses[0] / 2
    assert amp.load_checkpoint(tmp_path / "there", step.main, amp.Scope()).step == 12


def test_the_page_trains_on_webgpu(tmp_path: Path) -> None:
    make_folders(tmp_path / "steps")
    with served({"/browser/steps/": tmp_path / "steps"}) as base:
        _, _, about = in_browser(tmp_path, until_right(f"{base}/browser/?provider=webgpu", 50), WEBGPU)
    assert "WebGPU" in about and "lowered for webgpu" in about


def test_the_page_goes_to_webgpu_without_its_server(tmp_path: Path) -> None:
    """It was open in wasm alone."""
    make_folders(tmp_path / "steps")
    (_, about) = without_server(tmp_path / "steps", tmp_path, ["?task=pictures&provider=webgpu"], WEBGPU)
    assert "lowered for webgpu" in about
