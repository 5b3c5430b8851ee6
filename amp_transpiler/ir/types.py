"""Element types: the names used everywhere in this package, and their ONNX and numpy counterparts."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.option_checks import shown
from amp_transpiler.spelling import TYPES

#: name -> onnx.TensorProto element type; the names are numpy's and ml_dtypes'.
ONNX_TYPES: dict[str, int] = {
    {"FLOAT": "float32", "DOUBLE": "float64", "COMPLEX64": "complex64", "COMPLEX128": "complex128"}.get(
        name, name.lower()
    ): number
    for name, number in onnx.TensorProto.DataType.items()
    if name != "UNDEFINED"
}
NAMES: dict[int, str] = {number: name for name, number in ONNX_TYPES.items()}

#: Dimensions that numpy knows, through which all arrays go.
RANK = 64

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
HALF = frozenset({"float16", "bfloat16"})
INTEGERS = frozenset({"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"})
#: Short names, of casts and in reasons.
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
BYTES = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2}

# ml_dtypes spells its small floats otherwise: float8_e4m3fn, float4_e2m1fn, …
_ALIASES = TYPES | {
    np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number)).name: name
    for name, number in ONNX_TYPES.items()
    if name.startswith(("float8", "float6", "float4"))
}


@dataclass(frozen=True)
class Limits:
    """What a floating-point type holds: its ``largest`` finite number, the smallest ``normal`` one, the ``smallest``
    above zero, and ``epsilon``, the step from 1 to the next number."""

    largest: float
    normal: float
    smallest: float
    epsilon: float

    @property
    def overflow(self) -> float:
        """From this magnitude on a number rounds to infinity."""
        return self.largest + self.largest / (2.0 - self.epsilon) * self.epsilon / 2.0

    @property
    def vanish(self) -> float:
        """Up to this magnitude a number rounds to zero."""
        return self.smallest / 2.0

    def holds(self, number: float) -> bool:
        """Whether a number above 0 is neither 0 nor infinite in it."""
        return self.vanish < number < self.overflow


def _limits(name: str) -> Limits:
    info = ml_dtypes.finfo(name)
    return Limits(*map(float, (info.max, info.smallest_normal, info.smallest_subnormal, info.eps)))


#: Limits of the floating-point types; the one place that knows them.
LIMITS: dict[str, Limits] = {name: _limits(name) for name in sorted(FLOATS)}


def element_type(dtype: Any) -> str:
    """The canonical name of an element type given as a name, numpy dtype or ONNX number."""
    if isinstance(dtype, int) and not isinstance(dtype, bool):
        if dtype in NAMES:
            return NAMES[dtype]
        raise ArgumentError(f"{dtype} is not an ONNX element type")
    if isinstance(dtype, str):
        name = _ALIASES.get(dtype.lower(), dtype.lower())
    else:
        try:
            # A variable's ``dtype`` is a name, by which numpy before 2 took the variable for a type.
            name = str(dtype) if isinstance(getattr(dtype, "dtype", None), str) else np.dtype(dtype).name
        except (TypeError, ValueError):  # what has an attribute ``dtype`` of another kind
            name = str(dtype)
        name = _ALIASES.get(name, name)
        if name.startswith("str"):
            name = "string"
    if name == "object":
        name = "string"
    if name not in ONNX_TYPES:
        raise ArgumentError(f"unknown element type {dtype!r}; known are {', '.join(sorted(ONNX_TYPES))}")
    return name


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """numpy's name of a dtype, which it puts together anew each time."""
    return dtype.name


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype (ml_dtypes for bfloat16 and the small floats) of an element type name."""
    if name == "bfloat16":
        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(ONNX_TYPES[name]))


def check_declared(name: str, shape: Any) -> None:
    """ArgumentTypeError where a new variable may not have this name or this shape."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"add_variable: name is {shown(name)}; expected a string")
    if shape is not None and (isinstance(shape, str) or not isinstance(shape, Iterable)):
        raise ArgumentTypeError(f"add_variable: shape of '{name}' is {shown(shape)}; expected a list of sizes, or None")
