"""Variables and their constant content in another precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import PrecisionError
from amp_transpiler.ir.constant_data import held_data
from amp_transpiler.ir.nodes import Operator, Variable, origin
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import CastTensor, as_array, byte_size, chunks, held, tensor_type
from amp_transpiler.ir.types import FLOATS, LIMITS, ONNX_TYPES, numpy_dtype

#: Elements from which on a converted constant is not kept.
_LARGE = 1 << 16
#: Elements of the largest that are converted many at a time, and how many.
_TINY, _BATCH = 1 << 12, 256
#: Operators that hold what they make.
_HOLDERS = frozenset({"Constant", "ConstantOfShape"})


def content(variable: Variable) -> Any:
    """The dense content of a variable or of the Constant operator that makes it, else None."""
    if variable.is_input:  # an initializer that the caller may feed over
        return None
    data = held_data(variable)
    return None if isinstance(data, onnx.SparseTensorProto) else data


def constant_content(variable: Variable | None) -> Any:
    """The dense content of a constant, also of an enclosing graph, else None: as of parameters and other state, which
    may come to hold another."""
    held = None if variable is None else origin(variable)
    return None if held is None or held.persistable else content(held)


def _batched(variables: Iterable[Variable], size: int) -> Iterator[list[Variable]]:
    """The variables in groups of this size."""
    rest = iter(variables)
    while group := list(islice(rest, size)):
        yield group


def stored_bytes(variable: Variable) -> dict[str, int]:
    """Bytes of what a weight or a constant holds, as its file has them, by element type; empty for other variables.

    Constant operators count as initializers do, and of a sparse tensor its numbers and their places.
    """
    data = held_data(variable)
    parts = (data.values, data.indices) if isinstance(data, onnx.SparseTensorProto) else (data,)
    return {} if data is None else {dtype: byte_size(dtype, shape) for dtype, shape in map(tensor_type, parts)}


def is_constant(variable: Variable) -> bool:
    """Whether the variable is a floating-point constant whose content is known and dense, and not a parameter."""
    if variable.data is None and (variable.producer is None or variable.producer.type != "Constant"):
        return False  # as most
    return variable.dtype in FLOATS and constant_content(variable) is not None


def may_hold(variable: Variable) -> bool:
    """Whether the variable, or the operator that makes it, is of those that hold content; for most it is not."""
    producer = variable.producer
    return variable.data is not None or (producer is not None and producer.type in _HOLDERS)


def has_content(variable: Variable) -> bool:
    """Whether the content is known here: a constant, or a parameter that carries its first value."""
    return content(variable) is not None


def converted(variable: Variable, dtype: str, reader: str, magnitude: float = math.inf) -> np.ndarray | CastTensor:
    """The content in ``dtype``, a large one when it is used; PrecisionError where a finite number leaves its range.

    What only bounds ends where the range does. ``magnitude``: that of its largest number, where that is known and all
    of them are finite.
    """
    data, limit = content(variable), LIMITS[dtype].largest
    if math.prod(tensor_type(data)[1]) >= _LARGE:
        for piece in chunks(data) if magnitude > limit else ():
            if not (-limit <= float(piece.min()) and float(piece.max()) <= limit):  # NaN as well
                _check_range(variable, piece, _cast(piece, dtype), dtype, reader)
        return CastTensor(data, dtype)
    array = as_array(data)
    result = _cast(array, dtype)
    if magnitude > limit:
        if only_bounds(variable, array, dtype):
            return _cast(np.where(np.isfinite(array), np.clip(array, -limit, limit), array), dtype)
        _check_range(variable, array, result, dtype, reader)
    return result


def only_bounds(variable: Variable, array: np.ndarray, dtype: str) -> bool:
    """Whether all that its content tells, where it lies beyond the range of ``dtype``, is that nothing lies beyond it:
    it is read as a lower bound, and very low, or as an upper one, and very high."""
    limit = LIMITS[dtype].overflow
    finite = array[np.isfinite(array)]
    low, high = (finite <= -limit).any(), (finite >= limit).any()
    slots = [(traits_of(op).lower if low else traits_of(op).upper, slot) for op, slot in variable.readers]
    read = bool(slots) and variable not in variable.program.outputs
    return read and bool(low != high) and all(known is None or slot in known for known, slot in slots)


def all_converted(
    readers: Mapping[Variable, Operator], dtype: str, magnitudes: Mapping[Variable, float]
) -> dict[Variable, np.ndarray | CastTensor | onnx.TensorProto]:
    """The content of float32 variables in ``dtype``, as :func:`converted` gives it; what is tiny goes in one piece.

    ``magnitudes``: those that are known.
    """
    tiny: dict[Variable, tuple[bytes, list[int]]] = {}
    for variable in readers:
        data = content(variable) if variable.producer is None else None
        if isinstance(data, onnx.TensorProto) and not (data.doc_string or data.metadata_props):
            dims = data.dims[:]
            if math.prod(dims) <= _TINY and (raw := data.raw_data):
                tiny[variable] = raw, dims
    found: dict[Variable, np.ndarray | CastTensor | onnx.TensorProto] = {}
    number = ONNX_TYPES[dtype]
    for variables in _batched(tiny, _BATCH):
        array = np.frombuffer(b"".join([tiny[variable][0] for variable in variables]), "<f4")
        result = _cast(array, dtype)
        if (np.isfinite(array) & ~np.isfinite(result)).any():
            break  # one of them fails, and the first one that does is named
        cast, start = result.tobytes(), 0
        for variable in variables:
            raw, dims = tiny[variable]
            end = start + len(raw) * result.itemsize // array.itemsize
            name = variable.name
            found[variable] = onnx.TensorProto(name=name, data_type=number, dims=dims, raw_data=cast[start:end])
            start = end
    known = magnitudes.get
    return {
        v: found[v] if v in found else converted(v, dtype, reader.label, known(v, math.inf))
        for v, reader in readers.items()
    }


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(numpy_dtype(dtype))


def _check_range(variable: Variable, array: np.ndarray, result: np.ndarray, dtype: str, reader: str) -> None:
    finite = np.isfinite(result)
    if finite.all():
        return
    lost = np.isfinite(array) & ~finite
    if lost.any():
        worst, kind = float(np.abs(array[lost]).max()), "parameter" if variable.persistable else "constant"
        raise PrecisionError(
            f"{kind} '{variable.name}' of program '{variable.program.name}' holds {worst:g}, beyond the range of "
            f"{dtype} (±{LIMITS[dtype].largest:.5g}), and '{reader}' reads it in {dtype}. Keep its "
            f"readers fp32: put '{variable.name}' on custom_black_varnames (black_varnames of amp.convert, "
            "--black-varnames), or change its value"
        )


def replace(variable: Variable, array: np.ndarray | CastTensor | onnx.TensorProto) -> None:
    """Let the variable carry ``array``. What a scope holds of it is left alone."""
    producer = variable.producer
    if isinstance(array, CastTensor | onnx.TensorProto) and producer is None:
        variable.data = array
        return
    array = np.asarray(array)
    if producer is None:
        variable.data = held(array, variable.name, variable.data)
        return
    producer.attrs.clear()
    producer.attrs["value"] = array


def fill(op: Operator | None) -> np.ndarray | None:
    """The element that a ConstantOfShape writes everywhere, as an array of one; None for any other operator."""
    if op is None or op.full_type != "ConstantOfShape":
        return None
    return as_array(op.attrs["value"]) if "value" in op.attrs else np.zeros(1, np.float32)


def values(variable: Variable) -> np.ndarray | None:
    """The content of a variable as an array, or the element that its ConstantOfShape writes; None of others."""
    data = fill(variable.producer)
    if data is None:
        data = content(variable)
    return None if data is None else as_array(data)


def saturate(variable: Variable, limit: float) -> None:
    """Let no finite element of the constant (or of what a ConstantOfShape writes) lie beyond ``limit`` (below it
    where that is negative)."""
    array = values(variable)
    assert array is not None
    bound = np.asarray(limit, array.dtype)
    beyond = np.isfinite(array) & (array < bound if limit < 0 else array > bound)
    replace(variable, np.where(beyond, bound, array))
