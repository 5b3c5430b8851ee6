"""Asks where the nodes of a model would land on CUDA, on a machine without a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.helpers.made_once import made_once
from tests.helpers.where import PLACEMENT
from tests.tools.cuda_placement import build_stubs, over_stubs, provider_library

_HEADERS = any(Path(p, "driver_types.h").exists() for p in ("/usr/local/cuda/include", "/usr/local/cuda-13.0/include"))

needs_placement_tool = pytest.mark.skipif(
    shutil.which("gcc") is None or not _HEADERS or not provider_library().exists(),
    reason="needs onnxruntime's build with CUDA, gcc and the CUDA 13 headers in /usr/local/cuda "
    "(Debian: cuda-cudart-dev-13-0; no driver, no GPU)",
)


def cuda_stubs() -> Path:
    """The stub libraries of CUDA."""
    return made_once("cuda_stubs", build_stubs)


def place(model: onnx.ModelProto, path: Path) -> subprocess.CompletedProcess[str]:
    """Ask for placement and capture; where capture is refused, ask again for the nodes that stand in its way."""
    path.write_bytes(model.SerializeToString())
    environment = over_stubs(cuda_stubs())
    for options in (["--cuda-graph"], []):
        done = subprocess.run(
            [sys.executable, str(PLACEMENT), str(path), *options],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
        )
        if done.returncode != 2:
            return done
    return done
