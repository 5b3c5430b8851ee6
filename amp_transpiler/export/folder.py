"""The folder of an exported step: its files appear together, or none of them does."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
from safetensors import SafetensorError

from amp_transpiler.errors import ArgumentError, ModelFileWriteError
from amp_transpiler.export.manifest import FORMAT, MANIFEST, PlaceStep
from amp_transpiler.export.serving import SERVED, places_of
from amp_transpiler.file_targets import check_space, folder_path
from amp_transpiler.files import Group, put, remove_leftovers
from amp_transpiler.ir.serializing import LIMIT, serialized
from amp_transpiler.runtime.checkpoint.writing import META, TENSORS, checksum, file_hash, write_tensors

#: Bytes from which on a constant goes into the data file of a model that is too large for one file.
_WORTH = 1024


def checked_folder(folder: Any, call: str, overwrite: bool) -> Path:
    """Where an exported step is written. ArgumentError where something is there that must stay."""
    path = folder_path(folder, f"{call}: folder")
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path)):
        kind = "a symbolic link" if os.path.islink(path) else "a file"
        raise ArgumentError(f"{call}: '{path}' is {kind}; name a new folder, or one that holds an exported step")
    remove_leftovers(path)  # an export that was killed here is done again
    try:
        if not os.listdir(path):
            return path
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ModelFileWriteError(f"{call}: folder '{path}' cannot be read: {error.strerror or error}") from None
    if not _is_ours(path):
        raise ArgumentError(f"{call}: folder '{path}' is not empty, and holds no exported step; name another")
    if not overwrite:
        flag = "--overwrite" if call == "export-step" else "overwrite=True"
        raise ArgumentError(f"{call}: folder '{path}' holds an exported step already; {flag} replaces it")
    return path


def _is_ours(folder: Path) -> bool:
    return isinstance(said := _said(folder), dict) and said.get("format") == FORMAT


def _said(folder: Path) -> Any:
    if not os.path.isfile(folder / MANIFEST):  # a pipe would be waited for
        return None
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_folder(
    folder: Path,
    places: Sequence[PlaceStep],
    values: Mapping[str, Any],
    meta: Mapping[str, Any],
    manifest: dict[str, Any],
    served: onnx.ModelProto | None,
) -> None:
    """Write the models of places, the state (OrtValues by name), which is a checkpoint, and the manifest.

    The manifest gets to know the files: the first place has ``train.onnx``, another ``train.webgpu.onnx``. ``served``
    is the model with its weights inside; the manifest says where in its files they lie.

    ModelFileWriteError where that fails; the folder is then as it was.
    """
    before = _said(folder)
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
            for number, (step, said_of) in enumerate(zip(places, manifest["places"], strict=True)):
                own = []
                for name, model in step.models.items():
                    file = f"{name}.{step.place.kind}.onnx" if number else f"{name}.onnx"
                    data, _ = _add_model(group, folder, file, model.model)
                    said_of["models"][name] |= {"file": file, "data": data}
                    own += [*filter(None, [data]), file]
                said_of["files"] = {file: _sums(group.staged(folder / file)) for file in own}
            manifest["serving"] = None
            if served is not None:
                data, content = _add_model(group, folder, SERVED, served)
                weights = places_of(served, content, list(values))
                manifest["serving"] = {"file": SERVED, "data": data, "weights": weights}
                names += [*filter(None, [data]), SERVED]
            manifest["files"] = sums | {name: _sums(group.staged(folder / name)) for name in names}
            group.add(folder / MANIFEST, put(_json(manifest)))
            group.commit()
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise
    _remove_stale(folder, before, _files(manifest) | {MANIFEST})


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
    for name in _files(before) - written:
        if name == os.path.basename(name):
            with suppress(OSError):
                (folder / name).unlink()


def _files(manifest: Any) -> set[str]:
    """The files that a manifest names, which may be a damaged one."""
    said = manifest if isinstance(manifest, dict) else {}
    places = said.get("places")
    holders = [said, *(one for one in (places if isinstance(places, list) else ()) if isinstance(one, dict))]
    return set().union(*(files for one in holders if isinstance(files := one.get("files"), dict)))


def _add_model(group: Group, folder: Path, file: str, model: onnx.ModelProto) -> tuple[str | None, bytes]:
    """Add a model and, where one file cannot hold it, its constants; the name of their file, and what is in its own."""
    moved = _moved_out(model, data := f"{file}.data")
    if moved:
        group.add(folder / data, lambda stream: stream.writelines(moved))
    content = serialized(model)
    group.add(folder / file, put(content))
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
