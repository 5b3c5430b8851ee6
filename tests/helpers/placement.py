"""Asks where the nodes of a model would land on CUDA, on a machine without a GPU."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
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


@cache
def _tool() -> subprocess.Popen[str]:
    """The tool, which answers for as long as this process lives."""
    command = [sys.executable, str(PLACEMENT), "--serve"]
    tool = subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=over_stubs(cuda_stubs())
    )
    atexit.register(tool.communicate)  # which ends it
    return tool


@dataclass(frozen=True)
class Placed:
    """``status``: 0 where all is on CUDA and the step can be captured; ``said``: what is not, and why."""

    status: int
    said: str


def _ask(*arguments: str) -> Placed:
    tool = _tool()
    print(json.dumps(arguments), file=tool.stdin, flush=True)
    assert tool.stdout is not None
    answer = tool.stdout.readline()
    if not answer:
        _tool.cache_clear()  # another serves the next test
        raise AssertionError(f"the tool ended with status {tool.wait()}")
    return Placed(*json.loads(answer))


def place(model: onnx.ModelProto, path: Path) -> Placed:
    """Ask for placement and capture; where capture is refused, ask again for the nodes that stand in its way."""
    path.write_bytes(model.SerializeToString())
    placed = _ask(str(path), "--cuda-graph")
    return _ask(str(path)) if placed.status == 2 else placed


def left_on_cpu(model: onnx.ModelProto, path: Path) -> Counter[str]:
    """How many nodes of each type are on the CPU, and copies (``Memcpy...``); AssertionError if it is not loaded."""
    path.write_bytes(model.SerializeToString())
    placed = _ask(str(path), "--json")
    assert placed.status != 2, placed.said
    found = json.loads(placed.said)
    return Counter([*(kind for kind, _ in found["cpu"]), *found["memcpy"]])
