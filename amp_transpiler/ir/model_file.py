"""From a path to a ModelProto: everything that can be wrong with a model file is refused here, by name."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterable
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
from amp_transpiler.ir.proto_residue import plain_domain
from amp_transpiler.ir.serializing import LIMIT
from amp_transpiler.ir.tensors import ExternalTensor, byte_size, tensor_type, to_proto
from amp_transpiler.ir.wellformed import check_model
from amp_transpiler.ir.wire import nesting

_LFS = b"version https://git-lfs"
#: An offset or a length in an external file.
_DIGITS = re.compile("[0-9]{1,19}")
_Message = TypeVar("_Message", bound=Message)


@dataclass
class ModelFile:
    """A model that was read: the protobuf, a name for messages, and the folder of its external data."""

    model: onnx.ModelProto
    label: str
    folder: Path | None
    initializers: list[onnx.TensorProto]
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
        model = _parse(path)
        folder = path.parent if external_data_dir is None else Path(external_data_dir)
        read = ModelFile(model, f"'{path}'", folder, list(model.graph.initializer), path)
    else:
        raise ArgumentTypeError(
            f"a model is given as a path or an onnx.ModelProto, not as {type(model_or_path).__name__}"
        )
    _check_model(read)
    return read


def _parse(path: Path) -> onnx.ModelProto:
    try:
        if stat.S_ISCHR(path.stat().st_mode):  # such as /dev/zero, which has no end
            raise OSError(errno.EINVAL, "it is a device")
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelFileNotFoundError(f"there is no model file '{path}'") from None
    except OSError as error:
        raise ModelFileError(f"the model file '{path}' cannot be read: {error.strerror}") from None
    except ValueError:  # what no path holds
        raise ModelFileError(f"there can be no model file {str(path)!r}") from None
    if not content:
        raise ModelFileError(f"the model file '{path}' is empty")
    if content.startswith(_LFS):
        raise ModelFileError(f"'{path}' is a Git LFS pointer, not the model itself; fetch it with `git lfs pull`")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        if nesting(content) > NESTED:
            raise ModelFileError(too_deep(f"'{path}'")) from None
        raise ModelFileError(
            f"'{path}' is not an ONNX model, or is cut short: its {len(content)} bytes do not parse"
        ) from None
    return model


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
    check_model(model, read.nodes, read.initializers, label)


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

    def __init__(self, label: str, folder: Path | None, model: Path | None = None) -> None:
        self.label = label
        self.folder = folder
        self.model = model
        #: How many initializers lie in each file.
        self.tensors: dict[Path, int] = {}
        self._mapped: dict[str, tuple[Path, np.ndarray]] = {}

    def content(self, tensor: onnx.TensorProto) -> onnx.TensorProto | ExternalTensor:
        """The content of an initializer, as :meth:`find` gives it; counted where it is external."""
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
        file, mapped = self._file(entries.get("location", ""), tensor.name)
        offset, length = (
            self._number(tensor.name, entries, key, default) for key, default in (("offset", 0), ("length", needed))
        )
        if dtype == "string" or length != needed:
            raise ModelFileError(
                f"tensor '{tensor.name}' of {self.label} ({dtype}{list(shape)}, {needed} bytes) "
                f"refers to {length} bytes at offset {offset} of '{file}'"
            )
        if offset + length > mapped.size:
            raise ModelFileError(
                f"the external data file '{file}' of {self.label} is too short: it has {mapped.size} "
                f"bytes, tensor '{tensor.name}' ends at byte {offset + length}"
            )
        return ExternalTensor(tensor, file, mapped, offset, length)

    def _number(self, tensor: str, entries: dict[str, str], key: str, default: int) -> int:
        text = entries.get(key) or str(default)
        if not _DIGITS.fullmatch(text):  # int() would take 0_0, spaces and the digits of every script
            raise ModelFileError(
                f"tensor '{tensor}' of {self.label}: external {key} is {text[:40]!r}; expected a "
                "number in digits from 0 to 9, of at most 19"
            )
        return int(text)

    def _file(self, location: str, tensor: str) -> tuple[Path, np.ndarray]:
        if location not in self._mapped:
            self._mapped[location] = self._open(location, tensor)
        return self._mapped[location]

    def _open(self, location: str, tensor: str) -> tuple[Path, np.ndarray]:
        if self.folder is None:
            raise ModelFileError(
                f"{self.label} keeps tensor '{tensor}' in the external file '{location}'; pass the "
                "folder of that file as external_data_dir, or give the path of the model"
            )
        file = located(location, self.folder, self.model, f"tensor '{tensor}' of {self.label}")
        try:
            mapped = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise ModelFileError(
                f"the external data file '{file}' of {self.label} cannot be read: {error.strerror}"
            ) from None
        return file, mapped
