"""Asks where the nodes of a model would land on CUDA, on a machine without a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.helpers.where import PLACEMENT

_HEADERS = any(Path(p, "driver_types.h").exists() for p in ("/usr/local/cuda/include", "/usr/local/cuda-13.0/include"))

needs_placement_tool = pytest.mark.skipif(
    shutil.which("gcc") is None or not _HEADERS,
    reason="needs gcc and the CUDA 13 headers in /usr/local/cuda (Debian: cuda-cudart-dev-13-0; no driver, no GPU)",
)


def place(model: onnx.ModelProto, path: Path) -> subprocess.CompletedProcess[str]:
    """Ask for placement and capture; where capture is refused, ask again for the nodes that stand in its way."""
    path.write_bytes(model.SerializeToString())
    for options in (["--cuda-graph"], []):
        done = subprocess.run(
            [sys.executable, str(PLACEMENT), str(path), *options], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 2:
            return done
    return done
