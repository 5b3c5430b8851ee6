"""What may be wrong with an exported step, a checkpoint or batches, and what runners say of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from amp_transpiler.runtime.checkpoint.writing import file_hash


def edit(path: Path, change: Callable[[dict], None]) -> None:
    """Change a JSON file."""
    said = json.loads(path.read_text(encoding="utf-8"))
    change(said)
    path.write_text(json.dumps(said), encoding="utf-8")


def changed_file(home: Path) -> None:
    path = home / "step" / "train.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def other_version(home: Path) -> None:
    edit(home / "step" / "manifest.json", lambda said: said.update(version=2))


def missing_state(home: Path) -> None:
    tensors = load_file(home / "checkpoint" / "state.safetensors")
    del tensors["fc_0.w_0"]
    save_file(tensors, home / "checkpoint" / "state.safetensors")
    digest = file_hash(home / "checkpoint" / "state.safetensors")
    edit(home / "checkpoint" / "meta.json", lambda said: said["file"].update(sha256=digest))


def missing_file(home: Path) -> None:
    (home / "step" / "train.onnx").unlink()


def missing_folder(home: Path) -> None:
    shutil.rmtree(home / "step")


def damaged_manifest(home: Path) -> None:
    path = home / "step" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-100])


def missing_checkpoint(home: Path) -> None:
    shutil.rmtree(home / "checkpoint")


def cut_state(home: Path) -> None:
    path = home / "checkpoint" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def other_program(home: Path) -> None:
    edit(home / "checkpoint" / "meta.json", lambda said: said["program"].update(fingerprint="0" * 64))


def missing_feed(home: Path) -> None:
    tensors = load_file(home / "data.safetensors")
    save_file({"x": tensors["x"]}, home / "data.safetensors")


def wrong_feed(home: Path) -> None:
    tensors = load_file(home / "data.safetensors")
    save_file(tensors | {"x": tensors["x"].astype(np.float64)}, home / "data.safetensors")


def short_feed(home: Path) -> None:
    tensors = load_file(home / "data.safetensors")
    save_file(tensors | {"x": tensors["x"][:, :-1].copy()}, home / "data.safetensors")


def turned_feed(home: Path) -> None:
    """As many numbers, the other way round."""
    tensors = load_file(home / "data.safetensors")
    save_file(tensors | {"x": np.ascontiguousarray(tensors["x"].swapaxes(1, 2))}, home / "data.safetensors")


def cut_batches(home: Path) -> None:
    """The batch of the first step is whole."""
    tensors = load_file(home / "data.safetensors")
    save_file({name: np.concatenate([array] * 3) for name, array in tensors.items()}, home / "data.safetensors")
    (home / "data.safetensors").write_bytes((home / "data.safetensors").read_bytes()[:-8])


def uneven_batches(home: Path) -> None:
    tensors = load_file(home / "data.safetensors")
    save_file(tensors | {"label": np.concatenate([tensors["label"]] * 2)}, home / "data.safetensors")


def no_batches(home: Path) -> None:
    tensors = load_file(home / "data.safetensors")
    save_file({name: array[:0].copy() for name, array in tensors.items()}, home / "data.safetensors")


#: By what breaks the folders in a home, parts of the message, in letters of any case.
FAULTS: dict[Callable[[Path], None], tuple[str, ...]] = {
    changed_file: ("train.onnx", "SHA-256"),
    other_version: ("amp_transpiler.training_step", "2", "1"),
    missing_state: ("fc_0.w_0", "missing", "float16"),
    missing_file: ("train.onnx",),
    missing_folder: ("manifest.json",),
    damaged_manifest: ("manifest.json",),
    missing_checkpoint: ("meta.json",),
    cut_state: ("state.safetensors", "SHA-256"),
    other_program: ("checkpoint", "program"),
    missing_feed: ("feed 'label'", "missing"),
    wrong_feed: ("feed 'x'", "float32"),
    short_feed: ("feed 'x'", "float32"),
    turned_feed: ("feed 'x'", "float32"),
    cut_batches: ("file",),
    no_batches: ("batches",),
    uneven_batches: ("feeds in", "length"),
}
