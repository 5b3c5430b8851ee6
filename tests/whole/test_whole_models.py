"""Exported models train: their gradients are torch's, and their loss falls in every precision.

``pytest tests/whole/test_whole_models.py --exports FOLDER --torch-python PYTHON``: FOLDER is what
``tests/tools/export_models.py`` makes; PYTHON is an interpreter of another environment, with torch.
"""

from __future__ import annotations

import lzma
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.where import DATA, NO_DATA, ROOT

WORKER = ROOT / "tests" / "benchmarks" / "torch_graph.py"


def squared(program: amp.Program) -> amp.Variable:
    out = next(v for v in program.outputs if v.dtype == "float32")
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        return F.mse_loss(out, amp.data("target", out.shape, "float32"))


def first_output(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    program, scope, exe = amp.Program.from_onnx(str(path)), amp.Scope(), amp.Executor(threads=2)
    exe.run(program.startup, scope=scope)
    out = next(v for v in program.outputs if v.dtype == "float32")
    return np.asarray(exe.run(program, feed=feeds, fetch_list=[out], scope=scope)[0])


def test_gradients_are_those_of_torch(export: Path, torch_python: str, tmp_path: Path) -> None:
    if export.stem == "script_ifloop_leg":
        pytest.skip("the reader of graphs in torch knows no Loop")
    path, name, feeds = export, export.stem, dict(np.load(export.with_suffix(".npz")))
    out = first_output(path, feeds)
    feeds["target"] = (out + np.random.default_rng(0).normal(size=out.shape) * out.std()).astype(np.float32)
    np.savez(tmp_path / "feeds.npz", **feeds)
    truth, theirs = (_torch(torch_python, path, tmp_path, dtype) for dtype in ("float64", "float32"))

    program = amp.Program.from_onnx(str(path))
    loss = squared(program)
    pairs = [(p, g) for p, g in amp.append_backward(loss) if f"d:{p.name}" in truth]
    assert len(pairs) == len(program.parameters)
    scope, exe = amp.Scope(), amp.Executor(threads=2)
    exe.run(program.startup, scope=scope)
    found = exe.run(program, feed=feeds, fetch_list=[loss, *(g for _, g in pairs)], scope=scope)
    np.testing.assert_allclose(found[0], theirs["loss"], rtol=3e-4)  # onnxruntime adds 3 million squares in fp32
    names = [f"d:{p.name}" for p, _ in pairs]
    ours = _distances(dict(zip(names, found[1:], strict=True)), truth)
    torchs = _distances(theirs, truth)
    print(
        f"{name}: {len(names)} gradients, relative L2 distance from float64: median {np.median(list(ours.values())):.1e}, "
        f"worst {max(ours.values()):.1e}; torch's fp32: worst {max(torchs.values()):.1e}"
    )
    # Where rounding turns ReLUs on and off (a ResNet with random weights), fp32 is further off: in torch as well.
    limit = max(1e-4, 2 * max(torchs.values()))
    assert max(ours.values()) < limit, sorted(ours.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure-fp16"])
def test_twenty_steps(export: Path, mode: str) -> None:
    """Towards its own output, disturbed; every gradient finite, and the loss lower at the end."""
    feeds = dict(np.load(export.with_suffix(".npz")))
    out = first_output(export, feeds)
    program = amp.Program.from_onnx(str(export))
    fixed = {"n": feeds.pop("n")} if "n" in feeds else {}
    amp.prepare_training(program, values=fixed)
    history = train(program, feeds, out, mode, 20)
    assert np.isfinite(history).all() and history[-1] < history[0], history


def train(program: amp.Program, feeds: dict[str, np.ndarray], out: np.ndarray, mode: str, steps: int) -> list[float]:
    """The losses of so many Adam steps, none of which is skipped."""
    noise = np.random.default_rng(0).normal(size=out.shape) * (out.std() or 0.1)
    feeds = {**feeds, "target": (out + noise).astype(np.float32)}
    loss = squared(program)
    optimizer: Any = amp.optimizer.Adam(2e-5, multi_precision=mode != "fp32")
    if mode != "fp32":
        optimizer = amp.decorate(
            optimizer, init_loss_scaling=1024.0, use_pure_fp16=mode == "pure-fp16", use_fp16_guard=False
        )
    optimizer.minimize(loss, program.startup)
    scope, exe = amp.Scope(), amp.Executor(threads=2)
    exe.run(program.startup, scope=scope)
    fetches = [loss]
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
        fetches.append(optimizer.get_found_inf())
    rows = [exe.run(program, feed=feeds, fetch_list=fetches, scope=scope) for _ in range(steps)]
    assert not any(row[1].any() for row in rows if len(row) > 1), "a step was skipped"
    return [float(np.ravel(row[0])[0]) for row in rows]


#: What the trained models are fed, where inputs leave it open; inputs that get one value for good.
SHAPES = {"silero_vad": {"input": (1, 512), "state": (2, 1, 128)}, "ppocr_cls": {"x": (2, 3, 48, 192)}}
VALUES = {"silero_vad": {"sr": 16000}}
TRAINED = ["silero_vad", "magika_v3_3", "ultraface_rfb320", "dtln_1", "gtcrn_simple", "mnist_cntk", "ppocr_cls"]


def prepared(content: bytes, name: str) -> amp.Program:
    program = amp.Program.from_onnx(onnx.load_model_from_string(content))
    amp.prepare_training(program, values=VALUES.get(name), feed_shapes=SHAPES.get(name))
    return program


@cache
def trained(name: str) -> tuple[bytes, dict[str, np.ndarray], np.ndarray]:
    """A trained model's file, feeds, and what it makes of them, which is the same whatever it is trained in next."""
    path = DATA / "onnx_models" / f"{name}.onnx.xz"
    if not path.exists():
        pytest.skip(NO_DATA)
    content = lzma.decompress(path.read_bytes())
    program = prepared(content, name)
    rng = np.random.default_rng(0)
    feeds = {}
    for variable in program.inputs:
        shape = [size if isinstance(size, int) else 1 for size in variable.shape or ()]
        whole = rng.integers(0, 256, shape, dtype=np.int32) if variable.dtype == "int32" else rng.random(shape)
        feeds[variable.name] = np.asarray(whole, variable.dtype)
    test, scope, exe = program.clone(for_test=True), amp.Scope(), amp.Executor(threads=2)
    exe.run(program.startup, scope=scope)
    first = next(v for v in test.outputs if v.dtype == "float32")
    return content, feeds, np.asarray(exe.run(test, feed=feeds, fetch_list=[first], scope=scope)[0])


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure-fp16"])
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_train_on(name: str, mode: str) -> None:
    content, feeds, out = trained(name)
    history = train(prepared(content, name), feeds, out, mode, 10)
    assert np.isfinite(history).all() and min(history[-3:]) < history[0], history


def _torch(python: str, path: Path, folder: Path, dtype: str) -> Any:
    out = folder / f"{dtype}.npz"
    subprocess.run(
        [python, str(WORKER), "gradients", str(path), str(folder / "feeds.npz"), str(out), dtype], check=True
    )
    return np.load(out)


def _distances(found: Any, truth: Any) -> dict[str, float]:
    """Relative L2 distances; a gradient that is zero (that of the bias of keys) is measured against the largest."""
    names = [name for name in truth if name.startswith("d:") and name in found]
    sizes = {name: float(np.linalg.norm(truth[name])) for name in names}
    floor = 1e-6 * max(sizes.values())
    return {name: float(np.linalg.norm(found[name] - truth[name])) / max(sizes[name], floor) for name in names}
