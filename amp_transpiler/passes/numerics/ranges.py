"""Static range analysis: a sound interval for every tensor of which the graph alone says one.

Interval arithmetic in exact numbers, from constants, declared inputs and operators with a bounded result. What
a 16-bit rounding adds to a bound is left to those who use it. Weights are read where the data that meets them
is bounded, once, in chunks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import inserted
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.tensors import CHUNK, as_array, release
from amp_transpiler.ir.types import FLOATS, LIMITS
from amp_transpiler.passes.numerics.bounds import RULES, Interval
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import operator_name

_INF = math.inf


class Ranges:
    """Intervals of the floating-point tensors of a program, nested graphs included.

    Args:
        program: as it was written, or converted: inserted casts are looked through.
        input_ranges: the least and the largest value of inputs, by name.
        trained: the program will be trained, so that what it stores now (parameters, statistics) bounds nothing.

    Raises:
        ArgumentError: a name that is no floating-point input.
    """

    def __init__(
        self, program: Graph, input_ranges: Mapping[str, Interval] | None = None, *, trained: bool = False
    ) -> None:
        self.program, self.trained = program, trained
        self._bounds: dict[Variable, Interval | None] = {}
        self._weights: dict[tuple[Variable, str], tuple[np.ndarray, np.ndarray] | None] = {}
        for name, (low, high) in (input_ranges or {}).items():
            self._bounds[_input(program, name)] = float(low), float(high)
        for op in program.walk():
            if inserted(op):
                continue
            rule = RULES.get(operator_name(op))
            for variable in op.outputs if operator_name(op) == "Split" else op.outputs[:1]:
                if rule is not None and variable is not None and variable.dtype in FLOATS:
                    found = rule(op, self)
                    self._bounds[variable] = found if found is not None and _says_something(found) else None

    def bound(self, variable: Variable | None) -> Interval | None:
        """The interval in which every finite element lies; None where nothing is known."""
        if variable is None:
            return None
        variable = source(variable)
        if variable not in self._bounds:
            self._bounds[variable] = _bounds(self.content(variable), variable)
        return self._bounds[variable]

    def content(self, variable: Variable | None) -> Any:
        """What a constant holds, for good; None for any other variable."""
        variable = source(variable) if variable is not None else None
        if variable is None or (self.trained and variable.persistable):
            return None
        return constants.content(variable)

    def within(self, variable: Variable, limit: float) -> bool:
        """Whether every element is proved to lie in ``[-limit, limit]``."""
        found = self.bound(variable)
        return found is not None and -limit <= found[0] and found[1] <= limit

    def proved(self, dtype: str) -> tuple[int, int]:
        """How many of the tensors that operators make are proved to fit the format, and how many there are."""
        made = [
            v
            for op in self.program.walk()
            if not inserted(op)
            for v in op.outputs
            if v is not None and v.dtype in FLOATS and not constants.is_constant(v)
        ]
        return sum(self.within(v, LIMITS[dtype].largest) for v in made), len(made)

    def row_sums(self, weight: Variable | None, axis: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Sums of the positive and of the negative parts of a constant, over all that one output adds up.

        ``axis``: "last" or "second last" of a matrix is summed, or all but the "first" (a convolution's filters), or
        all but the "second" (a transposed one's). None where the content is not known.
        """
        if weight is None:
            return None
        key = (source(weight), axis)
        if key not in self._weights:
            self._weights[key] = _row_sums(self.content(weight), axis)
        return self._weights[key]


def _input(program: Graph, name: str) -> Variable:
    known = {v.name: v for v in program.inputs if v.dtype in FLOATS}
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else f"; they are {', '.join(map(repr, known))}"
        raise ArgumentError(f"a range is given for '{name}', which is no floating-point input of the model{hint}")
    return known[name]


def _says_something(interval: Interval) -> bool:
    return not (math.isnan(interval[0]) or math.isnan(interval[1])) and interval != (-_INF, _INF)


def _bounds(data: Any, variable: Variable) -> Interval | None:
    """The least and the largest number of a constant with this content."""
    if data is None or variable.dtype not in FLOATS:
        return None
    array = as_array(data)
    if array.size == 0:
        return 0.0, 0.0
    low, high = float(array.min()), float(array.max())
    release(data)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _row_sums(data: Any, axis: str) -> tuple[np.ndarray, np.ndarray] | None:
    if data is None:
        return None
    array = as_array(data)
    if array.ndim < 2:
        return None
    if axis in ("last", "second last"):
        axes: tuple[int, ...] = (-1,) if axis == "last" else (-2,)
    else:
        kept = 0 if axis == "first" else 1
        axes = tuple(i for i in range(array.ndim) if i != kept)
    totals, sizes = [], []
    rows = max(CHUNK * array.shape[0] // max(array.size, 1), 1)
    for start in range(0, array.shape[0], rows):
        block = array[start : start + rows]
        totals.append(block.sum(axes, dtype=np.float64))
        sizes.append(np.abs(block).sum(axes, dtype=np.float64))
    release(data)
    join = sum if any(axis % array.ndim == 0 for axis in axes) else np.concatenate
    total, size = (np.asarray(join(parts)).reshape(-1) for parts in (totals, sizes))
    return ((size + total) / 2, (size - total) / 2) if np.isfinite(size).all() else None
