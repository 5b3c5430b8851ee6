"""Files on disk: a model and its external data, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from ..errors import ModelFileError, ModelFileWriteError

#: protobuf's limit for one message, less room for what surrounds the tensors.
LIMIT = 2**31 - 2**24

Write = Callable[[BinaryIO], None]


def write_files(files: Sequence[tuple[Path, Write]]) -> None:
    """Write several files that belong together: all to temporary files first, then each renamed, in order.

    The last one is the model; folders below its own are made. ModelFileWriteError where a file cannot be written
    (disk full, no such folder, no permission); then none of them is there, and files of these names that were there
    before are as they were.
    """
    temporary: list[Path] = []
    made_folders: list[Path] = []
    home = files[-1][0].parent
    path = Path()
    try:
        for path, write in files:
            if home in path.parent.parents:
                made_folders += _make_folders(path.parent)
            if path.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            temporary.append(_write_temporary(path, write))
        for (path, _), made in zip(files, temporary, strict=True):
            os.replace(made, path)
        for folder in {path.parent for path, _ in files}:
            _sync_folder(folder)
        made_folders.clear()
    except OSError as error:
        raise ModelFileWriteError(f"'{path}' cannot be written: {error.strerror or error}; nothing changed") from None
    finally:
        for made in temporary:
            made.unlink(missing_ok=True)
        for folder in reversed(made_folders):
            folder.rmdir()


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and what is missing above it; gives those that were made, outermost first."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()][::-1]
    for one in missing:
        one.mkdir()
    return missing


def _write_temporary(path: Path, write: Write) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    made = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        made.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return made


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the renames last through a power cut, where folders can be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def serialized(model: onnx.ModelProto) -> bytes:
    """The model's bytes, the same for the same model; ModelFileError beyond protobuf's 2 GB."""
    try:
        return model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError):
        raise ModelFileError(f"model '{model.graph.name}' is larger than the 2 GB that one file can hold; write it "
                             "with external_data=True") from None  # fmt: skip


def write_model(model: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write one model file, whole or not at all."""
    content = serialized(model)
    write_files([(Path(path), lambda stream: put(content, stream))])


def put(content: bytes, stream: BinaryIO) -> None:
    """Write ``content``; for :func:`write_files`."""
    stream.write(content)
