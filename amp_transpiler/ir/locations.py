"""Where the external data of a model may lie, and which files a model consists of.

A location is a relative path without ``..``. What it leads to, links followed, lies in the model's folder or below. The
caches of model hubs keep every file under its hash in one folder and link to it (``snapshots/<rev>/model.onnx ->
../../blobs/<hash>``, and its data likewise): where the model file is itself a symbolic link, data may lie in the folder
of the file that it leads to as well. No other link may leave: a model from elsewhere could read any file through it.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

import onnx
from google.protobuf.message import DecodeError, Message

from amp_transpiler.errors import ModelFileError, ModelFileNotFoundError

_SHOWN = 200  # characters of a location in a message
#: The fields through which a message holds tensors.
_HOLDERS = frozenset(
    {
        "graph",
        "node",
        "attribute",
        "t",
        "tensors",
        "g",
        "graphs",
        "initializer",
        "sparse_initializer",
        "values",
        "indices",
        "sparse_tensor",
        "sparse_tensors",
        "functions",
        "training_info",
        "initialization",
        "algorithm",
    }
)


def located(location: str, folder: Path, model: Path | None, what: str) -> Path:
    """The file at a location; ``what`` names tensor and model in messages.

    ``folder`` is where locations begin, ``model`` the model file where one was read. ModelFileNotFoundError,
    ModelFileError: there is no such file, it lies elsewhere, or it is no ordinary file.
    """
    shown = repr(location if len(location) <= _SHOWN else f"{location[:_SHOWN]}…")
    parts = Path(location).parts
    rooted = location.startswith(("/", "\\")) or bool(PureWindowsPath(location).drive)
    if not parts or "\0" in location or rooted or ".." in parts:
        raise ModelFileError(f"{what} refers to the external file {shown}, which does not lie in the model's folder")
    file = folder / location
    try:
        found = os.stat(file)
        real = os.path.realpath(file, strict=True)
    except FileNotFoundError:
        raise ModelFileNotFoundError(f"{what} lies in the external file '{file}', which is missing") from None
    except OSError as error:
        raise ModelFileError(
            f"{what} lies in the external file {shown} of '{folder}', which cannot be read: {error.strerror or error}"
        ) from None
    if not any(_below(real, tree) for tree in _trees(folder, model)):
        raise ModelFileError(
            f"{what} refers to the external file {shown}, a link out of the model's folder, to "
            f"'{real}'; put a copy of the data beside the model"
        )
    if not stat.S_ISREG(found.st_mode):
        raise ModelFileError(f"{what} refers to the external file {shown}, which is no ordinary file")
    return file


def _trees(folder: Path, model: Path | None) -> list[str]:
    trees = [os.path.realpath(folder)]
    if model is not None and model.parent == folder and model.is_symlink():
        trees.append(os.path.dirname(os.path.realpath(model)))
    return trees


def _below(path: str, tree: str) -> bool:
    return path.startswith(tree.rstrip(os.sep) + os.sep)


def external_tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Every tensor in a protobuf message of onnx that keeps its content in an external file."""
    if isinstance(message, onnx.TensorProto):
        if message.data_location == onnx.TensorProto.EXTERNAL:
            yield message
        return
    for field, value in message.ListFields():
        if field.name in _HOLDERS and field.message_type is not None:  # a function's attributes are names
            for item in [value] if isinstance(value, Message) else value:
                yield from external_tensors(item)


def location_of(tensor: onnx.TensorProto) -> str:
    """What a tensor says of its external file, the last word where there are several; "" where it says nothing."""
    said: dict[str, str] = {entry.key: entry.value for entry in tensor.external_data}
    return said.get("location", "")


def model_size(path: str | os.PathLike[str]) -> int:
    """Bytes of the files of a model, as far as they are there."""
    return total_size(model_files(path))


def total_size(files: Iterable[Path]) -> int:
    """Bytes of files, as far as they are there."""
    return sum(file.stat().st_size for file in files if os.path.isfile(file))


def model_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a model: itself, and those in which its tensors lie, whether they are there or not.

    Of a file that is no model, that file alone: reading it says what is wrong.
    """
    file = Path(path)
    try:
        if not file.is_file():  # a pipe can be read once
            return [file]
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"location") < 0:
                return [file]
            found = external_tensors(onnx.ModelProto.FromString(content[:]))
            return [file, *(file.parent / place for place in dict.fromkeys(map(location_of, found)) if place)]
    except (OSError, ValueError, DecodeError):
        return [file]
