"""Runs scripts in headless Chromium, on the files of ``demo`` behind a static server."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.where import ROOT

PAGE = ROOT / "demo" / "browser"
MISSING = "no Chromium, or no packages in demo/browser/node_modules: make test-runners"


def there() -> bool:
    """Whether there is a browser, which ``make test-runners`` names, with what drives it."""
    return bool(os.environ.get("AMP_BROWSER")) and (PAGE / "node_modules" / "playwright-core").is_dir()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files below ``demo``, and those of some folders in the place of others."""

    def __init__(self, *arguments: Any, folders: Mapping[str, Path], **options: Any) -> None:
        self.folders = folders
        super().__init__(*arguments, directory=str(ROOT / "demo"), **options)

    def translate_path(self, path: str) -> str:
        for prefix, folder in self.folders.items():
            if path.startswith(prefix):
                return str(folder / path.partition("?")[0].removeprefix(prefix))
        return super().translate_path(path)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(folders: Mapping[str, Path]) -> Iterator[str]:
    """The address of a static server of ``demo``; ``folders``: path, with a slash in the end, to what lies there."""
    handler = functools.partial(_Handler, folders=folders)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


def in_browser(folder: Path, script: str, flags: Sequence[str] = ()) -> Any:
    """What a script gives (tests/helpers/browser.mjs runs it); AssertionError with what went wrong in it."""
    path = folder / "script.mjs"
    path.write_text(script, encoding="utf-8")
    chromium = os.environ.get("AMP_BROWSER", "")
    words = ["node", str(ROOT / "tests" / "helpers" / "browser.mjs"), str(PAGE), chromium, str(path), *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until_right(address: str, percent: int) -> str:
    """A script that trains on the page until so many are right: gives its step, its seconds and what it runs in."""
    return f"""
export default async ({{ open }}) => {{
  const page = await open();
  await page.goto("{address}");
  await page.waitForSelector("#start:enabled");
  await page.click("#start");
  const enough = () => Number.parseFloat(document.getElementById("n-accuracy").textContent) >= {percent};
  await page.waitForFunction(enough, null, {{ timeout: 240_000 }});
  return [Number(await page.textContent("#n-step")), await page.textContent("#n-elapsed"), await page.textContent("#about")];
}};
"""


#: Loads the page, takes its server away, and trains with each of some questions.
_ALONE = """
export default async ({{ open }}) => {{
  const page = await open();
  await page.goto("{address}");
  await page.waitForSelector("#start:enabled");
  await page.reload();
  await page.waitForSelector("#kept:not([hidden])");
  process.kill({server});
  while (await fetch("{address}").then(() => true, () => false)) await new Promise((done) => setTimeout(done, 50));
  const about = [];
  for (const asked of {asked}) {{
    await page.goto("{address}" + asked);
    await page.waitForSelector("#start:enabled");
    await page.click("#start");
    await page.waitForFunction(() => Number(document.getElementById("n-step").textContent) >= 3);
    about.push(await page.textContent("#about"));
  }}
  return [await page.evaluate(() => crossOriginIsolated), ...about];
}};
"""


def without_server(steps: Path, home: Path, asked: Sequence[str], flags: Sequence[str] = ()) -> list[Any]:
    """Whether the page is isolated, and what it says that it runs for each question, once its server is gone.

    Its files are copied as the README says, behind the server that Python has.
    """
    site = home / "site"
    shutil.copytree(PAGE, site / "browser", ignore=shutil.ignore_patterns("node_modules", "steps"))
    (site / "browser" / "node_modules").symlink_to(PAGE / "node_modules")
    (site / "browser" / "steps").symlink_to(steps)
    (site / "runners").mkdir()
    shutil.copy(PAGE.parent / "runners" / "amp_step.mjs", site / "runners")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "http.server", "-d", str(site), "-b", "localhost", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            address = f"http://localhost:{port}/browser/"
            _wait_for(address)
            script = _ALONE.format(address=address, server=server.pid, asked=json.dumps(asked))
            found: list[Any] = in_browser(home, script, flags)
            return found
        finally:
            server.kill()


def _wait_for(address: str) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(address).close()
            return
        time.sleep(0.1)
    raise AssertionError(f"nothing answers at {address}")


# -- WebGPU without a graphics card ------------------------------------------------------------------------
#: What headless Chromium is told, to have WebGPU compute on the processor.
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--disable-gpu-sandbox")
_HOMES = (Path("/usr/lib/chromium"), Path("/usr/lib/chromium-browser"), Path("/opt/google/chrome"))


def software_webgpu(folder: Path) -> dict[str, str] | str:
    """The environment of a Chromium, made in ``folder``, whose WebGPU has 16-bit arithmetic; or why there is none."""
    home = next((home for home in _HOMES if (home / "libvk_swiftshader.so").exists()), None)
    driver = next(iter(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")), None)
    if home is None or driver is None or shutil.which("gcc") is None:
        return "needs Chromium's folder, Mesa's software Vulkan (mesa-vulkan-drivers >= 24) and gcc"
    folder.mkdir(exist_ok=True)
    (folder / "run").mkdir(mode=0o700)
    binary = next(home / name for name in ("chromium", "chrome", "chromium-browser") if (home / name).exists())
    for each in home.iterdir():
        if each.name not in (binary.name, "libvk_swiftshader.so", "vk_swiftshader_icd.json"):
            (folder / each.name).symlink_to(each)
    try:
        os.link(
            binary, folder / binary.name
        )  # it looks for its libraries beside itself, which no link of the other kind is
    except OSError:
        shutil.copy(binary, folder)
    source = ROOT / "tests" / "helpers" / "software_webgpu.c"
    made = ["-shared", "-fPIC", "-O1", "-o", str(folder / "libvk_swiftshader.so"), str(source), "-ldl"]
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", *made], check=True)
    said = {"library_path": str(home / "libvk_swiftshader.so"), "api_version": "1.0.5"}  # what draws the page
    (folder / "vk_swiftshader_icd.json").write_text(json.dumps({"file_format_version": "1.0.0", "ICD": said}))
    return {
        "AMP_BROWSER": str(folder / binary.name),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "VK_ICD_FILENAMES": str(driver),
    }
