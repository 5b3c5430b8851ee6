"""The page of ``demo/browser`` in headless Chromium: it trains, and what it gives away is what it trained.

Needs node, the packages of ``demo/browser/package.json`` and Chromium: ``make test-runners``.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file

from tests.helpers.browser import MISSING, PAGE, in_browser, served, there

pytestmark = [pytest.mark.skipif(not there(), reason=MISSING), pytest.mark.xdist_group("browser")]


def make_folders(out: Path, *options: str) -> None:
    """What the page trains, exported by the program beside it."""
    words = ["make_folders.py", "--out", str(out), *options]
    with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PAGE / "make_folders.py"), run_name="__main__")
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "steps"
    make_folders(folder)
    return folder


@pytest.fixture(scope="module")
def address(steps: Path) -> Iterator[str]:
    with served({"/browser/steps/": steps}) as base:
        yield f"{base}/browser/"


#: Trains a task until the page says so; gives what it shows and what it offers for download.
TRAIN = """
import {{ readFile }} from "node:fs/promises";
export default async ({{ open }}) => {{
  const page = await open({{ acceptDownloads: true }});
  await page.goto("{address}?task={task}");
  await page.waitForSelector("#start:enabled");
  const shown = async (name) => (await page.textContent(`#n-${{name}}`)).trim();
  await page.click("#start");
  await page.waitForFunction(() => Number.parseFloat(document.getElementById("n-accuracy").textContent) >= 95);
  await page.click("#overflow");
  await page.waitForFunction((before) => Number(document.getElementById("n-skipped").textContent) > before, Number(await shown("skipped")));
  await page.click("#start");
  await page.waitForSelector("body[data-state=paused]");
  const step = Number(await shown("step"));
  const saved = {{}};
  for (const button of ["model", "checkpoint"]) {{
    const count = button === "model" ? 1 : 2;
    const got = [];
    const all = new Promise((done) => page.on("download", (each) => got.push(each) === count && done()));
    await page.click(`#${{button}}`);
    await all;
    page.removeAllListeners("download");
    for (const each of got) {{
      saved[each.suggestedFilename()] = `{folder}/${{each.suggestedFilename()}}`;
      await each.saveAs(saved[each.suggestedFilename()]);
    }}
  }}
  await page.waitForTimeout(300);
  const held = Number(await shown("step"));
  await page.click("#start");
  await page.waitForFunction((from) => Number(document.getElementById("n-step").textContent) > from + 3, held);
  return {{ step, held, saved, scale: await shown("scale"), loss: await shown("loss"), about: await page.textContent("#about") }};
}};
"""


@pytest.mark.parametrize("task", ["digits"])
def test_the_page_trains_pauses_goes_on_and_gives_away_what_it_trained(
    task: str, address: str, steps: Path, tmp_path: Path
) -> None:
    found = in_browser(tmp_path, TRAIN.format(address=address, task=task, folder=tmp_path.as_posix()))
    assert found["held"] == found["step"] > 10 and "wasm" in found["about"]
    said = json.loads((steps / task / "task.json").read_text(encoding="utf-8"))
    model, state, meta = (tmp_path / name for name in (f"{task}_fp16.onnx", "state.safetensors", "meta.json"))
    assert state.exists() and json.loads(meta.read_text(encoding="utf-8"))["step"] == found["step"]

    # stock onnxruntime, on the file alone, gives what infer.onnx gives on the state of the checkpoint
    image = np.random.default_rng(0).normal(0, 1, (1, said["channels"], said["size"], said["size"]))
    image = image.astype(np.float32)
    session = onnxruntime.InferenceSession(model.read_bytes(), providers=["CPUExecutionProvider"])
    (scores,) = session.run([said["scores"]], {said["image"]: image})
    (expected,) = inferred(steps / task / "cpu", state, said, image)
    assert scores.shape == expected.shape == (1, len(said["classes"]))
    assert np.allclose(scores.astype(np.float64), expected, rtol=0, atol=2e-2 * np.abs(expected).max())
    (before,) = inferred(steps / task / "cpu", steps / task / "cpu" / "state.safetensors", said, image)
    assert not np.allclose(before, expected, atol=0.1)


def inferred(folder: Path, state: Path, said: dict, image: np.ndarray) -> list[np.ndarray]:
    """What infer.onnx of an exported step gives on a state."""
    infer = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["models"]["infer"]
    tensors = load_file(state)
    feeds = {name: tensors[variable] for variable, name in infer["states"].items()}
    feeds |= {name: np.zeros((), np.float32) for name in infer["zeros"]} | {infer["feeds"][0]["input"]: image}
    session = onnxruntime.InferenceSession(folder / "infer.onnx", providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run([infer["fetches"][0]["output"]], feeds)
    return found
