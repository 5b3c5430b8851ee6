"""From a path to a ModelProto: everything that can be wrong with a model file is refused here, by name."""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message

from amp_transpiler.errors import ArgumentTypeError, GraphError, ModelFileError, ModelFileNotFoundError
from amp_transpiler.ir.functions import NESTED, too_deep
from amp_transpiler.ir.locations import external_tensors, located
from amp_transpiler.ir.node_fields import NodeFields, fields_of
from amp_transpiler.ir.serializing import LIMIT
from amp_transpiler.ir.tensors import SMALL, ExternalTensor, HeldTensor, MappedFile, byte_size, tensor_type, to_proto
from amp_transpiler.ir.wellformed import check_model, plain_weight
from amp_transpiler.ir.wire import nesting, without_contents
from amp_transpiler.lists import plain_domain

_LFS = b"version https://git-lfs"
#: What names the format of files that onnxruntime writes for devices, behind their first four bytes.
_ORT = b"ORTM"
#: Bytes of the smallest file of which the weights go past protobuf, and what the places of numbers are multiples of.
_HEAVY, _ALIGNED = 1 << 20, 8
#: An offset or a length in an external file.
_DIGITS = re.compile("[0-9]{1,19}")
_Message = TypeVar("_Message", bound=Message)


@dataclass
class ModelFile:
    """A model that was read: the protobuf, a name for messages, and the folder of its external data.

    ``initializers`` are those of the main graph; the protobuf has no content of what is held besides.
    """

    model: onnx.ModelProto
    label: str
    folder: Path | None
    initializers: Sequence[onnx.TensorProto | HeldTensor]
    path: Path | None = None

    @cached_property
    def nodes(self) -> list[NodeFields]:
        """The nodes of the main graph."""
        return fields_of(self.model.graph.node)


def read_model(model_or_path: Any, external_data_dir: str | os.PathLike[str] | None) -> ModelFile:
    """Read a file, or take a ModelProto (which is not changed, and whose weights are not copied).

    ModelFileNotFoundError, ModelFileError for what is no usable model; ArgumentTypeError for another argument.
    """
    if isinstance(model_or_path, onnx.ModelProto):
        folder = None if external_data_dir is None else Path(external_data_dir)
        label = f"the given model '{model_or_path.graph.name}'"
        try:
            model = without_weights(model_or_path)
        except DecodeError:  # what is copied is read again, and may not lie deeper than a file
            raise GraphError(too_deep(label)) from None
        read = ModelFile(model, label, folder, list(model_or_path.graph.initializer))
    elif isinstance(model_or_path, str | os.PathLike):
        path = Path(model_or_path)
        model, initializers = _parse(path)
        folder = path.parent if external_data_dir is None else Path(external_data_dir)
        read = ModelFile(model, f"'{path}'", folder, initializers, path)
    else:
        raise ArgumentTypeError(
            f"a model is given as a path or an onnx.ModelProto, not as {type(model_or_path).__name__}"
        )
    _check_model(read)
    return read


def _parse(path: Path) -> tuple[onnx.ModelProto, list[onnx.TensorProto | HeldTensor]]:
    """The model in a file, less the content of its large weights, and its initializers."""
    content = _content(path)
    if not content.size:
        raise ModelFileError(f"the model file '{path}' is empty")
    if content[: len(_LFS)].tobytes() == _LFS:
        raise ModelFileError(f"'{path}' is a Git LFS pointer, not the model itself; fetch it with `git lfs pull`")
    light, places = without_contents(content.data) if content.size >= _HEAVY else (content.tobytes(), {})
    model = onnx.ModelProto()
    try:
        model.ParseFromString(light)
    except DecodeError:
        if nesting(content.data) > NESTED:
            raise ModelFileError(too_deep(f"'{path}'")) from None
        if content[4:8].tobytes() == _ORT:
            way = "give the .onnx file that it was made of"
            raise ModelFileError(f"'{path}' is in onnxruntime's own format, no ONNX model; {way}") from None
        raise ModelFileError(
            f"'{path}' is not an ONNX model, or is cut short: its {content.size} bytes do not parse"
        ) from None
    return model, _initializers(model, content, places)


def _content(path: Path) -> np.ndarray:
    """The bytes of a file."""
    try:
        found = path.stat()
        if stat.S_ISCHR(found.st_mode):  # such as /dev/zero, which has no end
            raise OSError(errno.EINVAL, "it is a device")
        if not stat.S_ISREG(found.st_mode):
            return np.frombuffer(bytearray(path.read_bytes()), np.uint8)
        content = _memory(found.st_size)
        with open(path, "rb") as stream:
            return content[: stream.readinto(content.data)]
    except FileNotFoundError:
        raise ModelFileNotFoundError(f"there is no model file '{path}'") from None
    except OSError as error:
        raise ModelFileError(f"the model file '{path}' cannot be read: {error.strerror}") from None
    except ValueError:  # what no path holds
        raise ModelFileError(f"there can be no model file {str(path)!r}") from None


def _memory(size: int) -> np.ndarray:
    """So many bytes. Of numpy's own memory large pages are asked for, and the system may take long to clear such."""
    if not size or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(size, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _initializers(
    model: onnx.ModelProto, content: np.ndarray, places: Mapping[int, tuple[int, int]]
) -> list[onnx.TensorProto | HeldTensor]:
    """The initializers of a model, some of which were parted from their bytes; small and odd ones get them back.

    ``places``: their offset and length in the ``content`` of the file, by number; there they move to where numbers lie.
    """
    found: list[onnx.TensorProto | HeldTensor] = list(model.graph.initializer)
    free = 0
    for number, (offset, length) in places.items():
        tensor, raw = model.graph.initializer[number], content[offset : offset + length]
        aligned = offset // _ALIGNED * _ALIGNED  # its name, type and dims stood there
        if plain_weight(tensor, length) and math.prod(tensor.dims) > SMALL and aligned >= free:
            held = content[aligned : aligned + length]
            if aligned < offset:
                held[:] = raw
            held.flags.writeable = False
            found[number] = HeldTensor(tensor, held)
        else:
            tensor.raw_data = raw.tobytes()
        free = offset + length
    return found


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that shares nothing with ``model``, less the initializers of the main graph."""
    copy = copy_without(model, ("graph",))
    if model.HasField("graph"):
        copy.graph.SetInParent()
        _copy_fields(copy.graph, model.graph, ("initializer",))
    return copy


def copy_without(message: _Message, fields: Collection[str]) -> _Message:
    """A copy of a protobuf message less some of its fields, which are not touched."""
    copy: _Message = type(message)()
    _copy_fields(copy, message, fields)
    return copy


def _copy_fields(copy: Message, message: Message, fields: Collection[str]) -> None:
    """Put the fields of a message, less some, into an empty one."""
    for field, value in message.ListFields():
        if field.name in fields:
            continue
        if isinstance(value, Message):
            getattr(copy, field.name).CopyFrom(value)
        elif hasattr(value, "extend"):
            getattr(copy, field.name).extend(value)
        else:
            setattr(copy, field.name, value)


def _check_model(read: ModelFile) -> None:
    model, label = read.model, read.label
    if not model.HasField("graph") or model.ir_version < 1:
        raise ModelFileError(f"{label} is not an ONNX model, or is cut short: it holds no graph and no format version")
    if model.ir_version > onnx.IR_VERSION:
        raise ModelFileError(
            f"{label} has ONNX format version {model.ir_version}; the installed onnx "
            f"{onnx.__version__} reads up to {onnx.IR_VERSION}. Install a newer onnx"
        )
    if model.ir_version >= 3 and model.graph.node and not model.opset_import:
        raise ModelFileError(f"{label} says no operator set version (opset_import), as a file that is cut short does")
    _check_opsets(label, model.opset_import)
    for function in model.functions:
        _check_opsets(f"function '{function.name}' of {label}", function.opset_import)
    inside = [each for each in read.initializers if isinstance(each, onnx.TensorProto)]  # others were looked at
    check_model(model, read.nodes, inside, label)


def _check_opsets(label: str, opsets: Iterable[onnx.OperatorSetIdProto]) -> None:
    newest = onnx.defs.C.schema_version_map()
    for opset in opsets:
        if not 1 <= opset.version < 2**31:
            raise ModelFileError(
                f"{label} says version {opset.version} of the operator set {opset.domain or 'ai.onnx'}, which cannot be"
            )
        known = newest.get(plain_domain(opset.domain))
        if known is not None and opset.version > known[1]:
            raise ModelFileError(
                f"{label} uses operator set {opset.domain or 'ai.onnx'} {opset.version}; the "
                f"installed onnx {onnx.__version__} knows {known[1]}. "
                "Install a newer one"
            )


class DataFiles:
    """The external data files of one model, each mapped once."""

    def __init__(self, label: str, folder: Path | None, model: Path | None) -> None:
        self.label = label
        self.folder = folder
        self.model = model
        #: How many initializers lie in each file.
        self.tensors: dict[Path, int] = {}
        self._mapped: dict[str, MappedFile] = {}

    def content(self, tensor: onnx.TensorProto | HeldTensor) -> onnx.TensorProto | HeldTensor | ExternalTensor:
        """The content of an initializer, as :meth:`find` gives it; counted where it is external."""
        if isinstance(tensor, HeldTensor):
            return tensor
        data = self.find(tensor)
        if isinstance(data, ExternalTensor):
            self.tensors[data.file] = self.tensors.get(data.file, 0) + 1
        return data

    def embedded(self, message: Any) -> Any:
        """``message`` with the content of its external tensors inside; itself where it has none.

        For tensors that are no initializers: in attributes and functions. Errors as :meth:`find`.
        """
        if not any(external_tensors(message)):
            return message
        copy = type(message)()
        copy.CopyFrom(message)
        for tensor in external_tensors(copy):
            data = self.find(tensor)
            if byte_size(*tensor_type(tensor)) > LIMIT:
                raise ModelFileError(
                    f"tensor '{tensor.name}' of {self.label} is no initializer and takes more than "
                    "the 2 GB that a model can hold"
                )
            tensor.CopyFrom(to_proto(data, tensor.name))
        return copy

    def find(self, tensor: onnx.TensorProto) -> onnx.TensorProto | ExternalTensor:
        """The tensor itself where its content is inside; else its part of the mapped file.

        ModelFileNotFoundError, ModelFileError: no such file, a file outside the model's folder or too short.
        """
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return tensor
        dtype, shape = tensor_type(tensor)
        needed = byte_size(dtype, shape)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        mapped = self._file(entries.get("location", ""), tensor.name)
        offset, length = (
            self._number(tensor.name, entries, key, default) for key, default in (("offset", 0), ("length", needed))
        )
        if dtype == "string" or length != needed:
            raise ModelFileError(
                f"tensor '{tensor.name}' of {self.label} ({dtype}{list(shape)}, {needed} bytes) "
                f"refers to {length} bytes at offset {offset} of '{mapped.path}'"
            )
        if offset + length > mapped.content.size:
            raise ModelFileError(
                f"the external data file '{mapped.path}' of {self.label} is too short: it has {mapped.content.size} "
                f"bytes, tensor '{tensor.name}' ends at byte {offset + length}"
            )
        return ExternalTensor(tensor, mapped, offset, length)

    def _number(self, tensor: str, entries: dict[str, str], key: str, default: int) -> int:
        text = entries.get(key) or str(default)
        if not _DIGITS.fullmatch(text):  # int() would take 0_0, spaces and the digits of every script
            raise ModelFileError(
                f"tensor '{tensor}' of {self.label}: external {key} is {text[:40]!r}; expected a "
                "number in digits from 0 to 9, of at most 19"
            )
        return int(text)

    def _file(self, location: str, tensor: str) -> MappedFile:
        if location not in self._mapped:
            self._mapped[location] = self._open(location, tensor)
        return self._mapped[location]

    def _open(self, location: str, tensor: str) -> MappedFile:
        if self.folder is None:
            raise ModelFileError(
                f"{self.label} keeps tensor '{tensor}' in the external file '{location}', which was not read with it; "
                "give the path of the model, or what onnx.load(path) reads; Program.from_onnx also takes the folder of "
                "that file, as external_data_dir"
            )
        file = located(location, self.folder, self.model, f"tensor '{tensor}' of {self.label}")
        try:
            return MappedFile(file)
        except OSError as error:
            raise ModelFileError(
                f"the external data file '{file}' of {self.label} cannot be read: {error.strerror}"
            ) from None
