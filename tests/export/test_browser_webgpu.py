"""WebGPU in headless Chromium, with real 16-bit arithmetic, computed by Mesa on the processor: ``make test-runners``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.helpers.browser import MISSING, WEBGPU, in_browser, served, software_webgpu, there
from tests.helpers.page_folders import make_folders
from tests.helpers.runners import OVERFLOW, Digits, moved, webgpu

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
    found, scope = moved(step.on_webgpu(tmp_path), webgpu(), tmp_path)
    scales = {v.name for v in step.main.variables if v.persistable and "loss_scaling" in v.name}
    assert step.bad == [OVERFLOW] and scales
    assert all(scope.find_var(name) == step.end.find_var(name) for name in scales)
    off = np.abs(found - step.losses) / np.maximum(1, step.losses)
    assert off[: steps // 3 + 3].max() < 2**-8 and off.max() < 0.1
    assert not np.array_equal(found, step.losses)  # it did compute elsewhere


#: Trains until the page says that half is right, on WebGPU.
TRAIN = """
export default async ({{ open }}) => {{
  const page = await open();
  await page.goto("{address}?provider=webgpu");
  await page.waitForSelector("#start:enabled");
  await page.click("#start");
  const enough = () => Number.parseFloat(document.getElementById("n-accuracy").textContent) >= 50;
  await page.waitForFunction(enough, null, {{ timeout: 200_000 }});
  return page.textContent("#about");
}};
"""


def test_the_page_trains_on_webgpu(tmp_path: Path) -> None:
    make_folders(tmp_path / "steps")
    with served({"/browser/steps/": tmp_path / "steps"}) as base:
        about = in_browser(tmp_path, TRAIN.format(address=f"{base}/browser/"), WEBGPU)
    assert "WebGPU" in about and "lowered for webgpu" in about
