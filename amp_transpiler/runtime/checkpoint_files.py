"""A checkpoint on disk: one folder with ``state.safetensors`` and ``meta.json``, written whole or not at all.

A save writes into a hidden temporary folder beside its target, syncs it, and renames it. Where the target is a
checkpoint already, the tensors move in under a name of their own, and replacing ``meta.json``, which names them, is
what makes the new checkpoint the valid one. So at every moment a folder with a ``meta.json`` is a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from ..errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError
from ..ir.types import numpy_dtype
from . import tensors
from .place import CPUPlace

try:
    import fcntl
except ImportError:  # Windows: what a killed save left stays there
    fcntl = None  # type: ignore[assignment]

META, TENSORS = "meta.json", "state.safetensors"
FORMAT, VERSION = "amp_transpiler.checkpoint", 1
_STEP = re.compile(r"step_(\d{8,})")
_TENSOR_FILES = re.compile(r"state(_\d+)?\.safetensors")
#: What temporary folders are called: a prefix that is nobody else's, for they are removed.
_TEMPORARY = (".amp_checkpoint.", ".tmp")
#: Element types that the file format has; the elements of another are written as bytes.
_STORED = frozenset({"bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
                     "bfloat16", "float32", "float64"})  # fmt: skip


# -- names ---------------------------------------------------------------------------------------------
def step_folder(path: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return path / f"step_{step:08d}"


def step_folders(path: Path) -> list[Path]:
    """The folders of steps below ``path`` that hold a checkpoint, by step."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))]
    return [path / name for _, name in sorted(found) if (path / name / META).is_file()]


# -- writing -------------------------------------------------------------------------------------------
def write_checkpoint(target: Path, values: Mapping[str, Any], meta: dict[str, Any]) -> None:
    """Write tensors (OrtValues by name) and what is said of them; CheckpointWriteError where that fails.

    ``meta`` gets the name, size and checksum of the tensors file, and a checksum of its own.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        with _temporary_folder(target) as made:
            _write_tensors(made / TENSORS, values)
            meta["file"] = {"name": TENSORS, "bytes": (made / TENSORS).stat().st_size, "sha256": _hash(made / TENSORS)}
            if (target / META).is_file():
                _replace(target, made, meta)
            else:
                _write_meta(made, meta)
                _move(made, target)
    except (OSError, SafetensorError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise CheckpointWriteError(f"checkpoint '{target}' cannot be written: {reason}; the checkpoints that were "
                                   "there are as they were") from None  # fmt: skip


def _write_tensors(path: Path, values: Mapping[str, Any]) -> None:
    held: list[Any] = []  # the file is written from memory as it lies
    specs = {name: _spec(value, held) for name, value in values.items()}
    serialize_file(specs, path, metadata={"format": FORMAT})
    path.chmod(0o666 & ~_umask())
    _sync(path)


def _spec(value: Any, held: list[Any]) -> Any:
    dtype = tensors.dtype_of(value)
    if dtype not in _STORED:
        array = tensors.to_array(value).view("uint8")
        value, dtype = tensors.from_array(array), "uint8"
    elif value.device_name() != "cpu":
        value = tensors.copy_to(value, CPUPlace())
    held.append(value)
    return TensorSpec(dtype=dtype, shape=list(value.shape()), data_ptr=value.data_ptr(),
                      data_len=value.tensor_size_in_bytes())  # fmt: skip


def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
    content = {key: value for key, value in meta.items() if key != "checksum"}
    content["checksum"] = _checksum(content)
    with open(folder / META, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(folder)


def _move(made: Path, target: Path) -> None:
    """Give a whole checkpoint its name. OSError where the name is taken by something else than an empty folder."""
    if target.is_dir() and os.listdir(target):
        raise OSError(0, "the folder is there, is not empty, and is no checkpoint; name another, or a new one")
    if target.is_dir() and os.name != "posix":
        target.rmdir()  # only POSIX renames a folder to an empty one
    made.rename(target)
    _sync(target.parent)


def _replace(target: Path, made: Path, meta: dict[str, Any]) -> None:
    """Let the folder of a checkpoint hold a new one."""
    before = [name for name in os.listdir(target) if _TENSOR_FILES.fullmatch(name)]
    free = (f"state_{number}.safetensors" for number in range(1, len(before) + 2))
    name = TENSORS if TENSORS not in before else next(name for name in free if name not in before)
    meta["file"]["name"] = name
    _write_meta(made, meta)
    (made / TENSORS).rename(target / name)
    _sync(target)
    os.replace(made / META, target / META)
    _sync(target)
    for old in before:
        (target / old).unlink(missing_ok=True)


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, locked while this process works in it, and gone afterwards if it kept its name."""
    made = Path(tempfile.mkdtemp(_TEMPORARY[1], _TEMPORARY[0], target.parent))
    handle = None
    try:
        if fcntl is not None:
            handle = os.open(made, os.O_RDONLY)
            _lock(handle)
        made.chmod(0o777 & ~_umask())
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _lock(handle: int) -> bool:
    """Take the lock of a folder, which ends with the process; False where another has it or there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of saves that were killed."""
    if fcntl is None:
        return
    for name in os.listdir(folder):
        if not (name.startswith(_TEMPORARY[0]) and name.endswith(_TEMPORARY[1])):
            continue
        handle = os.open(folder / name, os.O_RDONLY)
        try:
            if _lock(handle):
                shutil.rmtree(folder / name, ignore_errors=True)
        finally:
            os.close(handle)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint: it stops being one at once, by losing its name, and then its files go."""
    hidden = Path(tempfile.mkdtemp(_TEMPORARY[1], _TEMPORARY[0], folder.parent))
    folder.rename(hidden / folder.name)
    shutil.rmtree(hidden, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# -- reading -------------------------------------------------------------------------------------------
def read_meta(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. CheckpointNotFoundError, CheckpointError for what is none, or is damaged."""
    try:
        text = (folder / META).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(_not_found(folder)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{folder / META}' cannot be read: {error}") from None
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{damaged(folder)}: {META} is cut short or changed ({error})") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CheckpointError(f"'{folder / META}' is not that of a checkpoint of this package")
    if meta.get("version") != VERSION:
        raise CheckpointError(f"checkpoint '{folder}' has format version {meta.get('version')!r}; this version of the "
                              f"package reads {VERSION}")  # fmt: skip
    if meta.pop("checksum", None) != _checksum(meta):
        raise CheckpointError(f"{damaged(folder)}: the content of {META} does not match its checksum")
    return meta


def damaged(folder: Path) -> str:
    """The head of a message on a damaged checkpoint."""
    others = [other for other in step_folders(folder.parent) if other != folder]
    return f"checkpoint '{folder}' is damaged" + (f" (there is '{others[-1].name}' beside it)" if others else "")


def _not_found(folder: Path) -> str:
    if not folder.exists():
        return f"there is no checkpoint '{folder}'"
    if not folder.is_dir():
        return f"'{folder}' is a file; a checkpoint is a folder, and load_weights reads files of weights"
    if any(folder.glob("*.safetensors")):
        return (f"folder '{folder}' has no {META}, so it is no checkpoint of this package; load_weights reads other "
                "safetensors files")  # fmt: skip
    return f"folder '{folder}' holds no checkpoint"


class TensorFile:
    """The verified tensors file of a checkpoint: ``read(name)`` gives a tensor."""

    def __init__(self, folder: Path, meta: Mapping[str, Any]) -> None:
        said = meta["file"]
        path = folder / said["name"]
        try:
            size = path.stat().st_size
            if size != said["bytes"]:
                raise CheckpointError(f"{damaged(folder)}: {path.name} has {size} bytes, not {said['bytes']}")
            if _hash(path) != said["sha256"]:
                raise CheckpointError(f"{damaged(folder)}: the content of {path.name} does not match its checksum")
            self._file = safe_open(path, framework="numpy")
        except OSError as error:
            raise CheckpointError(f"{damaged(folder)}: {path.name}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise CheckpointError(f"{damaged(folder)}: {path.name}: {error}") from None
        self._said = meta["tensors"]

    def read(self, name: str) -> np.ndarray:
        """A tensor, as the element type that its variable had."""
        array = self._file.get_tensor(name)
        dtype = numpy_dtype(self._said[name]["dtype"])
        return array if array.dtype == dtype else array.view(dtype)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
