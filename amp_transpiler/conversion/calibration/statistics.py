"""Sums over batches: a tensor in fp32 beside the same tensor in 16 bit, and an output beside what it should be."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_transpiler.ir.types import FLOATS, LIMITS, element_type

#: Elements that are compared at a time: their float64 copies stay in the processor's cache.
_CHUNK = 1 << 16
_EXPONENT = np.int64(0x7FF0000000000000)


class TensorStats:
    """A floating-point tensor over all batches.

    ``largest``, ``smallest``: magnitude of the largest finite number, and of the smallest that is not zero, in fp32.
    ``finite``: whether the converted program's value is finite wherever the fp32 one is. ``floor``: the least L2 norm
    that it counts as.
    """

    __slots__ = (
        "_error",
        "_floor",
        "_kept",
        "_known",
        "_over",
        "_rounding",
        "_square",
        "finite",
        "largest",
        "smallest",
    )

    def __init__(self, floor: float = 0.0) -> None:
        self.largest, self.smallest, self.finite = 0.0, math.inf, True
        self._floor = floor**2
        self._known = self._over = 0
        self._square = self._kept = self._rounding = self._error = 0.0

    @property
    def overflow(self) -> float:
        """Share of the finite numbers that are beyond the 16-bit type, 0 to 1."""
        return self._over / self._known if self._known else 0.0

    @property
    def rounding(self) -> float:
        """Relative L2 error of storing the tensor in 16 bit; numbers that overflow are left out."""
        return relative(self._rounding, max(self._kept, self._floor))

    @property
    def error(self) -> float:
        """Relative L2 error of the converted program's value; infinite where that is not finite and should be."""
        return relative(self._error, max(self._square, self._floor)) if self.finite else math.inf

    def add(self, value: np.ndarray, converted: np.ndarray, dtype: str) -> None:
        """Take in another batch: the value in fp32, the one in the converted program, and the 16-bit type."""
        alike = value.shape == converted.shape
        value, converted = value.reshape(-1), converted.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, value.size, _CHUNK):
                exact = value[start : start + _CHUNK].astype(np.float64)
                # a shape that depends on data may differ: then no number is where it belongs
                self._add(exact, _wide(converted[start : start + _CHUNK]) if alike else np.zeros_like(exact), dtype)
        if not alike and not value.size:
            self._error += 1.0

    def _add(self, exact: np.ndarray, other: np.ndarray, dtype: str) -> None:
        size = np.abs(exact)
        top = float(size.max())
        if not math.isfinite(top):
            known = np.isfinite(exact)
            exact, other, size = exact[known], other[known], size[known]
            top = float(size.max(initial=0.0))
        low = float(size.min(initial=math.inf))
        if low == 0:
            low = float(np.where(size > 0, size, math.inf).min())
        self.largest, self.smallest = max(self.largest, top), min(self.smallest, low)
        self._known += exact.size
        square = _square(exact)
        self._square += square
        error = _square(other - exact)
        if not math.isfinite(error) and not np.isfinite(other).all():
            self.finite = False
        self._error += error
        stored, limit = rounded(exact, dtype), LIMITS[dtype].largest
        if top > limit:
            kept = np.abs(stored) <= limit
            self._over += int(exact.size - kept.sum())
            exact, stored = exact[kept], stored[kept]
            square = _square(exact)
        self._kept += square
        self._rounding += _square(stored - exact)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Finite float64 numbers rounded to ``dtype``, ties to even, as float64; what overflows is beyond its largest.

    Adding a number of 52 bits more than the result keeps, and taking it off again, rounds. numpy's own conversion
    takes 20 times as long where numbers are subnormal in float16, as most of a softmax are.
    """
    limits = LIMITS[dtype]
    power = (values.view(np.int64) & _EXPONENT).view(np.float64)  # the power of two at or below each
    np.maximum(power, limits.normal, out=power)
    power *= 1.5 * limits.epsilon / LIMITS["float64"].epsilon
    result = values + power
    result -= power
    return result


def _wide(values: np.ndarray) -> np.ndarray:
    """As float64; float16 by table, for the same reason."""
    if values.dtype == np.float16:
        return np.take(_float16(), values.view(np.uint16)).astype(np.float64)
    return values.astype(np.float64)


@functools.cache
def _float16() -> np.ndarray:
    """Every float16 number, in the order of its bits, as float32."""
    with np.errstate(invalid="ignore"):
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


class Difference:
    """The error of an output, over all batches: numbers by relative L2 error, all else by the share that differs.

    ``floor``: the least L2 norm that numbers count as.
    """

    def __init__(self, floor: float = 0.0) -> None:
        self._floor = floor**2
        self._square = self._deviation = 0.0
        self._count = self._different = 0

    @property
    def error(self) -> float:
        """The larger of both; not a number where only the converted program gives that."""
        share = self._different / self._count if self._count else 0.0
        error = relative(self._deviation, max(self._square, self._floor))
        return error if math.isnan(error) else max(error, share)

    def add(self, wanted: Any, got: Any) -> None:
        """Take in another batch: arrays, or the sequences, maps and scalars that onnxruntime gives beside them."""
        if isinstance(wanted, Mapping) and isinstance(got, Mapping) and wanted.keys() == got.keys():
            for key in wanted:
                self.add(wanted[key], got[key])
        elif isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
            for one, other in zip(wanted, got, strict=True):
                self.add(one, other)
        elif _is_tensor(wanted) and _is_tensor(got):
            self._add(np.asarray(wanted), np.asarray(got))
        else:  # an optional that only one of them has, or sequences of other lengths
            self._add_share(1, int(wanted is not got))

    def _add(self, wanted: np.ndarray, got: np.ndarray) -> None:
        if wanted.shape != got.shape:
            self._add_share(max(wanted.size, 1), max(wanted.size, 1))
        elif _is_float(wanted) and _is_float(got):
            one, other = wanted.astype(np.float64), got.astype(np.float64)
            same = (one == other) | (np.isnan(one) & np.isnan(other))
            with np.errstate(invalid="ignore"):
                self._deviation += _square((other - one)[~same])
            self._square += _square(one[np.isfinite(one)])
        else:
            self._add_share(wanted.size, int((wanted != got).sum()))

    def _add_share(self, count: int, different: int) -> None:
        self._count += count
        self._different += different


def relative(error: float, square: float) -> float:
    """Root of a ratio of sums of squares. Where all should be zero, an error counts as 1, and none as 0."""
    if square > 0 or not math.isfinite(error):
        return math.sqrt(error / square) if square > 0 else error
    return float(error > 0)


def _square(values: np.ndarray) -> float:
    # not by dot, which BLAS deals out to threads that wait for each other where the machine is busy
    flat = values.reshape(-1)
    return float(np.einsum("i,i", flat, flat))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic, str, bytes, bool, int, float))


def _is_float(value: np.ndarray) -> bool:
    return value.dtype.kind not in "USO" and element_type(value.dtype) in FLOATS
