"""Which tensors of a program go into an external data file when it is written, and where in it."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from amp_transpiler.errors import ArgumentError
from amp_transpiler.file_targets import check_space, check_target, is_utf8, same_file
from amp_transpiler.files import Group, remove_leftovers
from amp_transpiler.ir import serializing
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.locations import model_files
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.proto_residue import source_of
from amp_transpiler.ir.tensors import (
    CastTensor,
    ExternalTensor,
    HeldTensor,
    RawTensor,
    Tensor,
    annotated,
    byte_size,
    embedded,
    external_proto,
    header,
    raw_bytes,
    renamed,
    tensor_type,
)
from amp_transpiler.ir.verify import programs_of
from amp_transpiler.ir.wire import COPIED, with_contents

_PAGE = 1 << 12  # bytes: where tensors of as many begin, so that they can be mapped
_WORTH = 1024  # bytes: smaller tensors stay in the model


class Layout:
    """Where the content of each variable goes: into the model, or into one file beside it.

    ``external_data`` None: what came from external files goes into ``<model>.data``, the rest is embedded while it
    fits into 2 GB; False: everything is embedded; True or a file name: every tensor of at least 1 KiB goes into
    ``<model>.data`` or the file of that name. No name comes out of a model. Tensors are streamed from file to file;
    those that lie in the same place of a file do so again.

    ArgumentError, ModelFileWriteError: a path that is no target, or a file that holds weights of the program.
    """

    def __init__(
        self, program: Graph, values: dict[Variable, Any], path: Path | None, external_data: bool | str | None
    ) -> None:
        self.path = path
        self.values = values
        self.stays = path is None and external_data is not False  # what lies outside, for nothing is written
        self.location = _location(path, external_data)
        held = [(v, values.get(v, v.data)) for v in _contents(program, values)]
        if path is not None and external_data is False:  # before any of it is copied into a model
            serializing.check_size(program.graph_name, sum(_size(data) for _, data in held))
        self.places = self._place(self._moved(program, held, external_data))
        #: The data file of the model that this one replaces, and which this one does not have.
        self.left: Path | None = None
        #: By name: content of the main graph that goes into the model file past protobuf.
        self.past: dict[str, RawTensor | CastTensor] = {}
        if path is not None:
            self._check_paths(path, program, held, named=isinstance(external_data, str))

    def _moved(
        self, program: Graph, held: list[tuple[Variable, Any]], external_data: bool | str | None
    ) -> list[tuple[Variable, Any]]:
        """What goes into the data file."""
        if self.path is None or external_data is False:
            return []
        sizes = [_size(data) for _, data in held]
        large = [each for each, size in zip(held, sizes, strict=True) if size >= _WORTH]
        if external_data is not None:
            return large
        source = source_of(program)
        came = source is not None and bool(source.external)
        within = onnx.TensorProto | HeldTensor
        moved = [(v, data) for v, data in large if came and (v in self.values or not isinstance(data, within))]
        inside = sum(sizes) - sum(_size(data) for _, data in moved)
        return large if inside > serializing.LIMIT else moved

    def _place(self, moved: list[tuple[Variable, Any]]) -> dict[Variable, tuple[int, int]]:
        places: dict[Variable, tuple[int, int]] = {}
        known: dict[Any, tuple[int, int]] = {}
        end = 0
        for variable, data in moved:
            same = _origin(data)
            if same is not None and same in known:
                places[variable] = known[same]
                continue
            size = _size(data)
            step = _PAGE if size >= _PAGE else 64
            offset = -(-end // step) * step
            places[variable] = known[same] = offset, size
            end = offset + size
        return places

    def _check_paths(self, path: Path, program: Graph, held: list[tuple[Variable, Any]], *, named: bool) -> None:
        """Refuse what would overwrite weights that the program reads, or what is not this model's."""
        source = source_of(program)
        read = {data.file for _, data in held if isinstance(data, ExternalTensor)}
        read |= set(source.external) if source is not None else set()
        in_place = source is not None and source.path is not None and same_file(source.path, path)
        target = check_target(path)
        remove_leftovers(target.parent)
        taken = next((file for file in read if same_file(file, path)), None)
        beside = path.parent / self.location
        if self.places:
            check_target(beside, "external data")
            others = [] if in_place else [*read, *([source.path] if source is not None and source.path else [])]
            taken = taken or next((file for file in others if same_file(file, beside)), None)
        if taken is not None:
            raise ArgumentError(
                f"'{taken}' cannot be written: the model that was read consists of it; choose another name"
            )
        if self.places and not named:
            check_unnamed(path, beside)
        usual = path.parent / _location(path, None)
        written = bool(self.places) and same_file(beside, usual)
        if not written and belongs(path, usual) and not any(same_file(file, usual) for file in read):
            self.left = usual

    def content(self, variable: Variable, data: Any) -> Tensor:
        """The TensorProto of a variable in the model that is written."""
        if variable in self.places:
            offset, length = self.places[variable]
            proto = external_proto(data, variable.name, self.location, offset, length)
        elif self.stays and isinstance(data, ExternalTensor):
            return renamed(data.proto, variable.name)
        elif self.path is not None and _goes_past(variable, data):
            self.past[variable.name] = data
            proto = header(data, variable.name)
        else:
            proto = embedded(variable, data)
        return annotated(proto, variable.data) if variable in self.values else proto

    def add_to(self, group: Group, model: onnx.ModelProto) -> None:
        """Write the model and its data file as files of a group; then the model has its content as the file has."""
        assert self.path is not None
        light, tensors = serializing.serialized(model), model.graph.initializer
        past = {number: data for number, one in enumerate(tensors) if (data := self.past.get(one.name)) is not None}
        lengths = {number: _size(data) for number, data in past.items()}
        content = with_contents(light, lengths) if past else [light]
        whole = sum(lengths[piece] if isinstance(piece, int) else len(piece) for piece in content)
        serializing.check_size(model.graph.name, whole)
        check_space(self.path, whole + max((sum(place) for place in self.places.values()), default=0))
        if self.places:
            group.add(self.path.parent / self.location, self._write_data)

        def write(stream: BinaryIO) -> None:
            for piece in content:
                if isinstance(piece, int):
                    tensors[piece].raw_data = piece = b"".join(raw_bytes(past[piece]))
                stream.write(piece)

        group.add(self.path, write)
        if self.left is not None:
            group.leave(self.left)

    def _write_data(self, stream: BinaryIO) -> None:
        for variable, (offset, _) in self.places.items():
            if offset < stream.tell():
                continue  # it is the content of an earlier one
            stream.write(b"\0" * (offset - stream.tell()))
            for piece in raw_bytes(self.values.get(variable, variable.data)):
                stream.write(piece)


def check_unnamed(path: Path, beside: Path) -> None:
    """ArgumentError where the data file that nobody named is there, and the model at ``path`` does not refer to it."""
    if os.path.exists(beside) and not belongs(path, beside):
        raise ArgumentError(
            f"'{beside}' is there, and is not the data of a model '{path.name}'; remove it, or give "
            f"external_data (--external-data) the name '{beside.name}' to replace it"
        )


def belongs(path: Path, beside: Path) -> bool:
    """Whether a file is there, and is data of the model at ``path``."""
    return os.path.exists(beside) and any(same_file(file, beside) for file in model_files(path))


def _contents(program: Graph, values: dict[Variable, Any]) -> list[Variable]:
    """Variables, nested ones included, that are written as dense initializers."""
    return [
        v
        for one in programs_of(program)
        for v in one.variables
        if v.producer is None
        and v.outer is None
        and (v in values or v.data is not None)
        and not isinstance(v.data, onnx.SparseTensorProto)
    ]


def _size(data: Any) -> int:
    return _bytes(*tensor_type(data))


def _goes_past(variable: Variable, data: Any) -> bool:
    """Whether it is a large initializer of the main graph whose content is no part of a protobuf."""
    return variable.program.parent is None and isinstance(data, RawTensor | CastTensor) and _size(data) > COPIED


_bytes = lru_cache(maxsize=4096)(byte_size)  # thousands of tensors have few types and shapes


def _origin(data: Any) -> Any:
    """What tells content that lies in a file, as it is or cast; None for any other."""
    if isinstance(data, CastTensor):
        source = _origin(data.source)
        return source and (data.element_type, source)
    return data.place if isinstance(data, ExternalTensor) else None


def _location(path: Path | None, external_data: bool | str | None) -> str:
    if isinstance(external_data, str):
        name = external_data
        if name in ("", os.curdir, os.pardir) or Path(name).name != name or "\0" in name:
            raise ArgumentError(f"external_data (--external-data) is the name of a file beside the model, not {name!r}")
    elif external_data in (None, True, False):
        name = "" if path is None else f"{path.name}.data"
    else:
        raise ArgumentError(f"external_data is True, False, None or a file name, not {external_data!r}")
    if path is None and external_data:
        raise ArgumentError("external data needs a file to lie beside; give to_onnx a path")
    if not is_utf8(name):
        raise ArgumentError(
            f"the file of external data would be called {name!r}, which is not UTF-8, as names in a "
            "model are; give it another (external_data, --external-data)"
        )
    if path is not None and name == path.name:
        raise ArgumentError(f"external_data and the model cannot both be the file '{name}'")
    return name
