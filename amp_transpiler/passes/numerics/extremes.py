"""The least and the largest number of every small constant, in one look at all of them: a program has thousands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import tensor_type
from amp_transpiler.passes.view.typing import programs

#: Elements of constants that are looked at together with others, and bytes of those that are.
_SMALL, _BATCH = 1 << 10, 1 << 24

_FLOAT = onnx.TensorProto.FLOAT

RowSums = tuple[np.ndarray, np.ndarray]


class Extremes(NamedTuple):
    """Of a float32 constant: elements, the least and the largest of them (NaN where one is), the largest magnitude,
    and the smallest one above zero (infinite where there is none)."""

    size: int
    low: float
    high: float
    magnitude: float
    least: float


def extremes(program: Graph) -> dict[Variable, Extremes]:
    """Those of the small float32 constants of a program, nested graphs included."""
    found: dict[Variable, Extremes] = {}
    held = ((v, raw) for each in programs(program) for v in each.variables if (raw := _raw(v)))
    for batch in _batches(held):
        sizes = np.array([len(raw) // 4 for _, raw in batch])
        starts = np.cumsum(sizes) - sizes
        values = np.frombuffer(b"".join([raw for _, raw in batch]), "<f4")
        size = np.abs(values)
        parts = [
            np.minimum.reduceat(values, starts),
            np.maximum.reduceat(values, starts),
            np.maximum.reduceat(size, starts),
        ]
        size[~(size > 0)] = np.inf
        parts.append(np.minimum.reduceat(size, starts))
        rows = zip(sizes.tolist(), *(part.tolist() for part in parts), strict=True)
        found.update((variable, Extremes(*row)) for (variable, _), row in zip(batch, rows, strict=True))
    return found


def _raw(variable: Variable) -> bytes | None:
    """The bytes of a constant that belongs to a variable without a producer, if it is small and of float32."""
    data = variable.data
    if data is None or variable.producer is not None or variable.is_input:
        return None
    if isinstance(data, onnx.TensorProto):
        raw: bytes = data.raw_data if data.data_type == _FLOAT and math.prod(data.dims[:]) <= _SMALL else b""
        return raw
    return data.tobytes() if isinstance(data, np.ndarray) and data.dtype == np.float32 and data.size <= _SMALL else None


def _batches(held: Iterator[tuple[Variable, bytes]]) -> Iterator[list[tuple[Variable, bytes]]]:
    """What is held in groups of about one size."""
    batch: list[tuple[Variable, bytes]] = []
    size = 0
    for each in held:
        batch.append(each)
        size += len(each[1])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def small_row_sums(
    operators: Sequence[Operator], known: Mapping[Variable, Extremes], source: Callable[[Variable], Variable]
) -> dict[tuple[Variable, tuple[int, ...]], RowSums | None]:
    """Sums of the positive and of the negative parts of the small weights of products, over the axes that these sum.

    By weight and axes, as :meth:`.ranges.Ranges.row_sums` gives them for one.
    """
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[Variable, bytes]] = {}
    axes_of: dict[tuple[str, str], Callable[[Operator, int], tuple[int, ...]] | None] = {}
    for op in operators:
        type_ = (op.type, op.domain)
        if type_ not in axes_of:
            axes_of[type_] = traits_of(op).weight_axes
        summed = axes_of[type_]
        read = op.input(1) if summed is not None else None
        weight = source(read) if summed is not None and read is not None else None
        if summed is None or weight is None or weight not in known:
            continue
        shape = tensor_type(weight.data)[1]
        raw = _raw(weight)
        if len(shape) >= 2 and raw:
            kinds.setdefault((shape, summed(op, len(shape))), {})[weight] = raw
    found: dict[tuple[Variable, tuple[int, ...]], RowSums | None] = {}
    for (shape, axes), weights in kinds.items():
        for batch in _batches(iter(weights.items())):
            values = np.frombuffer(b"".join([raw for _, raw in batch]), "<f4").reshape(len(batch), *shape)
            values = values.astype(np.float64)
            over = tuple(axis + 1 if axis >= 0 else axis for axis in axes)
            total, size = (part.sum(over).reshape(len(batch), -1) for part in (values, np.abs(values)))
            finite = np.isfinite(size).all(axis=1)
            with np.errstate(invalid="ignore"):  # of what is not finite
                up, down = (size + total) / 2, (size - total) / 2
            for row, (weight, _) in enumerate(batch):
                found[weight, axes] = (up[row], down[row]) if finite[row] else None
    return found
