"""Checks of what engines are called with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.option_checks import choice, is_whole, shown
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.headers import DTYPES, OPS


def flat(called: str, array: Any, written: bool = True) -> np.ndarray:
    """An array, or an onnxruntime value in memory, as a flat view of its memory."""
    if hasattr(array, "data_ptr") and array.device_name() == "cpu":
        array = device_tensors.shared_array(array)
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(f"{called}: expected a numpy array or a value on CPU, got {type(array).__name__}")
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise ArgumentTypeError(f"{called}: {array.dtype.name} cannot be sent; give floats, integers or bool")
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{called}: the array is not contiguous; give numpy.ascontiguousarray(array)")
    if written and not array.flags.writeable:
        raise ArgumentError(f"{called}: the array is read-only; give a copy")
    return array.reshape(-1)


def apart(called: str, arrays: Sequence[Any]) -> Sequence[Any]:
    """The arrays; ArgumentError where two share memory: what they share would be reduced twice."""
    spans = []
    for at, array in enumerate(arrays):
        if hasattr(array, "data_ptr"):
            spans.append((array.data_ptr(), array.tensor_size_in_bytes(), at))
        elif isinstance(array, np.ndarray):
            spans.append((array.__array_interface__["data"][0], array.nbytes, at))
    for (start, size, one), (following, _, other) in pairwise(sorted(span for span in spans if span[1])):
        if following < start + size:
            first, second = sorted((one, other))
            raise ArgumentError(f"{called}: arrays {first} and {second} of the list share memory; give one, or a copy")
    return arrays


def operation(called: str, op: str, dtype: str) -> None:
    """ArgumentError for what cannot be computed with this element type."""
    choice(f"{called}: op", op, OPS[1:])
    if dtype == "bool" and op != "max":
        raise ArgumentError(f"{called}: bool has no {op}; op='max' says whether any rank has True")
    if op == "mean" and dtype not in FLOATS:
        raise ArgumentError(f"{called}: {dtype} has no mean; give floats, or take op='sum' and divide")


def sizes_of(called: str, sizes: Sequence[int], ranks: int, total: int) -> list[int]:
    """Sizes of parts, one for each rank, that make up the array."""
    found = list(sizes)
    if any(not is_whole(size) or size < 0 for size in found):
        raise ArgumentError(f"{called}: sizes are {shown(found)}; expected whole numbers from 0 on")
    if len(found) != ranks:
        raise ArgumentError(f"{called}: {len(found)} sizes for {ranks} ranks")
    if sum(found) != total:
        raise ArgumentError(f"{called}: the sizes add up to {sum(found)}, the array has {total} elements")
    return [int(size) for size in found]


def rank_of(called: str, rank: Any, ranks: int) -> int:
    """The number of a rank."""
    if not is_whole(rank) or not 0 <= rank < ranks:
        raise ArgumentError(f"{called}: rank {shown(rank)} is none of 0 to {ranks - 1}")
    return int(rank)


def parts_of(called: str, parts: Sequence[Any], ranks: int) -> list[np.ndarray]:
    """Parts for :meth:`Engine.all_to_all`: one for each rank, of one type and one shape behind the first dimension."""
    given = ((part, flat(called, part, written=False)) for part in parts)
    arrays = [array.reshape(part.shape() if hasattr(part, "data_ptr") else part.shape) for part, array in given]
    if len(arrays) != ranks:
        raise ArgumentError(f"{called}: {len(arrays)} parts for {ranks} ranks")
    kinds = {(part.dtype.name, part.shape[1:], part.ndim > 0) for part in arrays}
    if len(kinds) != 1 or not arrays[0].ndim:
        listed = ", ".join(f"{part.dtype.name}{list(part.shape)}" for part in arrays)
        raise ArgumentError(f"{called}: parts differ in type or in shape behind the first dimension: {shown(listed)}")
    return arrays
