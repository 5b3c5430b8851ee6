"""Intervals of tensors, and what the range rules of operators are written with.

A rule gives the interval of what an operator makes, from those of what it reads, sound for every input in them. It
stands beside the operator, in its file of ``ops/``, under :func:`~amp_transpiler.ir.opdef.range_rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import FLOATS

Interval = tuple[float, float]
INF = math.inf
ANY: Interval = (-INF, INF)
#: The axes of a weight tensor of some rank over which a product sums.
Axes = Callable[[int], tuple[int, ...]]


class Ranges(Protocol):
    """What rules ask of the analysis, which is :class:`~amp_transpiler.passes.numerics.ranges.Ranges`."""

    def bound(self, variable: Variable | None) -> Interval | None:
        """The interval of a variable; None where nothing is known."""
        ...

    def content(self, variable: Variable | None) -> Any:
        """What a constant holds; None where that is not known."""
        ...

    def source(self, variable: Variable | None) -> Variable | None:
        """The variable of the program as it was written, behind the casts that passes put in."""
        ...

    def row_sums(self, weight: Variable | None, axes: Axes) -> tuple[np.ndarray, np.ndarray] | None:
        """Sums of the positive and of the negative parts of a constant, over all that one output adds up."""
        ...


RangeRule = Callable[[Operator, Ranges], Interval | None]


def same(op: Operator, ranges: Ranges) -> Interval | None:
    """The rule of what holds elements of the first input, or means of them."""
    return ranges.bound(op.input(0))


def same_or_zero(op: Operator, ranges: Ranges) -> Interval | None:
    """The rule of what holds elements of the first input, or means of them, and zeros."""
    return hull([ranges.bound(op.input(0)), (0.0, 0.0)])


def any_of(op: Operator, ranges: Ranges) -> Interval | None:
    """The rule of what holds elements of all its floating inputs, or means of them."""
    return hull([ranges.bound(v) for v in op.inputs if v is not None and v.dtype in FLOATS])


def increasing(function: Callable[[float], float]) -> RangeRule:
    """The rule of a function that grows with its argument."""

    def rule(op: Operator, ranges: Ranges) -> Interval | None:
        found = ranges.bound(op.input(0)) or ANY
        return function(found[0]), function(found[1])

    return rule


def hull(intervals: Sequence[Interval | None]) -> Interval | None:
    """The smallest interval around all of them; None where there is none, or one is not known."""
    if not intervals or any(interval is None for interval in intervals):
        return None
    return min(i[0] for i in intervals if i), max(i[1] for i in intervals if i)


def total(*intervals: Interval | None) -> Interval | None:
    """The interval of sums; None where one summand is not known."""
    if None in intervals:
        return None
    return sum(i[0] for i in intervals if i), sum(i[1] for i in intervals if i)


def negative(interval: Interval | None) -> Interval | None:
    """The interval with the other sign."""
    return interval and (-interval[1], -interval[0])


def product(one: Interval, other: Interval) -> Interval:
    """The interval of products."""
    ends = [0.0 if 0.0 in (a, b) else a * b for a in one for b in other]
    return min(ends), max(ends)


def magnitude(interval: Interval | None) -> Interval:
    """The interval of absolute values."""
    low, high = interval or ANY
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return least, max(abs(low), abs(high))


def squared(interval: Interval | None) -> Interval:
    """The interval of squares."""
    least, largest = magnitude(interval)
    return least * least, largest * largest


def weighted(data: Interval | None, ranges: Ranges, weight: Variable | None, axes: Axes) -> Interval | None:
    """Sums of data times constant weights: the positive parts take one end of the interval, the negative the other."""
    if data is None or not all(map(math.isfinite, data)):
        return None
    sums = ranges.row_sums(weight, axes)
    if sums is None:
        return None
    (up, down), (low, high) = sums, data
    least = np.minimum.reduce(up * low - down * high, initial=0)  # an array's own methods take twice as long
    return float(least), float(np.maximum.reduce(up * high - down * low, initial=0))


def biased(interval: Interval | None, op: Operator, ranges: Ranges) -> Interval | None:
    """The interval after the bias in the third input, where there is one."""
    return interval if op.input(2) is None else total(interval, ranges.bound(op.input(2)))


def terms(op: Operator) -> int | None:
    """Elements of the first input for each one of the output, from the shapes; None where they do not say."""
    sizes = [_elements(variable) for variable in (op.input(0), op.output(0))]
    return None if sizes[0] is None or sizes[1] is None else sizes[0] // max(sizes[1], 1)


def _elements(variable: Variable | None) -> int | None:
    shape = variable.shape if variable is not None else None
    sizes = [size for size in shape or () if isinstance(size, int)]
    return None if shape is None or len(sizes) < len(shape) else math.prod(sizes)
