"""Constant content of variables: embedded tensors, tensors in memory or mapped from disk, numpy arrays."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import GraphError, ModelFileError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import NAMES, ONNX_TYPES, element_type, numpy_dtype
from amp_transpiler.ir.wire import COPIED

#: Tensors up to this many elements keep their content where weights are stripped: shape arithmetic needs it.
SMALL = 1024
#: Elements up to which contents are looked through for what they are: places, a mask, a window.
LOOKED_THROUGH = 1 << 24
#: Elements of the pieces in which large content is read and converted.
CHUNK = 1 << 22

Tensor = onnx.TensorProto | onnx.SparseTensorProto

_BITS = {"uint4": 4, "int4": 4, "float4e2m1": 4, "uint2": 2, "int2": 2, "float6e2m3": 6, "float6e3m2": 6}


class RawTensor:
    """A tensor whose content lies as bytes outside of its TensorProto.

    ``np.asarray`` gives the content, read-only and without a copy (elements of less than a byte are unpacked).
    ``proto`` is the TensorProto of the model, ``raw`` are the bytes.
    """

    __slots__ = ("dtype", "proto", "raw", "shape")

    def __init__(self, proto: onnx.TensorProto, raw: np.ndarray) -> None:
        self.proto = proto
        self.raw = raw
        self.dtype = numpy_dtype(NAMES[proto.data_type])
        self.shape = tuple(proto.dims)

    @property
    def name(self) -> str:
        """Its name in the model."""
        return str(self.proto.name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if NAMES[self.proto.data_type] in _BITS:
            packed = onnx.TensorProto(data_type=self.proto.data_type, dims=self.shape, raw_data=self.raw.tobytes())
            array = onnx.numpy_helper.to_array(packed)
        else:
            array = self.raw.view(self.dtype).reshape(self.shape)
            array = array.copy() if copy else array
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype}{list(self.shape)}>"


class HeldTensor(RawTensor):
    """A tensor whose content lies in memory: protobuf copies what it takes in, and again what it is asked for."""

    __slots__ = ()


class MappedFile:
    """The bytes of a file, mapped: nothing is read before it is used. OSError where that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = self._now()
        self.content: np.ndarray = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)

    def check(self) -> None:
        """ModelFileError where the file was written over since; one that another took the place of is still mapped."""
        try:
            now = self._now()
        except OSError:
            return
        if now[0] == self._stamp[0] and now != self._stamp:
            raise ModelFileError(
                f"the external data file '{self.path}' was written over since its model was read; read the model again"
            )

    def _now(self) -> tuple[int, int, int]:
        found = os.stat(self.path)
        return found.st_ino, found.st_size, found.st_mtime_ns


class ExternalTensor(RawTensor):
    """A tensor whose content lies in ``file`` beside its model. It is mapped; nothing is read before it is used.

    ModelFileError, when it is, where the file was written over in between.
    """

    __slots__ = ("_mapped", "_mapping", "_offset", "file")

    def __init__(self, proto: onnx.TensorProto, mapped: MappedFile, offset: int, length: int) -> None:
        super().__init__(proto, mapped.content.view(np.ndarray)[offset : offset + length])
        self.file = mapped.path
        self._mapped = mapped
        self._mapping: mmap.mmap | None = getattr(mapped.content, "_mmap", None)
        self._offset = offset

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._mapped.check()
        return super().__array__(dtype, copy)

    @property
    def place(self) -> tuple[Path, int, int]:
        """The file, and the offset and number of the bytes in it."""
        return self.file, self._offset, self.raw.size

    def release(self) -> None:
        """Let the system take back the memory of what was read; it is read anew when it is used."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            start = self._offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapping.madvise(mmap.MADV_DONTNEED, start, self._offset + self.raw.size - start)

    def __reduce__(self) -> tuple[Any, ...]:
        self._mapped.check()
        return HeldTensor, (self.proto, self.raw)  # the file need not be there where it is read

    def __deepcopy__(self, memo: Any) -> ExternalTensor:
        return self  # nothing writes to it

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} in {self.file}>"


class CastTensor:
    """Constant content in another floating type, which is converted when it is used and not kept.

    ``source`` is the content as it was. ``np.asarray`` gives the converted content.
    """

    __slots__ = ("dtype", "element_type", "shape", "source")

    def __init__(self, source: Any, element_type: str) -> None:
        self.source = source
        self.element_type = element_type
        self.dtype = numpy_dtype(element_type)
        self.shape = tensor_type(source)[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.concatenate([*chunks(self), np.zeros(0, self.dtype)]).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} of {self.source!r}>"


def chunks(data: Any) -> Iterator[np.ndarray]:
    """Constant content in flat pieces of at most :data:`CHUNK` elements; a mapped tensor is released at the end."""
    if isinstance(data, CastTensor):
        with np.errstate(over="ignore", invalid="ignore"):
            for piece in chunks(data.source):
                yield piece.astype(data.dtype)
        return
    flat = as_array(data).reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]
    release(data)


def release(data: Any) -> None:
    """Let go of the memory of mapped content that was read."""
    if isinstance(data, ExternalTensor):
        data.release()


def as_array(data: Any) -> np.ndarray:
    """Constant content (``Variable.data``) as a numpy array; a mapped one stays mapped.

    bfloat16 and the small types come as ml_dtypes arrays, strings as arrays of objects, sparse tensors dense.
    ModelFileError for a TensorProto whose external file is not known.
    """
    if isinstance(data, onnx.TensorProto):
        if data.data_location == onnx.TensorProto.EXTERNAL:
            raise ModelFileError(
                f"the content of tensor '{data.name}' lies in an external file that is not known "
                "here; load its model with Program.from_onnx"
            )
        raw = data.raw_data if data.data_type == onnx.TensorProto.FLOAT else b""  # each look at it is a copy
        if raw:  # most of them, and a third of the time
            return np.frombuffer(raw, "<f4").reshape(tuple(data.dims))
        return onnx.numpy_helper.to_array(data)
    if isinstance(data, onnx.SparseTensorProto):
        return _dense(data)
    return np.asarray(data)


def tensor_array(variable: Variable) -> np.ndarray:
    """The content of a variable that carries some (``data``) as a numpy array; GraphError where it carries none."""
    if variable.data is None:
        raise GraphError(f"variable '{variable.name}' of program '{variable.program.name}' carries no content")
    return as_array(variable.data)


def _dense(sparse: onnx.SparseTensorProto) -> np.ndarray:
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    shape = tuple(sparse.dims)
    dense = np.zeros(shape, values.dtype)
    if indices.ndim == 2:
        indices = np.ravel_multi_index(tuple(indices.T), shape)
    dense.reshape(-1)[indices] = values
    return dense


def tensor_type(data: Any) -> tuple[str, tuple[int, ...]]:
    """Element type name and shape of constant content, without reading it."""
    if isinstance(data, onnx.TensorProto):
        if data.data_type not in NAMES:
            raise ModelFileError(
                f"tensor '{data.name}' has the element type {data.data_type}, which ONNX does not define"
            )
        return NAMES[data.data_type], tuple(data.dims[:])  # a slice takes half the time of a loop
    if isinstance(data, onnx.SparseTensorProto):
        return NAMES[data.values.data_type], tuple(data.dims)
    if isinstance(data, RawTensor):
        return NAMES[data.proto.data_type], data.shape
    if isinstance(data, CastTensor):
        return data.element_type, data.shape
    array = np.asarray(data)
    return _type_of(array.dtype), array.shape


def _type_of(dtype: np.dtype) -> str:
    """The name of a numpy element type; ml_dtypes writes the small floats in its own way (float8_e4m3fn)."""
    try:
        return NAMES[onnx.helper.np_dtype_to_tensor_dtype(dtype)]
    except (KeyError, ValueError):
        return element_type(dtype)


def byte_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor takes in a file. Strings have no fixed size: 0."""
    if dtype == "string":
        return 0
    count = math.prod(shape)
    return (count * _BITS[dtype] + 7) // 8 if dtype in _BITS else count * numpy_dtype(dtype).itemsize


def renamed(proto: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """The tensor under this name; itself where that is its name."""
    if proto.name == name:
        return proto
    copy = onnx.TensorProto()
    copy.CopyFrom(proto)
    copy.name = name
    return copy


def embedded(variable: Variable, data: Any) -> Tensor:
    """The protobuf of a variable with its content ``data`` inside."""
    return data if isinstance(data, onnx.SparseTensorProto) else to_proto(data, variable.name)


def to_proto(data: Any, name: str) -> onnx.TensorProto:
    """Constant content as a TensorProto called ``name`` with the content inside; the given one where it is that."""
    if isinstance(data, onnx.TensorProto):
        return renamed(data, name)
    if isinstance(data, RawTensor | CastTensor):
        proto = header(data, name)
        proto.raw_data = b"".join(raw_bytes(data))
        return proto
    array = np.asarray(data)
    return onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def held(array: np.ndarray, name: str, old: Any) -> onnx.TensorProto | HeldTensor:
    """An array of numbers as the content that replaces ``old``; a large one is no part of a TensorProto."""
    if array.nbytes <= COPIED:
        return annotated(to_proto(array, name), old)
    proto = onnx.TensorProto(name=name, data_type=ONNX_TYPES[tensor_type(array)[0]], dims=array.shape)
    return HeldTensor(annotated(proto, old), np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def raw_bytes(data: Any) -> Iterator[memoryview]:
    """The little-endian bytes of constant content as they stand in an external data file, piece by piece."""
    if isinstance(data, CastTensor):
        for piece in chunks(data):
            yield memoryview(piece.view(np.uint8).data)
    elif isinstance(data, RawTensor):
        for start in range(0, data.raw.size, 4 * CHUNK):
            yield memoryview(data.raw[start : start + 4 * CHUNK].data)
        release(data)
    else:
        if not isinstance(data, onnx.TensorProto) or not data.HasField("raw_data"):
            data = onnx.numpy_helper.from_array(np.ascontiguousarray(as_array(data)))
        yield memoryview(data.raw_data)


def header(data: RawTensor | CastTensor, name: str) -> onnx.TensorProto:
    """:func:`to_proto` without the content."""
    if isinstance(data, RawTensor):
        return _header(data.proto, name)
    return annotated(onnx.TensorProto(name=name, data_type=ONNX_TYPES[data.element_type], dims=data.shape), data.source)


def _header(proto: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """Name, type, shape, doc string and metadata of a tensor, without content."""
    header = onnx.TensorProto(name=name, data_type=proto.data_type, dims=proto.dims)
    if proto.HasField("doc_string"):
        header.doc_string = proto.doc_string
    header.metadata_props.extend(proto.metadata_props)
    return header


def _proto(data: Any) -> Any:
    """The TensorProto that constant content came as; the content itself where it came otherwise."""
    while isinstance(data, CastTensor):
        data = data.source
    return data.proto if isinstance(data, RawTensor) else data


def annotated(proto: onnx.TensorProto, old: Any) -> onnx.TensorProto:
    """``proto`` with the doc string and metadata of the content ``old`` that it replaces."""
    source = _proto(old)
    if isinstance(source, onnx.TensorProto) and (source.doc_string or source.metadata_props):
        proto.doc_string = source.doc_string
        proto.metadata_props.extend(source.metadata_props)
    return proto


def external_proto(data: Any, name: str, location: str, offset: int, length: int) -> onnx.TensorProto:
    """A TensorProto called ``name`` whose content lies in the file ``location``."""
    dtype, shape = tensor_type(data)
    source = _proto(data)
    proto = _header(source, name) if isinstance(source, onnx.TensorProto) else onnx.TensorProto(name=name, dims=shape)
    proto.data_type = ONNX_TYPES[dtype]
    proto.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        proto.external_data.add(key=key, value=value)
    return proto


def is_small(data: Any) -> bool:
    """Whether constant content is a TensorProto of few elements."""
    return isinstance(data, onnx.TensorProto) and math.prod(data.dims[:]) <= SMALL


def stripped(data: Any, name: str) -> onnx.TensorProto:
    """A TensorProto for type inference: with content where it is small, else with type and shape alone."""
    if is_small(data):
        return renamed(data, name)
    dtype, shape = tensor_type(data)
    if math.prod(shape) > SMALL:
        return onnx.TensorProto(name=name, data_type=ONNX_TYPES[dtype], dims=shape)
    return to_proto(data, name)
