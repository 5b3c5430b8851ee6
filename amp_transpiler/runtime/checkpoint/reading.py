"""A checkpoint from disk: everything that it says of itself is verified before any of it is used."""

from __future__ import annotations

import json
import re
import stat
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from amp_transpiler.errors import CheckpointError, CheckpointNotFoundError
from amp_transpiler.files import stamp
from amp_transpiler.ir.types import ONNX_TYPES, numpy_dtype
from amp_transpiler.runtime.checkpoint.writing import (
    FORMAT,
    META,
    SAFETENSORS_TYPES,
    TENSOR_FILES,
    VERSION,
    checksum,
    step_folders,
    stream_hash,
    tensor_places,
)

#: Bytes that no ``meta.json`` has: a tensor takes some hundred.
_LARGEST_META = 2**28
_DTYPES = frozenset(ONNX_TYPES) - {"string"}
_HASH = re.compile(r"[0-9a-f]{64}")
_ANYTHING = object()


#: Whether a value will do, and in words what would.
Rule = tuple[Callable[[Any], bool], str]


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _text(value: Any) -> bool:
    return isinstance(value, str)


_COUNT = (_count, "a whole number >= 0")
_TEXT = (_text, "a string")
_FIELDS: dict[str, Rule] = {
    "number": _COUNT,
    "step": (lambda value: value is None or _count(value), "null or a whole number >= 0"),
    "data_position": (lambda value: True, "anything"),
    "extra": (lambda value: True, "anything"),
    "program": (lambda value: isinstance(value, dict), "an object"),
    "program.name": _TEXT,
    "program.fingerprint": _TEXT,
    "scaling": (
        lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
        "a list of objects",
    ),
    "versions": (lambda value: isinstance(value, dict) and all(map(_text, value.values())), "an object of strings"),
    "tensors": (lambda value: isinstance(value, dict), "an object"),
    "file": (lambda value: isinstance(value, dict), "an object"),
    "file.name": (
        lambda value: _text(value) and TENSOR_FILES.fullmatch(value) is not None,
        "state.safetensors or state_<number>.safetensors",
    ),
    "file.bytes": _COUNT,
    "file.sha256": (lambda value: _text(value) and _HASH.fullmatch(value) is not None, "64 hexadecimal digits"),
}
_TENSOR: dict[str, Rule] = {
    "dtype": (lambda value: _text(value) and value in _DTYPES, "an element type"),
    "shape": (lambda value: isinstance(value, list) and all(map(_count, value)), "a list of whole numbers >= 0"),
    "role": (lambda value: _text(value) and value != "", "a string that is not empty"),
    "of": _TEXT,
    "number": _COUNT,
}
_OPTIONAL = frozenset({"of", "number"})


def read_meta(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, every field verified.

    CheckpointNotFoundError, CheckpointError for what is none, or is damaged; the message names file and field.
    """
    meta = _parsed(folder)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CheckpointError(f"'{folder / META}' is not that of a checkpoint of this package")
    version = meta.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"checkpoint '{folder}' has format version {version!r:.80}; this version of the package reads {VERSION}"
        )
    if meta.pop("checksum", None) != checksum(meta):
        raise CheckpointError(f"{damaged(folder)}: the content of {META} does not match its checksum")
    for field in _FIELDS:
        outer, _, inner = field.partition(".")
        _verify(folder, meta[outer] if inner else meta, inner or outer, field, _FIELDS[field])
    for name, said in meta["tensors"].items():
        where = f"tensors.{name!r:.200}"
        if not isinstance(said, dict):
            raise CheckpointError(f"{damaged(folder)}: {META}: {where} is {said!r:.80}; expected an object")
        for key, rule in _TENSOR.items():
            if key in said or key not in _OPTIONAL:
                _verify(folder, said, key, f"{where}.{key}", rule)
    return meta


def _parsed(folder: Path) -> Any:
    path = folder / META
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_META:
            raise CheckpointError(f"'{path}' is no file that a checkpoint has")
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(_not_found(folder)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{damaged(folder)}: {META} is cut short or changed ({error})") from None


def _verify(folder: Path, held: Mapping[str, Any], key: str, where: str, rule: Rule) -> None:
    holds, expected = rule
    value = held.get(key, _ANYTHING)
    if value is _ANYTHING:
        raise CheckpointError(f"{damaged(folder)}: {META} lacks '{where}' ({expected})")
    if not holds(value):
        raise CheckpointError(f"{damaged(folder)}: {META}: '{where}' is {value!r:.80}; expected {expected}")


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
        return (
            f"folder '{folder}' has no {META}, so it is no checkpoint of this package; load_weights reads other "
            "safetensors files"
        )
    return f"folder '{folder}' holds no checkpoint"


class TensorFile:
    """The verified tensors file of a checkpoint: it holds the tensors that ``meta`` says, and ``read(name)`` gives one.

    CheckpointError where it is not the file that was saved. It stays open, since another process may replace it; it is
    read and not mapped, since pages of a file that is mapped count as memory of this process.
    """

    def __init__(self, folder: Path, meta: Mapping[str, Any]) -> None:
        said = meta["file"]
        path = folder / said["name"]
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{damaged(folder)}: {path.name} is no ordinary file")
            if found.st_size != said["bytes"]:
                raise CheckpointError(f"{damaged(folder)}: {path.name} has {found.st_size} bytes, not {said['bytes']}")
            self._stream = open(path, "rb")  # noqa: SIM115 (closed with this object)
            weakref.finalize(self, self._stream.close)
            if stream_hash(self._stream) != said["sha256"]:
                raise CheckpointError(f"{damaged(folder)}: the content of {path.name} does not match its checksum")
            file = safe_open(path, framework="numpy")
            self._said, self._where = meta["tensors"], f"{damaged(folder)}: {path.name}"
            for name in sorted(self._said.keys() ^ set(file.keys())):
                where, other = (META, path.name) if name in self._said else (path.name, META)
                raise CheckpointError(f"{damaged(folder)}: {where} has a tensor {name!r:.200}, {other} has not")
            for name in self._said:
                self._verify(name, file.get_slice(name), f"{damaged(folder)}: tensor {name!r:.200}", path.name)
            self._places = tensor_places(self._stream)
        except OSError as error:
            raise CheckpointError(f"{damaged(folder)}: {path.name}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise CheckpointError(f"{damaged(folder)}: {path.name}: {error}") from None

    def _verify(self, name: str, piece: Any, where: str, file: str) -> None:
        said = self._said[name]
        dtype, shape = said["dtype"], said["shape"]
        stored = dtype
        if dtype not in SAFETENSORS_TYPES.values():  # its elements are written as bytes
            stored, size = "uint8", numpy_dtype(dtype).itemsize
            shape = [*shape[:-1], shape[-1] * size] if shape else shape
        found = SAFETENSORS_TYPES.get(piece.get_dtype(), piece.get_dtype()), list(piece.get_shape())
        if found != (stored, shape):
            raise CheckpointError(f"{where} is {found[0]}{found[1]} in {file}, but {META} says {dtype}{said['shape']}")

    def read(self, name: str) -> np.ndarray:
        """A tensor, as the element type that its variable had."""
        said = self._said[name]
        array = np.empty(said["shape"], numpy_dtype(said["dtype"]))
        try:
            self._stream.seek(self._places[name])
            size = self._stream.readinto(array.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise CheckpointError(f"{self._where}: {error.strerror or error}") from None
        if size != array.nbytes:
            raise CheckpointError(f"{self._where} was cut short while it was read")
        return array


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], TensorFile]:
    """What a checkpoint says of itself, and its tensors; of one that is replaced meanwhile, those of the new one.

    Errors of :func:`read_meta` and :class:`TensorFile`.
    """
    while True:
        before = stamp(folder / META)
        meta = read_meta(folder)
        try:
            return meta, TensorFile(folder, meta)
        except CheckpointError:
            if stamp(folder / META) == before:
                raise
