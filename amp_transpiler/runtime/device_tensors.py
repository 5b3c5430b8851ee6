"""Tensors on a device: numpy arrays to onnxruntime values and back.

onnxruntime's own conversions alias numpy memory on CPU and refuse bfloat16; these own their memory, and
take every element type that onnxruntime can hold.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from amp_transpiler.errors import ArgumentTypeError, PrecisionError
from amp_transpiler.ir.tensors import chunks
from amp_transpiler.ir.types import BYTES, NAMES, ONNX_TYPES, element_type, numpy_dtype
from amp_transpiler.passes.lowering.place import CPUPlace, Place
from amp_transpiler.runtime.providers import allocate, copy, on_device, takes_arrays

#: Several elements in one byte: numpy has one a byte, onnxruntime packs them.
_PACKED = frozenset({"int4", "uint4", "float4e2m1", "int2", "uint2"})
_BITS = {1: np.uint8, 2: np.uint16}
_CPU = CPUPlace()

#: Bytes from which on memory is worth large pages, as numpy has it, and madvise(2) of Linux, which asks for them.
_LARGE, _HUGEPAGE = 4 * 2**20, 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

#: DLPack's code of an element type, and its bits.
_DLPACK = {"float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16)}
_DLPACK |= {"int32": (0, 32), "int64": (0, 64), "uint32": (1, 32), "uint64": (1, 64)}


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_take = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("PyMem_RawMalloc", ctypes.pythonapi))
_GIVE = ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p).value
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def in_large_pages(address: int, size: int) -> None:
    """Ask for pages of 2 MiB for memory on the host that nobody has touched yet, where the system has them to give.

    Rows of a large table lie in a page each otherwise, and finding the pages takes longer than reading the rows.
    """
    page = mmap.PAGESIZE
    start, end = -(-address // page) * page, (address + size) // page * page
    if _madvise is not None and end - start >= _LARGE:
        _madvise(start, end - start, _HUGEPAGE)


def empty(shape: Sequence[int], dtype: str, place: Place = _CPU) -> Any:
    """A value of this shape and element type on ``place``, content undefined. ArgumentTypeError for strings."""
    try:
        value = allocate(shape, ONNX_TYPES[dtype], place)
        if not on_device(place):
            in_large_pages(value.data_ptr(), value.tensor_size_in_bytes())
        return value
    except RuntimeError as error:
        if "not supported" not in str(error) and dtype != "string":
            raise
        raise ArgumentTypeError(f"onnxruntime cannot hold a tensor of {dtype} outside a model") from None


def from_array(array: Any, place: Place = _CPU) -> Any:
    """A copy of a numpy array (also a memory-mapped one) on ``place``."""
    array = np.asarray(array, order="C")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    kind = element_type(array.dtype)
    if kind in _PACKED:
        return _from_packed(array, kind, place)
    value = empty(array.shape, kind, place)
    write(value, array)
    return value


def write(value: Any, content: Any) -> None:
    """Give a value the content of an array, or of another value on any device, of its shape and element type."""
    if isinstance(content, np.ndarray):
        dtype = dtype_of(value)
        packed = dtype in _PACKED
        content = np.asarray(content, order="C")
        if takes_arrays(value) and not packed:
            value.update_inplace(plain(content))
            return
        content = alias(content, dtype)
    copy(content, value)


def alias(array: np.ndarray, dtype: str) -> Any:
    """A value on CPU that shares the memory of a contiguous array."""
    if dtype in _PACKED:
        return _from_packed(array, dtype, _CPU)
    if _foreign(array.dtype):
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])
    return ort.OrtValue.ortvalue_from_numpy(array)


def fed(value: Any) -> Any:
    """What a run that copies its feeds takes for a value: an array itself, but where only a value has its type."""
    return alias(value, value.dtype.name) if isinstance(value, np.ndarray) and _foreign(value.dtype) else value


def view(value: Any, offset: int, shape: Sequence[int]) -> Any:
    """A value that shares the memory of one of floats or integers, from its element ``offset`` on; on any device.

    It keeps ``value`` alive. Made through DLPack, whose deleter is one that needs no Python: values may die with it.
    """
    dtype = dtype_of(value)
    header = ctypes.sizeof(_Managed)
    block = _take(header + 8 * max(1, len(shape)))
    managed = _Managed.from_address(block)
    sizes = (ctypes.c_int64 * len(shape)).from_address(block + header)
    sizes[:] = list(shape)
    device, number = value.__dlpack_device__()
    managed.data, managed.device, managed.device_id = value.data_ptr() + offset * BYTES[dtype], device, number
    managed.rank, managed.code, managed.bits, managed.lanes = len(shape), *_DLPACK[dtype], 1
    managed.shape, managed.strides, managed.byte_offset = block + header, None, 0
    managed.context, managed.deleter = None, _GIVE
    made = ort.OrtValue.from_dlpack(_capsule(block, b"dltensor", None))
    made.whole = value
    return made


def whole(value: Any) -> Any:
    """The value whose memory a view shares; None for a value of its own."""
    return getattr(value, "whole", None)


def shared_array(value: Any) -> np.ndarray:
    """A flat array (ml_dtypes' for bfloat16) that shares the memory of a value on CPU, which must outlive it."""
    memory = (ctypes.c_char * value.tensor_size_in_bytes()).from_address(value.data_ptr())
    return np.frombuffer(memory, numpy_dtype(dtype_of(value)))


def to_array(value: Any) -> np.ndarray:
    """A copy of a value, from any device, as a numpy array (ml_dtypes for bfloat16)."""
    dtype = dtype_of(value)
    value = on_host(value)
    if not _foreign(numpy_dtype(dtype)) and dtype not in _PACKED:
        return np.array(value.numpy())
    size = value.tensor_size_in_bytes()
    data = (ctypes.c_char * size).from_address(value.data_ptr()).raw if size else b""
    if dtype in _PACKED:
        return onnx.numpy_helper.to_array(
            onnx.TensorProto(dims=value.shape(), data_type=ONNX_TYPES[dtype], raw_data=data)
        )
    return np.frombuffer(bytearray(data), numpy_dtype(dtype)).reshape(value.shape())


def on_host(value: Any) -> Any:
    """The value if it lies in the host's memory, else a copy of it there."""
    return value if value.device_name() == "cpu" else copy_to(value)


def copy_to(value: Any, place: Place = _CPU) -> Any:
    """A copy of a value on ``place``."""
    target = empty(value.shape(), dtype_of(value), place)
    copy(value, target)
    return target


def dtype_of(value: Any) -> str:
    """The element type name of a value."""
    return NAMES[value.element_type()]


def rounded(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """A float array in another float type; PrecisionError where a finite value of parameter ``name`` is beyond it.

    It takes no more memory than what it returns: tables of gigabytes go through here.
    """
    result = np.empty(array.shape, numpy_dtype(dtype))
    rest = result.reshape(-1)
    with np.errstate(over="ignore"):
        for piece in chunks(array):
            part, rest = rest[: piece.size], rest[piece.size :]
            part[...] = piece.astype(part.dtype)
            if not np.array_equal(np.isfinite(part), np.isfinite(piece)):
                largest = max(float(np.abs(one[np.isfinite(one)]).max(initial=0)) for one in chunks(array))
                raise PrecisionError(
                    f"parameter '{name}' does not fit {dtype}: its largest value is {largest:g}. Keep what reads it in "
                    "fp32 (custom_black_varnames, or outside fp16_guard), or use bfloat16; nothing was cast"
                )
    return result


def plain(array: np.ndarray) -> np.ndarray:
    """The same bytes with an element type that onnxruntime's copy accepts."""
    return array.view(_BITS[array.dtype.itemsize]) if _foreign(array.dtype) else array


def _foreign(dtype: np.dtype) -> bool:
    """A type of ml_dtypes, which onnxruntime's conversions do not know."""
    return dtype.isbuiltin == 2


def _from_packed(array: np.ndarray, dtype: str, place: Place) -> Any:
    packed = onnx.numpy_helper.from_array(array.astype(numpy_dtype(dtype))).raw_data
    value = empty(array.shape, dtype)
    ctypes.memmove(value.data_ptr(), packed, len(packed))
    return copy_to(value, place) if on_device(place) else value
