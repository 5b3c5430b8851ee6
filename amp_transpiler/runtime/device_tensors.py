"""Tensors on a device: numpy arrays to onnxruntime values and back.

onnxruntime's own conversions alias numpy memory on CPU and refuse bfloat16; these own their memory, and
take every element type that onnxruntime can hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from amp_transpiler.errors import ArgumentTypeError, PrecisionError
from amp_transpiler.ir.types import NAMES, ONNX_TYPES, element_type, numpy_dtype
from amp_transpiler.passes.lowering.place import CPUPlace, Place

#: Several elements in one byte: numpy has one a byte, onnxruntime packs them.
_PACKED = frozenset({"int4", "uint4", "float4e2m1", "int2", "uint2"})
_BITS = {1: np.uint8, 2: np.uint16}
_CPU = CPUPlace()


def empty(shape: Sequence[int], dtype: str, place: Place = _CPU) -> Any:
    """A value of this shape and element type on ``place``, content undefined. ArgumentTypeError for strings."""
    try:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), ONNX_TYPES[dtype], place.kind, place.device_id)
    except RuntimeError as error:
        if "not supported" not in str(error) and dtype != "string":
            raise
        raise ArgumentTypeError(f"onnxruntime cannot hold a tensor of {dtype} outside a model") from None


def from_array(array: Any, place: Place = _CPU, dtype: str | None = None) -> Any:
    """A copy of a numpy array (also a memory-mapped one) on ``place``."""
    array = np.asarray(array, order="C")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    kind = dtype or element_type(array.dtype)
    if kind in _PACKED:
        return _from_packed(array, kind, place)
    value = empty(array.shape, kind, place)
    value.update_inplace(_plain(array))
    return value


def alias(array: np.ndarray, dtype: str) -> Any:
    """A value on CPU that shares the memory of a contiguous array."""
    if dtype in _PACKED:
        return _from_packed(array, dtype, _CPU)
    if _foreign(array.dtype):
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])
    return ort.OrtValue.ortvalue_from_numpy(array)


def to_array(value: Any) -> np.ndarray:
    """A copy of a value, from any device, as a numpy array (ml_dtypes for bfloat16)."""
    dtype = dtype_of(value)
    value = copy_to(value, _CPU) if value.device_name() != "cpu" else value
    if not _foreign(numpy_dtype(dtype)) and dtype not in _PACKED:
        return np.array(value.numpy())
    size = value.tensor_size_in_bytes()
    data = (ctypes.c_char * size).from_address(value.data_ptr()).raw if size else b""
    if dtype in _PACKED:
        return onnx.numpy_helper.to_array(
            onnx.TensorProto(dims=value.shape(), data_type=ONNX_TYPES[dtype], raw_data=data)
        )
    return np.frombuffer(bytearray(data), numpy_dtype(dtype)).reshape(value.shape())


def copy_to(value: Any, place: Place) -> Any:
    """A copy of a value on ``place``."""
    target = empty(value.shape(), dtype_of(value), place)
    target.update_inplace(value)
    return target


def on(value: Any, place: Place) -> bool:
    """Whether the value lies on this place (no device number is kept by onnxruntime's values on CPU)."""
    if value.device_name() != place.kind:
        return False
    return place.kind == "cpu" or value.__dlpack_device__()[1] == place.device_id


def dtype_of(value: Any) -> str:
    """The element type name of a value."""
    return NAMES[value.element_type()]


def rounded(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """A float array in another float type; PrecisionError where a finite value of parameter ``name`` is beyond it."""
    with np.errstate(over="ignore"):
        result = array.astype(numpy_dtype(dtype))
    finite = np.isfinite(array)
    if not np.array_equal(np.isfinite(result), finite):
        largest = float(np.abs(array[finite]).max())
        raise PrecisionError(
            f"parameter '{name}' does not fit {dtype}: its largest value is {largest:g}. Keep what "
            "reads it in fp32 (custom_black_varnames, or outside fp16_guard), or use bfloat16; nothing was cast"
        )
    return result


def _plain(array: np.ndarray) -> np.ndarray:
    """The same bytes with an element type that onnxruntime's copy accepts."""
    return array.view(_BITS[array.dtype.itemsize]) if _foreign(array.dtype) else array


def _foreign(dtype: np.dtype) -> bool:
    """A type of ml_dtypes, which onnxruntime's conversions do not know."""
    return dtype.isbuiltin == 2


def _from_packed(array: np.ndarray, dtype: str, place: Place) -> Any:
    packed = onnx.numpy_helper.from_array(array.astype(numpy_dtype(dtype))).raw_data
    value = empty(array.shape, dtype)
    ctypes.memmove(value.data_ptr(), packed, len(packed))
    return value if place.kind == "cpu" else copy_to(value, place)
