"""Which tensors of a program go into external data files when it is written, and where in them."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from ..errors import ArgumentError, ModelFileError
from . import files
from .program import Program, Variable
from .source import source_of
from .tensors import (
    ExternalTensor,
    Tensor,
    annotated,
    byte_size,
    embedded,
    external_proto,
    raw_bytes,
    renamed,
    tensor_type,
)
from .verify import programs_of

_WORTH = 1024  # bytes: smaller tensors stay in the model
_PAGE = 4096


class Layout:
    """Where the content of each variable goes.

    ``external_data`` None: what came from external files stays in such, the rest is embedded while it fits
    into 2 GB; False: everything is embedded; True or a file name: every tensor of at least 1 KiB goes into one
    file beside the model. Data files in which nothing has changed are copied as they are.
    """

    def __init__(self, program: Program, values: dict[Variable, Any], path: Path | None,
                 external_data: bool | str | None) -> None:  # fmt: skip
        self.path = path
        self.values = values
        self.location = _location(path, external_data)
        source = source_of(program)
        self.folder = source.folder if source is not None else None
        held = [(v, values.get(v, v.data)) for v in _contents(program, values)]
        live = Counter(data.file for _, data in held if isinstance(data, ExternalTensor))
        came = source.external if source is not None else {}
        #: Data files that stay as they are.
        self.kept = {file for file, count in live.items() if path is None or count == came.get(file)}
        if external_data is not None:
            self.kept = set()
        self._kept_locations = {_relative(file, self.folder) for file in self.kept} | _attribute_files(program)
        while self.location in self._kept_locations:
            self.location = f"{self.location}.new"
        moved = [(v, data) for v, data in held if self._moves(v, data, external_data, bool(came))]
        if external_data is None and path is not None and self._embedded_size(held, moved) > files.LIMIT:
            moved = [(v, data) for v, data in held if self._moves(v, data, True, True)]
        self.places = self._place(moved)

    def _moves(self, variable: Variable, data: Any, external_data: bool | str | None, came: bool) -> bool:
        """Whether the tensor goes into the data file that is written anew."""
        if self.path is None or external_data is False or self._stays(data) or _size(data) < _WORTH:
            return False
        if external_data is None:
            return came and (variable in self.values or not isinstance(data, onnx.TensorProto))
        return True

    def _stays(self, data: Any) -> bool:
        return isinstance(data, ExternalTensor) and data.file in self.kept

    def _embedded_size(self, held: list[tuple[Variable, Any]], moved: list[tuple[Variable, Any]]) -> int:
        outside = {v for v, _ in moved}
        return sum(_size(data) for v, data in held if v not in outside and not self._stays(data))

    def _place(self, moved: list[tuple[Variable, Any]]) -> dict[Variable, tuple[int, int]]:
        places: dict[Variable, tuple[int, int]] = {}
        end = 0
        for variable, data in moved:
            size = _size(data)
            step = _PAGE if size >= _PAGE else 64
            offset = -(-end // step) * step
            places[variable] = (offset, size)
            end = offset + size
        return places

    def content(self, variable: Variable, data: Any) -> Tensor:
        """The TensorProto of a variable in the model that is written."""
        if variable in self.places:
            offset, length = self.places[variable]
            proto = external_proto(data, variable.name, self.location, offset, length)
        elif self._stays(data):
            return renamed(data.proto, variable.name)
        else:
            proto = embedded(variable, data)
        return annotated(proto, variable.data) if variable in self.values else proto

    def write(self, model: onnx.ModelProto) -> None:
        """Write the model and its data files, whole or not at all."""
        assert self.path is not None
        content = files.serialized(model)
        written: list[tuple[Path, files.Write]] = []
        if self.folder is not None and not _same(self.folder, self.path.parent):
            for location in sorted(self._kept_locations):
                written.append((self.path.parent / location, _copier(self.folder / location)))
        if self.places:
            written.append((self.path.parent / self.location, self._write_data))
        written.append((self.path, lambda stream: files.put(content, stream)))
        files.write_files(written)

    def _write_data(self, stream: BinaryIO) -> None:
        for variable, (offset, _) in self.places.items():
            stream.write(b"\0" * (offset - stream.tell()))
            for piece in raw_bytes(self.values.get(variable, variable.data)):
                stream.write(piece)


def _contents(program: Program, values: dict[Variable, Any]) -> list[Variable]:
    """Variables, nested ones included, that are written as dense initializers."""
    return [
        v
        for one in programs_of(program)
        for v in one.variables
        if v.producer is None and v.outer is None and (v in values or v.data is not None)
        and not isinstance(v.data, onnx.SparseTensorProto)
    ]  # fmt: skip


def _size(data: Any) -> int:
    return byte_size(*tensor_type(data))


def _location(path: Path | None, external_data: bool | str | None) -> str:
    if isinstance(external_data, str):
        name = external_data
        if not name or Path(name).name != name:
            raise ArgumentError(f"external_data is the name of a file beside the model, not {name!r}")
    elif external_data in (None, True, False):
        name = "" if path is None else f"{path.name}.data"
    else:
        raise ArgumentError(f"external_data is True, False, None or a file name, not {external_data!r}")
    if path is None and external_data:
        raise ArgumentError("external data needs a file to lie beside; give to_onnx a path")
    if path is not None and name == path.name:
        raise ArgumentError(f"external_data and the model cannot both be the file '{name}'")
    return name


def _attribute_files(program: Program) -> set[str]:
    """Locations of external data to which tensors in attributes refer."""
    return {
        entry.value
        for op in program.walk()
        for proto in op.attrs.protos()
        for tensor in (proto.t, *proto.tensors)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }


def _relative(file: Path, folder: Path | None) -> str:
    if folder is None:
        raise ModelFileError(f"the folder of the external data file '{file}' is not known")
    return file.relative_to(folder).as_posix()


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _copier(source: Path) -> Callable[[BinaryIO], None]:
    def copy(stream: BinaryIO) -> None:
        with source.open("rb") as original:
            shutil.copyfileobj(original, stream, 1 << 20)

    return copy
