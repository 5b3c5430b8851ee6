"""Runs scripts in headless Chromium, on the files of ``demo`` behind a static server."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.where import ROOT

PAGE = ROOT / "demo" / "browser"
#: A Chromium; ``make test-runners`` names the one that is there.
CHROMIUM = os.environ.get("AMP_BROWSER", "")
MISSING = "no Chromium, or no packages in demo/browser/node_modules: make test-runners"


def there() -> bool:
    """Whether there is a browser with what drives it."""
    return bool(CHROMIUM) and (PAGE / "node_modules" / "playwright-core").is_dir()


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
    words = ["node", str(ROOT / "tests" / "helpers" / "browser.mjs"), str(PAGE), CHROMIUM, str(path), *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
