"""The folder of an exported step: its files appear together, or none of them does."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
from safetensors import SafetensorError

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, ModelFileWriteError
from amp_transpiler.export.manifest import FORMAT, MANIFEST
from amp_transpiler.export.serving import SERVED, places_of
from amp_transpiler.file_targets import check_space
from amp_transpiler.files import Group, put
from amp_transpiler.ir.serializing import LIMIT, serialized
from amp_transpiler.runtime.checkpoint.writing import META, TENSORS, checksum, file_hash, write_tensors

#: Bytes from which on a constant goes into the data file of a model that is too large for one file.
_WORTH = 1024


def checked_folder(folder: Any, call: str, overwrite: bool) -> Path:
    """Where an exported step is written. ArgumentError where something is there that must stay."""
    if not isinstance(folder, (str, os.PathLike)) or not str(folder) or "\0" in str(folder):
        raise ArgumentTypeError(f"{call} takes a folder first, got {folder!r}")
    path = Path(folder)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "a symbolic link" if path.is_symlink() else "a file"
        raise ArgumentError(f"{call}: '{path}' is {kind}; name a new folder, or one that holds an exported step")
    if not path.is_dir() or not os.listdir(path):
        return path
    if not _is_ours(path):
        raise ArgumentError(f"{call}: folder '{path}' is not empty, and holds no exported step; name another")
    if not overwrite:
        flag = "--overwrite" if call == "export-step" else "overwrite=True"
        raise ArgumentError(f"{call}: folder '{path}' holds an exported step already; {flag} replaces it")
    return path


def _is_ours(folder: Path) -> bool:
    return isinstance(said := _said(folder), dict) and said.get("format") == FORMAT


def _said(folder: Path) -> Any:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_folder(
    folder: Path,
    models: Mapping[str, onnx.ModelProto],
    values: Mapping[str, Any],
    meta: Mapping[str, Any],
    manifest: dict[str, Any],
    served: onnx.ModelProto | None,
) -> None:
    """Write models and state (OrtValues by name), which is a checkpoint, and the manifest, which names the files.

    ``served`` is the model with its weights inside; the manifest gets to know where in its files they lie.

    ModelFileWriteError where that fails; the folder is then as it was.
    """
    before = _said(folder) if folder.is_dir() else None
    made = _make(folder)
    try:
        with Group() as group:
            check_space(folder / TENSORS, sum(value.tensor_size_in_bytes() for value in values.values()))
            group.add(folder / TENSORS, put(b""))
            try:
                write_tensors(group.staged(folder / TENSORS), values)
                sums = {TENSORS: _sums(group.staged(folder / TENSORS))}
            except (OSError, SafetensorError) as error:
                reason = (isinstance(error, OSError) and error.strerror) or error
                raise ModelFileWriteError(
                    f"'{folder / TENSORS}' cannot be written: {reason}; nothing changed"
                ) from None
            names = [META]
            said = {**meta, "file": {"name": TENSORS, **sums[TENSORS]}}
            group.add(folder / META, put(_json({**said, "checksum": checksum(said)})))
            for name, model in models.items():
                data, _ = _add_model(group, folder, name, model)
                manifest["models"][name]["data"] = data
                names += [*filter(None, [data]), f"{name}.onnx"]
            manifest["serving"] = None
            if served is not None:
                data, content = _add_model(group, folder, SERVED, served)
                file = f"{SERVED}.onnx"
                weights = places_of(served, content, file, list(values))
                manifest["serving"] = {"file": file, "data": data, "weights": weights}
                names += [*filter(None, [data]), file]
            manifest["files"] = sums | {name: _sums(group.staged(folder / name)) for name in names}
            group.add(folder / MANIFEST, put(_json(manifest)))
            group.commit()
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise
    _remove_stale(folder, before, {*manifest["files"], MANIFEST})


def _make(folder: Path) -> bool:
    """Make the folder where there is none."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        raise ModelFileWriteError(f"folder '{folder}' cannot be made: {error.strerror or error}") from None
    return True


def _remove_stale(folder: Path, before: Any, written: set[str]) -> None:
    """Remove the files of the exported step that was there before, and that this one does not have."""
    files = before.get("files") if isinstance(before, dict) else None
    for name in set(files) - written if isinstance(files, dict) else ():
        if name == os.path.basename(name):
            with suppress(OSError):
                (folder / name).unlink()


def _add_model(group: Group, folder: Path, name: str, model: onnx.ModelProto) -> tuple[str | None, bytes]:
    """Add a model and, where one file cannot hold it, its constants; the name of their file, and what is in its own."""
    moved = _moved_out(model, data := f"{name}.onnx.data")
    if moved:
        group.add(folder / data, lambda stream: stream.writelines(moved))
    content = serialized(model)
    group.add(folder / f"{name}.onnx", put(content))
    return data if moved else None, content


def _moved_out(model: onnx.ModelProto, location: str) -> list[bytes]:
    """The content of constants that do not fit into one file with the model, which names ``location`` for them."""
    large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= _WORTH]
    parts = [bytes(tensor.raw_data) for tensor in large]
    if sum(map(len, parts)) <= LIMIT:
        return []
    offset = 0
    for tensor, part in zip(large, parts, strict=True):
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", offset), ("length", len(part))):
            tensor.external_data.add(key=key, value=str(value))
        offset += len(part)
    return parts


def _sums(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_hash(path)}


def _json(content: Any) -> bytes:
    """Names as they are, in UTF-8: not every reader puts halves of characters together."""
    return json.dumps(content, indent=1, ensure_ascii=False).encode()
