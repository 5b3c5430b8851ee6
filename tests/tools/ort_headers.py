#!/usr/bin/env python3
"""onnxruntime's C++ headers, out of Debian's package, into a folder; nothing is installed, and no root is needed.

    python -m tests.tools.ort_headers FOLDER

Prints where they are; where they cannot be had, says why, with exit status 1. They are a little older than the library of
the Python package, which programs that are compiled with them run on: its interface is only added to.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main\n"
PACKAGE = "libonnxruntime-dev"


def fetched(folder: Path) -> Path:
    """The folder of the headers; OSError, CalledProcessError where they cannot be had."""
    headers = folder / "usr" / "include" / "onnxruntime"
    if (headers / "onnxruntime_cxx_api.h").is_file():
        return headers
    for each in ("lists/partial", "cache/archives/partial"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(SOURCE, encoding="utf-8")
    own = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    options = [word for name, value in own.items() for word in ("-o", f"{name}={value}")]
    for words in (["apt-get", *options, "update"], ["apt-get", *options, "download", PACKAGE]):
        subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    package = next(folder.glob(f"{PACKAGE}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=folder, check=True, capture_output=True, text=True)
    return headers


def main() -> int:
    """Print where the headers are."""
    try:
        print(fetched(Path(sys.argv[1]).resolve()))
    except subprocess.CalledProcessError as error:
        print(f"no headers of onnxruntime: {error.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return 1
    except (OSError, StopIteration) as error:
        print(f"no headers of onnxruntime: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
