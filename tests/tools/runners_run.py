#!/usr/bin/env python3
"""One exported step under every runner: MNIST's network of two convolutions, pure fp16, with a planted overflow.

    python -m tests.tools.runners_run FOLDER [--steps 100] [--batch 64] [--python PYTHON] [--portable]

Each runner trains with the folder, and once more in three parts: executor, runner, executor; where it is portable, bare Python
in the place of the executor, which has other bits. PYTHON is an interpreter with
safetensors and an onnxruntime, of the version of npm's packages for a comparison by bits. Prints how far losses are from
the executor's and from those of PYTHON, and how far the run in parts ends from the one that was not broken. AMP_BROWSER, a
Chromium, adds it with wasm, and with WebGPU where Mesa's software Vulkan is; AMP_RUNNERS_HEADERS and AMP_RUNNERS_BINDINGS, what
tests.tools.ort_headers and ort_bindings print, add C++, C# and Java.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np

import amp_transpiler as amp
from tests.helpers.browser import software_webgpu
from tests.helpers.compiled_runners import cpp, csharp, java
from tests.helpers.runners import RUNNERS, Digits, browser, losses, moved, node, trained, webgpu
from tests.helpers.where import ROOT


def apart(found: np.ndarray, expected: np.ndarray) -> str:
    """The largest difference, relative to losses above 1, and the first step that has one; "bits equal" without any."""
    if found.tobytes() == expected.tobytes():
        return "bits equal"
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    different = np.abs(found - expected) / np.maximum(1, np.abs(expected))
    return f"{np.nanmax(different):.1e}, from step {np.nonzero(different)[0][0] + 1}"


def ends(step: Digits, scope: amp.Scope, whole: amp.Scope) -> str:
    """How far state is from that of the run that was not broken."""
    names = [v.name for v in step.main.variables if v.persistable]
    pairs = [(scope.find_var(name), whole.find_var(name)) for name in names]
    if all(one.tobytes() == other.tobytes() for one, other in pairs):
        return "bits equal"
    return f"{max(float(np.abs(one.astype(np.float64) - other).max()) for one, other in pairs):.1e}"


def main() -> int:
    """Print the table."""
    sys.path.insert(0, str(ROOT / "demo"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--portable", action="store_true", help="the step that has the same bits in wasm")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    step = Digits.made(options.folder, options.steps, options.batch, options.portable)
    print(f"executor: losses {step.losses[0]:.4f} to {step.losses[-1]:.4f}, bad steps {step.bad}")
    commands = {
        "bare Python": [options.python, str(RUNNERS / "bare.py")],
        "Node": node(),
        "wasm": node("--web"),
    }
    for name, compiled in {"C++": cpp, "C#": csharp, "Java": java}.items():
        (options.folder / f"compiled_{name}").mkdir()
        commands[name] = compiled(options.folder / f"compiled_{name}")
    runs = {name: command for name, command in commands.items() if command}
    with contextlib.ExitStack() as stack:
        if browser():
            runs["Chromium, wasm"] = browser()
            if isinstance(found := software_webgpu(options.folder / "chromium"), dict):
                stack.enter_context(mock.patch.dict(os.environ, found))
                runs["Chromium, WebGPU"] = webgpu()
        table(step, runs, options)
    return 0


def table(step: Digits, runs: dict[str, list[str]], options: argparse.Namespace) -> None:
    print("| runner | losses beside the executor's | beside bare Python's | in parts: losses | state | seconds |")
    print("|---|---|---|---|---|---|")
    plain, end, python = step.losses, step.end, runs["bare Python"] if options.portable else None
    for name, command in runs.items():
        folder, start = options.folder / name.replace(" ", "_"), time.monotonic()
        folder.mkdir()
        found = losses(trained(command, step.folder, step.data, options.steps, folder / "end"), step.loss)
        seconds = time.monotonic() - start
        if name == "bare Python":
            plain = found
            if python:
                amp.load_checkpoint(folder / "end", step.main, end := amp.Scope())
        parts, scope = moved(step, command, folder, python)
        whole = plain if python else step.losses
        told = [apart(found, step.losses), apart(found, plain), apart(parts, whole), ends(step, scope, end)]
        print(f"| {name} | {' | '.join(told)} | {seconds:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
