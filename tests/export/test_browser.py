"""The page of ``demo/browser`` in headless Chromium: it trains, and what it gives away is what it trained.

Needs node, the packages of ``demo/browser/package.json`` and Chromium: ``make test-runners``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image
from safetensors.numpy import load_file

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.browser import MISSING, PAGE, WEBGPU, in_browser, served, there, until_right, without_server
from tests.helpers.page_folders import make_folders

pytestmark = [pytest.mark.skipif(not there(), reason=MISSING), pytest.mark.xdist_group("browser")]


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
  await page.locator("#pad").scrollIntoViewIfNeeded();
  const pad = await page.locator("#pad").boundingBox();
  await page.mouse.move(pad.x + 95, pad.y + 30);
  await page.mouse.down();
  await page.mouse.move(pad.x + 95, pad.y + 160, {{ steps: 8 }});
  await page.mouse.up();
  await page.waitForSelector("#scores .best");
  const drawn = await page.textContent("#scores .best span");
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
  const further = (from) => page.waitForFunction((n) => Number(document.getElementById("n-step").textContent) > n, from + 3);
  await further(held);
  await page.click("#again");
  await page.waitForSelector("body[data-state=ready]");
  const anew = Number(await shown("step"));
  await page.setInputFiles("#load", [saved["meta.json"]]);
  await page.waitForSelector("#error:visible");
  const again = async (name) => ({{ name: name.replace(".", " (1)."), mimeType: "", buffer: await readFile(saved[name]) }});
  await page.setInputFiles("#load", [await again("state.safetensors"), await again("meta.json")]);
  await page.waitForSelector("body[data-state=goes]");
  const complaint = await page.isVisible("#error");
  const loaded = Number(await shown("step"));
  await page.click("#start");
  await further(loaded);
  return {{ step, held, anew, loaded, complaint, saved, drawn, scale: await shown("scale"), loss: await shown("loss"), about: await page.textContent("#about") }};
}};
"""


@pytest.mark.parametrize("task", ["digits", "pictures"])
def test_the_page_trains_pauses_goes_on_and_gives_away_what_it_trained(
    task: str, address: str, steps: Path, tmp_path: Path
) -> None:
    found = in_browser(tmp_path, TRAIN.format(address=address, task=task, folder=tmp_path.as_posix()))
    assert found["held"] == found["step"] > 10 and "wasm" in found["about"]
    assert (found["anew"], found["loaded"], found["complaint"]) == (0, found["step"], False)
    assert task == "pictures" or found["drawn"] == "1"
    said = json.loads((steps / task / "task.json").read_text(encoding="utf-8"))
    model, state, meta = (tmp_path / name for name in (f"{task}_fp16.onnx", "state.safetensors", "meta.json"))
    assert state.exists() and json.loads(meta.read_text(encoding="utf-8"))["step"] == found["step"]

    # stock onnxruntime, on the file alone, gives what infer.onnx gives on the state of the checkpoint
    image = np.random.default_rng(0).normal(0, 1, (1, said["channels"], said["size"], said["size"]))
    image = image.astype(np.float32)
    session = onnxruntime.InferenceSession(model.read_bytes(), providers=["CPUExecutionProvider"])
    (scores,) = session.run([said["scores"]], {said["image"]: image})
    folder = steps / task / "step"
    (expected,) = inferred(folder, state, said, image)
    assert scores.shape == expected.shape == (1, len(said["classes"]))
    assert np.allclose(scores.astype(np.float64), expected, rtol=0, atol=2e-2 * np.abs(expected).max())
    (before,) = inferred(folder, folder / "state.safetensors", said, image)
    assert not np.allclose(before, expected, atol=0.1)


def inferred(folder: Path, state: Path, said: dict, image: np.ndarray) -> list[np.ndarray]:
    """What infer.onnx of an exported step gives on a state."""
    infer = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["places"][0]["models"]["infer"]
    tensors = load_file(state)
    feeds = {name: tensors[variable] for variable, name in infer["states"].items()}
    feeds |= {name: np.zeros((), np.float32) for name in infer["zeros"]} | {infer["feeds"][0]["input"]: image}
    session = onnxruntime.InferenceSession(folder / "infer.onnx", providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run([infer["fetches"][0]["output"]], feeds)
    return found


@pytest.mark.parametrize("size", [None, 128])
def test_the_head_of_an_exported_model_learns(size: int | None, exports: Path, tmp_path: Path) -> None:
    """MobileNetV3, 5.5 million weights that were never trained, at 224 x 224 and smaller: at most 40 steps of 8."""
    options = ["--model", str(exports / "mobilenetv3_dyn.onnx"), "--contrast", "2", "--batch", "8"]
    make_folders(tmp_path / "steps", *options, *(["--size", str(size)] if size else []))
    with served({"/browser/steps/": tmp_path / "steps"}) as base:
        steps, seconds, _ = in_browser(tmp_path, until_right(f"{base}/browser/?task=pictures", 95))
    assert steps <= 40, seconds


#: Own pictures: from files and from a webcam; then from a checkpoint, without the server.
TAKE = """
export default async ({{ open }}) => {{
  const page = await open();
  await page.goto("{address}?task=pictures");
  await page.waitForSelector("#start:enabled");
  const classes = page.locator("#samples input");
  for (const [i, name] of ["red", "green"].entries()) {{
    await classes.nth(i).fill(name);
    await classes.nth(i).blur();
    await page.selectOption("#label", String(i));
    await page.setInputFiles("#images", {files}.filter((file) => file.includes(name)));
    await page.waitForFunction((said) => document.getElementById("added").textContent.includes(said), `4 of ${{name}}`);
  }}
  await page.click("#webcam");
  await page.waitForSelector("#camera:visible");
  await page.waitForSelector("#add:enabled");
  await page.click("#add");
  await page.click("input[value=own] + span");
  await page.click("#start");
  await page.waitForFunction(() => Number.parseFloat(document.getElementById("n-accuracy").textContent) === 100 && Number(document.getElementById("n-step").textContent) >= 40);
  await page.waitForSelector("#scores .best");
  const best = await page.textContent("#scores .best span");
  await page.setInputFiles("#images", {{ name: "notes.png", mimeType: "image/png", buffer: Buffer.from("no image") }});
  await page.waitForSelector("#error:visible");
  return {{ best, added: await page.textContent("#added"), error: await page.textContent("#error") }};
}};
"""


def test_pictures_come_from_files_and_a_webcam(address: str, tmp_path: Path) -> None:
    """The webcam is a film of green frames, as Chromium plays one for tests."""
    files = []
    rng = np.random.default_rng(0)
    for name, color in (("red", (200, 40, 40)), ("green", (40, 170, 60))):
        for i in range(4):
            files.append(str(tmp_path / f"{name}_{i}.png"))
            Image.fromarray(np.clip(rng.normal(color, 12, (48, 64, 3)), 0, 255).astype(np.uint8)).save(files[-1])
    film(tmp_path / "green.y4m", 120, 70, 80)
    fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    flags = [*fake, f"--use-file-for-fake-video-capture={tmp_path / 'green.y4m'}"]
    found = in_browser(tmp_path, TAKE.format(address=address, files=json.dumps(files)), flags)
    assert found["best"] == "green" and "5 of green" in found["added"]
    assert "notes.png" in found["error"]


def film(path: Path, *levels: int) -> None:
    """Ten frames of one color (Y, Cb, Cr)."""
    frame = b"FRAME\n" + b"".join(bytes([level]) * size for level, size in zip(levels, (4096, 1024, 1024), strict=True))
    path.write_bytes(b"YUV4MPEG2 W64 H64 F10:1 Ip A1:1 C420jpeg\n" + 10 * frame)


#: Chooses a task whose folder was changed, then the other one, where WebGPU has no 16-bit arithmetic.
WRONG = """
export default async ({{ open }}) => {{
  const page = await open();
  await page.goto("{address}?task=pictures&provider=webgpu");
  await page.waitForSelector("#error:visible");
  const error = await page.textContent("#error");
  await page.click("input[value=digits] + span");
  await page.waitForSelector("#start:enabled");
  await page.click("#start");
  await page.waitForFunction(() => Number(document.getElementById("n-step").textContent) >= 3);
  const gone = await page.locator("#error").isHidden();
  return {{ error, gone, webgpu: await page.textContent("#providers"), about: await page.textContent("#about") }};
}};
"""


def test_what_is_wrong_is_said_and_what_is_right_goes_on(steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps, tmp_path / "steps")
    train = tmp_path / "steps" / "pictures" / "step" / "train.onnx"
    train.write_bytes(train.read_bytes()[:-1] + b"x")
    with served({"/browser/steps/": tmp_path / "steps"}) as base:
        found = in_browser(tmp_path, WRONG.format(address=f"{base}/browser/"), WEBGPU)
    assert "train.onnx was changed" in found["error"] and found["gone"]
    assert "shader-f16" in found["webgpu"] and "Runs in wasm" in found["about"]


def test_the_page_needs_its_server_once(steps: Path, tmp_path: Path) -> None:
    """What was open goes on without, and so does what was not."""
    isolated, *about = without_server(steps, tmp_path, ["", "?task=pictures"])
    assert isolated and len(about) == 2 and about[0] != about[1]


#: Opens the page as a file, and the module in a page; float16 as the arrays that newer engines have for it.
HALVES = """
export default async ({{ browser, open }}) => {{
  const [file, page] = [await browser.newPage(), await open()];
  await file.goto("{file}");
  await file.waitForSelector("#error:visible");
  const error = await file.textContent("#error");
  await page.goto("{address}/browser/style.css");
  const kinds = await page.evaluate(async () => {{
    const ort = await import("/browser/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
    const {{ TrainingStep, url }} = await import("/runners/amp_step.mjs");
    ort.env.wasm.numThreads = 1;
    const found = [];
    for (const x of [new Float16Array(6).fill(1), new Uint16Array(6).fill(0x3c00)]) {{
      const step = await TrainingStep.open(url("/step"), {{ ort, options: {{ logSeverityLevel: 3 }} }});
      found.push(Array.from((await step.train({{ x }}))["{half}"], Number));
    }}
    return found;
  }});
  return {{ error, kinds }};
}};
"""


def test_a_page_without_server_says_so_and_halves_are_fed_as_what_they_are(tmp_path: Path) -> None:
    main, startup, scope = amp.Program(), amp.Program("startup"), amp.Scope()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [2, 3], "float16")
        scores = amp.nn.fc(F.cast(x, "float32"), 2)
        half = F.cast(scores, "float16")
        amp.optimizer.SGD(0.1).minimize(F.mean(F.square(scores)), startup)
    amp.Executor().run(startup, scope=scope)
    folder = main.export_training(tmp_path / "step", amp.CPUPlace(), outputs=[scores], fetch_list=[half], scope=scope)
    with served({"/step/": folder}) as base:
        found = in_browser(tmp_path, HALVES.format(file=(PAGE / "index.html").as_uri(), address=base, half=half.name))
    assert "server" in found["error"] and "localhost" in found["error"]
    (expected,) = amp.Executor().run(main, {x.name: np.ones((2, 3), np.float16)}, [half], scope)
    assert found["kinds"] == [expected.ravel().tolist()] * 2
