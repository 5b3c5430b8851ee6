"""Runs the runners of ``demo/runners`` on exported steps, and has the step that all of them are tried on."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

import amp_transpiler as amp
from tests.helpers.browser import WEBGPU, there as has_browser
from tests.helpers.where import ROOT

RUNNERS = ROOT / "demo" / "runners"
#: An interpreter with the onnxruntime of the version of npm's packages; ``make test-runners`` makes one.
PYTHON = os.environ.get("AMP_RUNNERS_PYTHON", "")
#: onnxruntime shares a sum out among its threads, so that bits depend on their number.
ONE_THREAD = {"ORT_INTRA_OP_NUM_THREADS": "1"}
#: The step whose gradients overflow.
OVERFLOW = 40


# -- what runners do ---------------------------------------------------------------------------------------
def batches(path: Path, feeds: Sequence[dict[str, np.ndarray]]) -> Path:
    """A file with the feeds of steps, one behind the other, as runners read it."""
    save_file({name: np.stack([feed[name] for feed in feeds]) for name in feeds[0]}, path)
    return path


def bare(
    folder: Path, data: Path, steps: int, to: Path, start: Path | None = None, place: str = ""
) -> list[dict[str, float]]:
    """What the bare Python runner prints of each step, by name; SystemExit as it ends with."""
    arguments = ["bare.py", folder, data, steps, to, start or folder, *filter(None, [place])]
    with (
        mock.patch.object(sys, "argv", list(map(str, arguments))),
        mock.patch.object(sys, "excepthook"),
        mock.patch.dict(os.environ, ONE_THREAD),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        runpy.run_path(str(RUNNERS / "bare.py"), run_name="__main__")
    return printed(out.getvalue())


def node(*options: str) -> list[str]:
    """How the JavaScript runner is called; empty where there is no node, or no packages (make test-runners)."""
    there = shutil.which("node") is not None and (RUNNERS / "node_modules").is_dir()
    return ["node", str(RUNNERS / "train.mjs"), *options] if there else []


def browser(*options: str) -> list[str]:
    """How that module is called in headless Chromium; empty where there is none (make test-runners)."""
    return ["node", str(ROOT / "tests" / "helpers" / "browser_train.mjs"), *options] if has_browser() else []


def webgpu() -> list[str]:
    """The same on WebGPU, where :func:`~tests.helpers.browser.software_webgpu` is."""
    return browser("--provider", "webgpu", *(f"--flag={flag}" for flag in WEBGPU))


def call(command: Sequence[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """A runner, run in a process."""
    words = [*command, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | ONE_THREAD)


def trained(command: Sequence[str], *arguments: object) -> list[dict[str, float]]:
    """What a runner prints of each step; AssertionError with its message where it fails."""
    done = call(command, *arguments)
    assert done.returncode == 0, done.stderr
    return printed(done.stdout)


def printed(text: str) -> list[dict[str, float]]:
    """What runners print of each step: ``step 3 loss_0 1.25 found_inf_0 0``."""
    lines = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return [dict(zip(words[::2], map(float, words[1::2]), strict=True)) for words in lines]


def losses(found: list[dict[str, Any]], name: str) -> np.ndarray:
    """The losses of steps; nine digits say a fp32 number exactly."""
    return np.array([step[name] for step in found], np.float32)


# -- the step that all are tried on ------------------------------------------------------------------------
@dataclass
class Digits:
    """MNIST's network of two convolutions in pure fp16, exported for CPU and WebGPU as one folder.

    ``losses`` are those of the executor on CPU.
    """

    folder: Path
    data: Path
    main: amp.Program
    loss: str
    feeds: list[dict[str, np.ndarray]]
    start: amp.Scope
    end: amp.Scope
    losses: np.ndarray
    bad: list[int]

    @classmethod
    def made(cls, folder: Path, steps: int, batch: int, portable: bool = False) -> Digits:
        """Export into ``folder``, and train with the executor."""
        import mnist

        main, startup = amp.Program(), amp.Program("startup")
        main.seed = startup.seed = 1
        with amp.program_guard(main, startup), amp.unique_name.guard():
            loss = mnist.network()[-1]
            optimizer = amp.decorate(
                amp.optimizer.Adam(0.001, multi_precision=True),
                use_pure_fp16=True,
                init_loss_scaling=2.0**10,
                incr_every_n_steps=20,
                decr_every_n_nan_or_inf=1,
            )
            optimizer.minimize(loss, startup)
        found_inf = optimizer.get_found_inf()
        start, end, exe, feeds = amp.Scope(), amp.Scope(), amp.Executor(threads=1), digits(steps, batch)
        for scope in (start, end):
            exe.run(startup, scope=scope)
            optimizer.amp_init(amp.CPUPlace(), scope)
        shapes = {name: array.shape for name, array in feeds[0].items()}
        places = [amp.CPUPlace(), amp.WebGPUPlace()]
        main.export_training(folder / "step", places, shapes, scope=start, portable=portable)
        fetched = [exe.run(main, feed, [loss, found_inf], scope=end) for feed in feeds]
        values = np.array([value.item() for value, _ in fetched], np.float32)
        bad = [number for number, (_, found) in enumerate(fetched) if found.item()]
        data = batches(folder / "batches.safetensors", feeds)
        return cls(folder / "step", data, main, loss.name, feeds, start, end, values, bad)

    def run(self, first: int, last: int, scope: amp.Scope) -> np.ndarray:
        """The losses of steps first … last - 1 under the executor."""
        exe = amp.Executor(threads=1)
        found = [exe.run(self.main, feed, [self.loss], scope=scope)[0].item() for feed in self.feeds[first:last]]
        return np.array(found, np.float32)


def digits(steps: int, batch: int) -> list[dict[str, np.ndarray]]:
    """Batches of scikit-learn's digits, as large as MNIST's; one is so bright that its gradients overflow."""
    from sklearn.datasets import load_digits

    data = load_digits()
    large = np.pad(np.kron(data.images, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    images = large[:, None].astype(np.float32) / 8 - 1
    rng = np.random.default_rng(0)
    chosen = [rng.integers(0, len(images), batch) for _ in range(steps)]
    feeds = [{"image": images[rows], "label": data.target[rows][:, None].astype(np.int64)} for rows in chosen]
    for feed in feeds[OVERFLOW : OVERFLOW + 1]:
        feed["image"] = feed["image"] * np.float32(1000)
    return feeds


def moved(
    step: Digits, command: Sequence[str], folder: Path, python: Sequence[str] | None = None
) -> tuple[np.ndarray, amp.Scope]:
    """The losses of a run in three parts and the state in its end: executor, runner, executor.

    With ``python``, a runner, in the place of the executor: a portable step has other bits there.
    """
    count, start, found = len(step.feeds), step.folder, []
    for number, by in enumerate((python, command, python)):
        first, last = (number * count // 3, (number + 1) * count // 3)
        to = folder / f"part_{number}"
        if by is None:
            scope = amp.Scope()
            assert amp.load_checkpoint(start, step.main, scope).exact
            found.append(step.run(first, last, scope))
            amp.save_checkpoint(to, step.main, scope, step=last)
            start = to / f"step_{last:08d}"
        else:
            found.append(losses(trained(by, step.folder, step.data, last - first, to, start), step.loss))
            start = to
    scope = amp.Scope()
    loaded = amp.load_checkpoint(start, step.main, scope)
    assert loaded.exact and loaded.step == count
    return np.concatenate(found), scope
