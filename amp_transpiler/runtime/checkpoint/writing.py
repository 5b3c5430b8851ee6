"""A checkpoint on disk: one folder with ``state.safetensors`` and ``meta.json``, written whole or not at all.

A save writes into a hidden temporary folder beside its target, syncs it, and renames it. Where the target is a
checkpoint already, the tensors move in under a name of their own, and replacing ``meta.json``, which names them, is
what makes the new checkpoint the valid one. So at every moment a folder with a ``meta.json`` is a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from amp_transpiler.errors import CheckpointError, CheckpointWriteError, ModelFileWriteError, ScopeError
from amp_transpiler.file_targets import check_space
from amp_transpiler.files import Workspace, set_mode, sync_folder
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import BYTES
from amp_transpiler.locks_of_files import lock
from amp_transpiler.runtime import device_tensors

#: Seconds for which another that replaces the same checkpoint is waited for.
_PATIENCE = 60.0
META, TENSORS = "meta.json", "state.safetensors"
FORMAT, VERSION = "amp_transpiler.checkpoint", 1
_STEP = re.compile(r"step_([0-9]{8,})")
TENSOR_FILES = re.compile(r"state(_[0-9]+)?\.safetensors")
#: The element types of safetensors files by the names that they have there; the elements of another are written as
#: bytes.
SAFETENSORS_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


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
    except OSError as error:
        raise CheckpointError(f"folder '{path}' cannot be read: {error.strerror or error}") from None
    found = [(int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))]
    return [path / name for _, name in sorted(found) if (path / name / META).is_file()]


# -- writing -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Awaited:
    """A tensor that is written when it has come from another rank, with what is asked of an OrtValue before."""

    dtype: str
    sizes: tuple[int, ...]

    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.sizes

    def tensor_size_in_bytes(self) -> int:
        """The bytes that it takes."""
        return math.prod(self.sizes) * BYTES[self.dtype]


def awaited(variable: Variable) -> Awaited:
    """What stands for a variable of fixed shape until it comes."""
    return Awaited(str(variable.dtype), static(variable.shape) or ())


def write_checkpoint(
    target: Path, values: Mapping[str, Any], meta: dict[str, Any], pieces: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write tensors (OrtValues by name) and what is said of them; CheckpointWriteError where that fails.

    ``meta`` gets the name, size and checksum of the tensors file, and a checksum of its own. ``pieces``: the bytes of
    each :class:`Awaited`, one tensor at a time.
    """
    try:
        target = Path(os.path.realpath(target))  # the folder itself may be a link
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target, sum(value.tensor_size_in_bytes() for value in values.values()))
        workspace = Workspace(target.parent)
        try:
            made = workspace.new
            write_tensors(made / TENSORS, values, pieces)
            size = (made / TENSORS).stat().st_size
            meta["file"] = {"name": TENSORS, "bytes": size, "sha256": file_hash(made / TENSORS)}
            if (target / META).is_file():
                with _alone_in(target):
                    _replace(target, made, meta)
            else:
                _write_meta(made, meta)
                _move(made, target)
        finally:
            workspace.remove()
    except ModelFileWriteError as error:
        raise CheckpointWriteError(f"checkpoint {error}") from None
    except (OSError, SafetensorError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise CheckpointWriteError(
            f"checkpoint '{target}' cannot be written: {reason}; the checkpoints that were there are as they were"
        ) from None


def write_tensors(path: Path, values: Mapping[str, Any], pieces: Iterable[tuple[str, np.ndarray]] = ()) -> None:
    """Write OrtValues by name as a safetensors file, and bring it to the disk. ``pieces``: see above."""
    held: list[Any] = []  # the file is written from memory as it lies
    awaited = {name: value.tensor_size_in_bytes() for name, value in values.items() if isinstance(value, Awaited)}
    blank = np.zeros(max(awaited.values(), default=0), np.uint8)  # stands for each of them, until it is written there
    specs = {name: _spec(value, held, blank) for name, value in values.items()}
    serialize_file(specs, path, metadata={"format": FORMAT})
    missing = awaited.keys() - _fill(path, pieces) if awaited else ()
    if missing:
        raise ScopeError(
            f"variable '{min(missing)}' lies on another rank, which does not send it; call this on all ranks that "
            "trained, with the program that they trained"
        )
    set_mode(path, path.parent.stat().st_mode & 0o666)  # which safetensors lets its own user alone read
    _sync(path)


def _fill(path: Path, pieces: Iterable[tuple[str, np.ndarray]]) -> set[str]:
    """Write the bytes of tensors where they lie in a file of safetensors; the names of those that came."""
    filled = set[str]()
    with open(path, "r+b") as stream:
        places = tensor_places(stream)
        for name, content in pieces:
            stream.seek(places[name])
            stream.write(content.data)
            filled.add(name)
    return filled


def tensor_places(stream: BinaryIO) -> dict[str, int]:
    """Where the bytes of each tensor begin in a file of safetensors that is well formed."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(length))
    return {name: 8 + length + said["data_offsets"][0] for name, said in header.items() if name != "__metadata__"}


def _spec(value: Any, held: list[Any], blank: np.ndarray) -> Any:
    if isinstance(value, Awaited):
        size = value.tensor_size_in_bytes()
        return TensorSpec(dtype=value.dtype, shape=list(value.sizes), data_ptr=blank.ctypes.data, data_len=size)
    dtype = device_tensors.dtype_of(value)
    if dtype not in SAFETENSORS_TYPES.values():
        array = device_tensors.to_array(value).view("uint8")
        value, dtype = device_tensors.from_array(array), "uint8"
    value = device_tensors.on_host(value)
    held.append(value)
    return TensorSpec(
        dtype=dtype, shape=list(value.shape()), data_ptr=value.data_ptr(), data_len=value.tensor_size_in_bytes()
    )


def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
    content = {key: value for key, value in meta.items() if key != "checksum"}
    content["checksum"] = checksum(content)
    with open(folder / META, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(folder)


def _move(made: Path, target: Path) -> None:
    """Give a whole checkpoint its name. OSError where the name is taken by something else than an empty folder."""
    if target.is_dir() and os.listdir(target):
        raise OSError(0, "the folder is there, is not empty, and is no checkpoint; name another, or a new one")
    if target.is_dir() and os.name != "posix":
        target.rmdir()  # only POSIX renames a folder to an empty one
    made.rename(target)
    sync_folder(target.parent)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process or thread at a time replaces a checkpoint: others would remove tensors that nothing names yet.

    CheckpointWriteError where another has it for a minute, as a training has its own folder.
    """
    handle = os.open(folder, os.O_RDONLY) if os.name == "posix" else None
    until = time.monotonic() + _PATIENCE
    try:
        while handle is not None:
            try:
                lock(handle)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointWriteError(
                        f"checkpoint '{folder}' cannot be replaced: another process or training writes there; wait for "
                        "it, or give another folder"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _replace(target: Path, made: Path, meta: dict[str, Any]) -> None:
    """Let the folder of a checkpoint hold a new one."""
    before = [name for name in os.listdir(target) if TENSOR_FILES.fullmatch(name)]
    free = (f"state_{number}.safetensors" for number in range(1, len(before) + 2))
    name = TENSORS if TENSORS not in before else next(name for name in free if name not in before)
    meta["file"]["name"] = name
    _write_meta(made, meta)
    (made / TENSORS).rename(target / name)
    try:
        sync_folder(target)
        os.replace(made / META, target / META)
    except BaseException:  # Ctrl-C too
        if (made / META).exists():  # nobody reads the tensors, and they go with the workspace
            (target / name).rename(made / TENSORS)
        raise
    with suppress(OSError):  # the new one is there
        sync_folder(target)
    for old in before:
        with suppress(OSError):  # the next one removes it
            (target / old).unlink()


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint: it stops being one at once, by losing a name, and then its files go; others stay there.

    FileNotFoundError where it is not there.
    """
    found = os.listdir(folder)
    own = [META, *(name for name in found if TENSOR_FILES.fullmatch(name))]
    workspace = Workspace(folder.parent)
    try:
        for path in (folder / name for name in own) if set(found) - set(own) else (folder,):
            path.rename(workspace.new / path.name)
    finally:
        workspace.remove()


def _sync(file: Path) -> None:
    """Bring a file to the disk."""
    handle = os.open(file, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: Path) -> str:
    """The checksum of a file."""
    with open(path, "rb") as stream:
        return stream_hash(stream)


def stream_hash(stream: BufferedReader) -> str:
    """The checksum of what is left of an open file."""
    return hashlib.file_digest(stream, "sha256").hexdigest()


def checksum(content: dict[str, Any]) -> str:
    """That of what a checkpoint says of itself."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
