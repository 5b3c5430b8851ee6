"""Runs the runners of ``demo/runners`` on exported steps."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

from tests.helpers.where import ROOT

RUNNERS = ROOT / "demo" / "runners"


def batches(path: Path, feeds: list[dict[str, np.ndarray]]) -> Path:
    """A file with the feeds of steps, one behind the other, as runners read it."""
    save_file({name: np.stack([feed[name] for feed in feeds]) for name in feeds[0]}, path)
    return path


def bare(folder: Path, data: Path, steps: int, to: Path, start: Path | None = None) -> list[dict[str, float]]:
    """What the bare Python runner prints of each step, by name; SystemExit as it ends with."""
    arguments = ["bare.py", folder, data, steps, to, *([] if start is None else [start])]
    with mock.patch.object(sys, "argv", list(map(str, arguments))), contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(RUNNERS / "bare.py"), run_name="__main__")
    return printed(out.getvalue())


def printed(text: str) -> list[dict[str, float]]:
    """What runners print of each step: ``step 3 loss_0 1.25 found_inf_0 0``."""
    lines = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return [dict(zip(words[::2], map(float, words[1::2]), strict=True)) for words in lines]


def losses(found: list[dict[str, Any]], name: str) -> list[np.float32]:
    """The losses of steps; nine digits say a fp32 number exactly."""
    return [np.float32(step[name]) for step in found]
