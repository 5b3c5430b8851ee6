"""``amp.write_trained_model``: the model of an exported step, with the weights of a checkpoint."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from amp_transpiler.errors import ArgumentError, CheckpointMismatchError, ModelFileError
from amp_transpiler.export.manifest import FORMAT, MANIFEST, VERSION
from amp_transpiler.file_targets import PathLike, check_target, folder_path
from amp_transpiler.files import Write, check_outputs, put, write_files
from amp_transpiler.ir.serializing import serialized
from amp_transpiler.ir.types import BYTES
from amp_transpiler.option_checks import is_whole
from amp_transpiler.runtime.checkpoint.checkpoints import chosen_checkpoint
from amp_transpiler.runtime.checkpoint.reading import read_checkpoint
from amp_transpiler.runtime.checkpoint.writing import file_hash

CALL = "write_trained_model"


def write_trained_model(folder: PathLike, path: PathLike, checkpoint: PathLike | None = None) -> None:
    """Write the model of an exported step with the weights of a checkpoint, as ONNX: whole, or not at all.

    It has real 16-bit operators and computes the step's outputs from the feeds that they need; onnxruntime alone loads
    it. What was larger than 2 GB has its weights in ``<path>.data``.

    Args:
        folder: what ``Program.export_training`` wrote.
        path: where to write.
        checkpoint: what a runner in any language saved, or ``amp.save_checkpoint``: a checkpoint, or a folder of those
            of steps (then the last). Default: the folder's own state, with which the training begins.

    Raises:
        ModelFileError: the folder holds no exported step, one of another version, or a file of it was changed.
        CheckpointNotFoundError, CheckpointError: no checkpoint, or a damaged one. CheckpointMismatchError: one of
            another program. ArgumentError: outputs that cannot be served without this package, ``path`` is an input.
        ModelFileWriteError: the file cannot be written.
    """
    home, target = folder_path(folder, f"{CALL}: folder"), check_target(path, f"{CALL}: path")
    said = _manifest(home)
    if not _fits(said):
        raise ModelFileError(f"{CALL}: '{home / MANIFEST}' is damaged: where weights lie is not told; export it again")
    serving = said["serving"]
    if serving is None:
        raise ArgumentError(
            f"{CALL}: the outputs of program '{said['program']['name']}' need operators that onnxruntime alone does "
            f"not have, so '{home}' has no model to serve them with; export it with other outputs"
        )
    for name in filter(None, (serving["file"], serving["data"])):
        _check(home / name, said["files"][name])
    source = chosen_checkpoint(home if checkpoint is None else folder_path(checkpoint, f"{CALL}: checkpoint"))
    inputs = {"folder": [home], "checkpoint": [source]}
    data = Path(f"{target}.data") if serving["data"] else None
    check_outputs({"path": target, "data": data}, inputs)
    weights = _Weights(said, source)
    model = weights.patched(home, serving["file"])
    if data is None:
        write_files([(target, put(model))])
    else:
        moved = put(_located(model, data.name))
        write_files([(data, weights.patching(home, serving["data"])), (target, moved)])


class _Weights:
    """The weights of a checkpoint, and where they belong."""

    def __init__(self, said: Mapping[str, Any], source: Path) -> None:
        meta, self._file = read_checkpoint(source)
        if meta["program"]["fingerprint"] != said["program"]["fingerprint"]:
            raise CheckpointMismatchError(
                f"{CALL}: checkpoint '{source}' is one of another program, '{meta['program']['name']}', than the step "
                f"of '{said['program']['name']}' in the folder: what they compute or keep differs. Export the program "
                "that was trained, or train this step"
            )
        self.places = said["serving"]["weights"]
        kinds = {one["name"]: (one["dtype"], one["shape"]) for one in said["states"]}
        held = meta["tensors"]
        for name in (one["state"] for one in self.places):
            found = (held[name]["dtype"], held[name]["shape"]) if name in held else "missing"
            if found != kinds[name]:
                raise CheckpointMismatchError(
                    f"{CALL}: '{name}' of checkpoint '{source}' is {_shown(found)}; expected {_shown(kinds[name])}",
                    wrong={name: _shown(found)},
                )

    def patched(self, home: Path, file: str) -> bytes:
        """A file of the model with the weights that lie in it."""
        content = bytearray((home / file).read_bytes())
        for offset, raw in self._of(file):
            content[offset : offset + len(raw)] = raw
        return bytes(content)

    def patching(self, home: Path, file: str) -> Write:
        """What writes a large file of the model with the weights that lie in it."""

        def write(stream: BinaryIO) -> None:
            with open(home / file, "rb") as before:
                shutil.copyfileobj(before, stream)
            for offset, raw in self._of(file):
                stream.seek(offset)
                stream.write(raw)

        return write

    def _of(self, file: str) -> Iterator[tuple[int, bytes]]:
        for one in self.places:
            if one["file"] == file:
                yield one["offset"], self._file.read(one["state"]).tobytes()


def _manifest(home: Path) -> dict[str, Any]:
    if not os.path.isfile(home / MANIFEST):
        raise ModelFileError(
            f"{CALL}: '{home}' is no exported step: there is no '{home / MANIFEST}'; give the folder that "
            "Program.export_training or amp-transpile export-step wrote"
        )
    try:
        said = json.loads((home / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{CALL}: '{home / MANIFEST}' cannot be read: {error}") from None
    if not isinstance(said, dict) or (said.get("format"), said.get("version")) != (FORMAT, VERSION):
        found = f"{said.get('format')} version {said.get('version')}" if isinstance(said, dict) else "something else"
        raise ModelFileError(f"{CALL}: '{home}' holds {found:.200}; expected {FORMAT} version {VERSION}")
    if "serving" not in said:
        raise ModelFileError(f"{CALL}: '{home}' was exported without a model to serve; export it again")
    return said


def _fits(said: Mapping[str, Any]) -> bool:
    """Whether all is told of the model to serve, where there is one, and its weights lie inside of its files."""
    try:
        if not all(isinstance(said["program"][key], str) for key in ("name", "fingerprint")):
            return False
        if (serving := said["serving"]) is None:
            return True
        files = {name: said["files"][name] for name in (serving["file"], serving["data"]) if name is not None}
        if any(os.path.basename(name) != name or "\0" in name or not one["sha256"] for name, one in files.items()):
            return False
        sizes = {one["name"]: BYTES[one["dtype"]] * math.prod(one["shape"]) for one in said["states"]}
        return all(
            one["bytes"] == sizes[one["state"]]
            and is_whole(one["offset"])
            and 0 <= one["offset"] <= files[one["file"]]["bytes"] - one["bytes"]
            for one in serving["weights"]
        )
    except (KeyError, TypeError):
        return False


def _check(path: Path, said: Mapping[str, Any]) -> None:
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(0, "it is no ordinary file")  # a pipe would be waited for
        found = file_hash(path)
    except OSError as error:
        raise ModelFileError(f"{CALL}: '{path}' cannot be read: {error.strerror or error}") from None
    if found != said["sha256"]:
        raise ModelFileError(f"{CALL}: '{path}' was changed: its SHA-256 is not the one that was recorded")


def _located(content: bytes, data: str) -> bytes:
    """The model with its external data in the file ``data`` beside it."""
    model = onnx.ModelProto.FromString(content)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = data
    return serialized(model)


def _shown(kind: tuple[str, list[int]] | str) -> str:
    return kind if isinstance(kind, str) else f"{kind[0]} {kind[1]}"
