"""Static range analysis: a sound interval for every tensor of which the graph alone says one.

Interval arithmetic in exact numbers, from constants, declared inputs and operators with a bounded result. What
a 16-bit rounding adds to a bound is left to those who use it. Weights are read where the data that meets them
is bounded, once, in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.intervals import Axes, Interval, RangeRule
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import lookup, moves, traits_of
from amp_transpiler.ir.tensors import CHUNK, as_array, release, tensor_type
from amp_transpiler.ir.types import FLOATS, LIMITS
from amp_transpiler.passes.numerics.extremes import extremes, small_row_sums
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.names import source
from amp_transpiler.spelling import near_names

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
        #: Of the small constants of the program, whoever trains them.
        self.extremes = extremes(program)
        held = {v: e for v, e in self.extremes.items() if not (trained and v.persistable)}
        self._bounds: dict[Variable, Interval | None] = {v: _between(e.low, e.high) for v, e in held.items()}
        operators = [op for op in program.walk() if not op.inserted]
        self._weights = small_row_sums(operators, held, source)
        rules: dict[tuple[str, str], RangeRule | None] = {}
        for name, (low, high) in (input_ranges or {}).items():
            self._bounds[_input(program, name)] = float(low), float(high)
        for op in operators:
            kind = (op.type, op.domain)
            if kind not in rules:
                rules[kind] = _rule(op)
            rule = rules[kind]
            if rule is None:
                continue
            several = len(op.outputs) > 1 and moves(op)
            for variable in op.outputs if several else op.outputs[:1]:
                if variable is not None and variable.dtype in FLOATS:
                    found = rule(op, self)
                    self._bounds[variable] = found if found is not None and _says_something(found) else None

    def bound(self, variable: Variable | None) -> Interval | None:
        """The interval in which every finite element lies; None where nothing is known."""
        if variable is None:
            return None
        if variable not in self._bounds:
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

    def source(self, variable: Variable | None) -> Variable | None:
        """The variable of the program as it was written."""
        return None if variable is None else source(variable)

    def within(self, variable: Variable, limit: float) -> bool:
        """Whether every element is proved to lie in ``[-limit, limit]``."""
        found = self.bound(variable)
        return found is not None and -limit <= found[0] and found[1] <= limit

    def proved(self, dtype: str) -> tuple[int, int]:
        """How many of the tensors that operators make are proved to fit the format, and how many there are."""
        made = [
            v
            for op in self.program.walk()
            if not op.inserted
            for v in op.outputs
            if v is not None and v.dtype in FLOATS and not constants.is_constant(v)
        ]
        return sum(self.within(v, LIMITS[dtype].largest) for v in made), len(made)

    def row_sums(self, weight: Variable | None, axes: Axes) -> tuple[np.ndarray, np.ndarray] | None:
        """Sums of the positive and of the negative parts of a constant, over all that one output adds up.

        ``axes``: those that are summed, of a tensor of this rank. None where the content is not known, or no matrix.
        """
        if weight is None:
            return None
        weight = source(weight)
        rank = len(weight.shape or ())
        if rank >= 2 and (weight, summed := axes(rank)) in self._weights:  # as for most: small ones, looked at together
            return self._weights[weight, summed]
        data = self.content(weight)
        rank = 0 if data is None else len(tensor_type(data)[1])
        if rank < 2:
            return None
        key = weight, axes(rank)
        if key not in self._weights:
            self._weights[key] = _row_sums(data, key[1])
        return self._weights[key]


def _rule(op: Operator) -> RangeRule | None:
    """What the definition of an operator says of the interval of its results."""
    known, bounded = lookup(op), traits_of(op).bounded
    if known is not None and known.range_rule is not None:
        return known.range_rule
    return None if bounded is None else lambda op, ranges: bounded


def _input(program: Graph, name: str) -> Variable:
    known = {v.name: v for v in program.inputs if v.dtype in FLOATS}
    if name not in known:
        hint = near_names(name, known, "; ") or f"; they are {', '.join(map(repr, known))}" * bool(known)
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
    return _between(low, high)


def _between(low: float, high: float) -> Interval | None:
    """The interval of a constant's finite elements and of those of one sign that are infinite, as masks hold them."""
    found = (min(low, 0.0) if high == _INF else low, max(high, 0.0) if low == -_INF else high)
    return found if _says_something(found) else None


def _row_sums(data: Any, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    array = as_array(data)
    totals, sizes = [], []
    rows = max(CHUNK * array.shape[0] // max(array.size, 1), 1)
    for start in range(0, max(array.shape[0], 1), rows):  # one, empty, of a constant without rows
        block = array[start : start + rows]
        totals.append(block.sum(axes, dtype=np.float64))
        sizes.append(np.abs(block).sum(axes, dtype=np.float64))
    release(data)
    join = sum if 0 in axes else np.concatenate
    total, size = (np.asarray(join(parts)).reshape(-1) for parts in (totals, sizes))
    return ((size + total) / 2, (size - total) / 2) if np.isfinite(size).all() else None
