"""What 16 bit does to a model on given data: every tensor in fp32 beside the same tensor in faithful 16 bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..ir.program import Program, Variable
from ..ir.types import FLOATS, numpy_dtype
from .executor import Executor
from .place import CPUPlace

#: Bytes of activations that one run may hand out; a model with more is run several times, a part at a time.
_GROUP = 1 << 30

Batch = dict[str, np.ndarray]


@dataclass
class TensorStats:
    """A tensor over all batches.

    ``largest``, ``smallest``: magnitude of the largest, and of the smallest number that is not zero, in fp32.
    ``rounding``: relative L2 error of storing the fp32 values in 16 bit, those that overflow left out.
    ``error``: relative L2 error of the value in the converted program. ``finite``: whether that is finite where
    the fp32 value is.
    """

    largest: float = 0.0
    smallest: float = math.inf
    finite: bool = True
    _square: float = 0.0
    _rounding: float = 0.0
    _error: float = 0.0

    @property
    def rounding(self) -> float:
        """Relative L2 error of storing the tensor."""
        return _relative(self._rounding, self._square)

    @property
    def error(self) -> float:
        """Relative L2 error of the converted program's value."""
        return _relative(self._error, self._square) if self.finite else math.inf

    def add(self, value: np.ndarray, converted: np.ndarray, dtype: np.dtype) -> None:
        """Take another batch in."""
        value = value.astype(np.float32, copy=False).reshape(-1)
        size = np.abs(value)
        self.largest = max(self.largest, float(size.max(initial=0.0)))
        self.smallest = min(self.smallest, float(size.min(initial=np.inf, where=size > 0)))
        with np.errstate(over="ignore", invalid="ignore"):
            stored = value.astype(dtype).astype(np.float32)
            known = np.isfinite(value)
            kept = known & np.isfinite(stored)
            other = converted.astype(np.float32, copy=False).reshape(-1)
            self.finite = self.finite and bool(np.isfinite(other[known]).all())
            self._square += _square(value[known])
            self._rounding += _square((stored - value)[kept])
            self._error += _square((other - value)[known])


@dataclass
class Measurement:
    """``tensors``: statistics by the tensor's name in the fp32 program. ``outputs``: of each output its relative L2
    error, for integers, booleans and strings the share of elements that differ."""

    tensors: dict[str, TensorStats] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)

    def culprits(self, program: Program) -> list[str]:
        """What the operators of ``program`` make, in the order in which the error grows at them, most first."""
        growth: dict[str, float] = {}
        for op in program.operators:
            came = [self.tensors[v.name].error for v in op.inputs if v is not None and v.name in self.tensors]
            for variable in op.outputs:
                if variable is not None and variable.name in self.tensors:
                    error = self.tensors[variable.name].error
                    worst = max(came, default=0.0)
                    growth[variable.name] = error - worst if math.isfinite(worst) else 0.0
        return sorted(growth, key=lambda name: -growth[name])


def outputs_of(program: Program, batches: Sequence[Batch]) -> list[list[Any]]:
    """The outputs of ``program`` on each batch, computed on CPU (16-bit operators faithfully)."""
    executor = _executor()
    fetched = [v.name for v in program.outputs]
    return [executor.run(program, feed=_fed(program, batch), fetch_list=fetched) for batch in batches]


def measure(reference: Program, converted: Program, batches: Sequence[Batch], dtype: str, *,
            expected: Sequence[Sequence[Any]] | None = None, tensors: bool = True) -> Measurement:  # fmt: skip
    """Run both programs on the batches and compare.

    Args:
        reference: the program in fp32.
        converted: its conversion; 16-bit operators round as they would on a GPU.
        batches: feeds by input name, with the element types of ``reference``.
        dtype: the 16-bit type.
        expected: what the outputs should be, where that is not what ``reference`` gives.
        tensors: whether to compare inner tensors as well; those of nested graphs are never seen.

    Raises: what :meth:`.executor.Executor.run` raises for feeds that the model does not take.
    """
    found = Measurement()
    expected = outputs_of(reference, batches) if expected is None else expected
    names = [v.name for v in reference.outputs]
    differences = [_Difference() for _ in names]
    for wanted, got in zip(expected, outputs_of(converted, batches), strict=True):
        for difference, one, other in zip(differences, wanted, got, strict=True):
            difference.add(one, other)
    found.outputs = {name: d.error for name, d in zip(names, differences, strict=True)}
    if tensors:
        for group in _groups(_comparable(reference, converted)):
            _compare(reference, converted, batches, group, numpy_dtype(dtype), found)
    return found


def _compare(reference: Program, converted: Program, batches: Sequence[Batch], names: list[str], dtype: np.dtype,
             found: Measurement) -> None:  # fmt: skip
    one, other = _executor(), _executor()
    for batch in batches:
        values = one.run(reference, feed=_fed(reference, batch), fetch_list=names)
        others = other.run(converted, feed=_fed(converted, batch), fetch_list=names)
        for name, value, converted_value in zip(names, values, others, strict=True):
            found.tensors.setdefault(name, TensorStats()).add(value, converted_value, dtype)


class _Difference:
    """How far an output is off, over all batches."""

    def __init__(self) -> None:
        self.square = self.off = 0.0
        self.count = self.different = 0

    def add(self, wanted: Any, got: Any) -> None:
        if not isinstance(wanted, np.ndarray) or not isinstance(got, np.ndarray):  # a sequence, or an absent optional
            pairs = zip(wanted, got, strict=False) if isinstance(wanted, list) and isinstance(got, list) else ()
            if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
                for one, other in pairs:
                    self.add(one, other)
            elif wanted is not got:
                self.count, self.different = self.count + 1, self.different + 1
        elif wanted.shape != got.shape:
            self.count, self.different = self.count + wanted.size, self.different + wanted.size
        elif wanted.dtype.kind in "fV" or wanted.dtype.name == "bfloat16":
            one, other = wanted.astype(np.float64), got.astype(np.float64)
            same = (one == other) | (np.isnan(one) & np.isnan(other))
            with np.errstate(invalid="ignore"):
                self.off += _square((other - one)[~same])
            self.square += _square(one[np.isfinite(one)])
        else:
            self.count += wanted.size
            self.different += int((wanted != got).sum())

    @property
    def error(self) -> float:
        share = self.different / self.count if self.count else 0.0
        return max(_relative(self.off, self.square), share) if not math.isnan(self.off) else math.nan


def _square(values: np.ndarray) -> float:
    return float(np.dot(values.reshape(-1).astype(np.float64), values.reshape(-1).astype(np.float64)))


def _relative(off: float, square: float) -> float:
    """Root of a ratio of sums of squares; what should be zero and is not counts as 1."""
    return math.sqrt(off / square) if square > 0 else float(off > 0)


def _comparable(reference: Program, converted: Program) -> list[Variable]:
    """Floating-point tensors that both programs compute or are fed, in the order of the reference."""
    made = {v for op in reference.operators for v in op.outputs if v is not None}
    seen = [v for v in reference.variables if v.dtype in FLOATS and v.data is None and converted.has_var(v.name)]
    return [v for v in seen if v in made or v in reference.inputs]


def _groups(variables: Iterable[Variable]) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for variable in variables:
        size = 4 * math.prod(d if isinstance(d, int) else 64 for d in variable.shape or (64, 64))
        if group and held + size > _GROUP:
            yield group
            group, held = [], 0
        group.append(variable.name)
        held += size
    if group:
        yield group


def _fed(program: Program, batch: Batch) -> Batch:
    """The feeds with the element types that the program declares: an input may have become 16 bit."""
    declared = {v.name: numpy_dtype(v.dtype) for v in program.inputs if v.dtype in FLOATS}
    return {name: value.astype(declared[name], copy=False) if name in declared else value
            for name, value in batch.items()}  # fmt: skip


def _executor() -> Executor:
    # above "basic" onnxruntime may rearrange fp32 arithmetic between two roundings
    return Executor(CPUPlace(), optimization_level="basic")
