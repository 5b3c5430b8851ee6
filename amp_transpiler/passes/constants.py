"""Constant content in another precision, and variables of another element type."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ..errors import PrecisionError
from ..ir.program import Variable
from ..ir.tensors import annotated, as_array, to_proto
from ..ir.types import FLOATS, HALF, ONNX_TYPES, numpy_dtype

_ATTRIBUTES = ("value", "value_float", "value_floats")


def _content(variable: Variable) -> Any:
    """The dense content of a constant variable or of the Constant operator that makes it, else None."""
    if variable.is_input:  # an initializer that the caller may feed over
        return None
    if variable.is_constant:
        return None if isinstance(variable.data, onnx.SparseTensorProto) else variable.data
    producer = variable.producer
    if producer is None or producer.type != "Constant" or producer.domain not in ("", "ai.onnx"):
        return None
    for name in _ATTRIBUTES:
        if name in producer.attrs:
            value = producer.attrs[name]
            return value if name == "value" else np.asarray(value, np.float32)
    return None


def is_constant(variable: Variable) -> bool:
    """Whether the variable is a floating-point constant whose content is known and dense."""
    return variable.dtype in FLOATS and _content(variable) is not None


def converted(variable: Variable, dtype: str, reader: str) -> np.ndarray:
    """The content in ``dtype``; PrecisionError where a finite number leaves its range."""
    array = as_array(_content(variable))
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(numpy_dtype(dtype))
    if dtype in HALF:
        lost = np.isfinite(array) & ~np.isfinite(result)
        if lost.any():
            worst = float(np.abs(array[lost]).max())
            limit = float(np.finfo(np.float16).max) if dtype == "float16" else 3.3895e38
            raise PrecisionError(
                f"constant '{variable.name}' of program '{variable.program.name}' holds {worst:g}, beyond the range of "
                f"{dtype} (±{limit:g}), and '{reader}' reads it in {dtype}. Put '{variable.name}' on "
                "custom_black_varnames to keep its readers fp32, or change the constant"
            )
    return result


def narrow(variable: Variable, dtype: str, reader: str) -> None:
    """Convert a constant in place."""
    content, array = _content(variable), converted(variable, dtype, reader)
    proto = annotated(to_proto(array, variable.name), content)
    producer = variable.producer
    if producer is None:
        variable.data = proto
    else:
        for name in _ATTRIBUTES:
            producer.attrs.pop(name, None)
        producer.attrs["value"] = array
    retype(variable, dtype)


def twin(variable: Variable, name: str, dtype: str, reader: str) -> Variable:
    """A further constant of the same content in ``dtype``."""
    array = converted(variable, dtype, reader)
    return variable.program.add_variable(name, dtype, variable.shape, data=array)


def retype(variable: Variable, dtype: str | None) -> None:
    """Give a tensor variable another element type."""
    variable.dtype = dtype
    proto = variable.type_proto
    if proto is not None and dtype is not None and proto.HasField("tensor_type"):
        variable.type_proto = onnx.TypeProto()
        variable.type_proto.CopyFrom(proto)
        variable.type_proto.tensor_type.elem_type = ONNX_TYPES[dtype]
