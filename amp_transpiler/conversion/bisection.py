"""Which operators have to return to fp32 for the outputs to keep to a tolerance: a search on a budget of runs.

A run gives the error of the outputs with any choice of operators in fp32. First each of a few groups of neighbours
runs in 16 bit alone: the error that it adds by itself. Groups whose operators would have to return are split and
measured again, so that the runs go where the error is. Errors of different operators are independent roundings,
whose squares add up; the groups that add most for each operator return, as many as a few more runs show to be
needed. Then parts of them go back to 16 bit wherever a run shows that the tolerance still holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Groups at the start.
FIRST = 12
#: Runs that measure groups, that look for how many return, that give operators back.
MEASURING, CHOOSING, RETURNING = 56, 8, 16
#: Runs of a search, at most.
BUDGET = MEASURING + CHOOSING + RETURNING
#: Parts that go back one after the other, at first.
_PARTS = 8
#: A group is left as it is where no more than this share of all operators could be gained.
_FINE = 1 / 256


@dataclass(frozen=True)
class Group:
    """Neighbouring operators, and the error that they add by themselves."""

    members: tuple[int, ...]
    error: float

    @property
    def weight(self) -> float:
        """The square of the error for each operator."""
        return self.error * self.error / len(self.members)


@dataclass(frozen=True)
class Found:
    """The groups that return to fp32, the operators of them that do, and the error that is left."""

    groups: tuple[Group, ...]
    kept: frozenset[int]
    error: float


class Bisection:
    """One search among ``units``, in program order. ``error``: with these in fp32, and all others in 16 bit.

    Groups are measured once; :meth:`find` may be asked for several tolerances.
    """

    def __init__(self, units: Sequence[int], error: Callable[[frozenset[int]], float]) -> None:
        self.units, self._measured = tuple(units), error
        self.groups: list[Group] = []
        self.whole = math.inf
        self._known: dict[frozenset[int], float] = {}

    def find(self, tolerance: float) -> Found:
        """What has to return for an error of at most ``tolerance``, which all units in fp32 keep to."""
        if not self.groups:
            self._measure(tolerance)
        ranked = sorted(self.groups, key=lambda group: -group.weight)
        low, high = -1, len(ranked)  # none is too few, all are enough
        step = self._estimate(ranked, tolerance)
        for _ in range(CHOOSING):
            if high - low <= 1:
                break
            middle = min(max(step, low + 1), high - 1)
            if self._error(_members(ranked[:middle])) <= tolerance:
                high = middle
            else:
                low = middle
            step = (low + high) // 2
        return self._returned(ranked[:high], tolerance)

    # -- groups ----------------------------------------------------------------------------------------
    def _measure(self, tolerance: float) -> None:
        """Split the units into groups and measure them."""
        self.whole = self._error(frozenset())
        size = math.ceil(len(self.units) / (MEASURING if len(self.units) <= MEASURING else FIRST))
        self.groups = [self._alone(self.units[i : i + size]) for i in range(0, len(self.units), size)]
        for _ in range((MEASURING - len(self.groups)) // 2):
            group = self._coarse(tolerance)
            if group is None:
                return
            at, half = self.groups.index(group), len(group.members) // 2
            self.groups[at : at + 1] = [self._alone(group.members[:half]), self._alone(group.members[half:])]

    def _alone(self, members: Sequence[int]) -> Group:
        return Group(tuple(members), self._error(frozenset(self.units) - set(members)))

    def _coarse(self, tolerance: float) -> Group | None:
        """The group of which the parts may differ most: by so many operators fewer might return."""
        ranked = sorted(self.groups, key=lambda group: -group.weight)
        count = max(1, self._estimate(ranked, tolerance))
        margin = ranked[count - 1].weight

        def gain(group: Group) -> float:
            """A group that returns may do so for one operator's sake. One that does not may hold one that adds all
            of its error, for which others need not return."""
            size = len(group.members)
            return size if group in ranked[:count] or not margin else size * group.weight / margin

        found = max((group for group in ranked if len(group.members) > 1), key=gain, default=None)
        return found if found is not None and gain(found) > len(self.units) * _FINE else None

    def _estimate(self, ranked: Sequence[Group], tolerance: float) -> int:
        """How many of the groups return, by the sum of squares."""
        squares = [group.error * group.error for group in ranked]
        total = sum(squares)
        if not math.isfinite(total):
            return sum(not math.isfinite(square) for square in squares)
        # a tensor between two groups counts in both, and errors may be at odds
        scale = min(1.0, self.whole * self.whole / total) if total and math.isfinite(self.whole) else 1.0
        rest = total
        for count, square in enumerate(squares):
            if rest * scale <= tolerance * tolerance:
                return count
            rest -= square
        return len(ranked)

    # -- going back ------------------------------------------------------------------------------------
    def _returned(self, groups: Sequence[Group], tolerance: float) -> Found:
        """The groups without the parts that can stay in 16 bit after all, the larger ones first."""
        kept = _members(groups)
        error = self._error(kept)
        parts = _bundles(groups, math.ceil(len(kept) / _PARTS))
        for _ in range(RETURNING):
            if not parts:
                break
            slack = math.sqrt(max(tolerance * tolerance - error * error, 0.0))
            # what adds much more than there is room for is not tried whole
            part = max(parts, key=lambda part: (part[1] <= 2 * slack, len(part[0]), -part[1]))
            parts.remove(part)
            members, added = part
            rest = kept - set(members)
            found = self._error(rest)
            if found <= tolerance:
                kept, error = rest, found
            elif len(members) > 1:
                half = len(members) // 2
                parts += [(members[:half], added / math.sqrt(2)), (members[half:], added / math.sqrt(2))]
        return Found(tuple(groups), kept, error)

    def _error(self, kept: frozenset[int]) -> float:
        if kept not in self._known:
            found = self._measured(kept)
            self._known[kept] = math.inf if math.isnan(found) else found
        return self._known[kept]


def _bundles(groups: Sequence[Group], size: int) -> list[tuple[tuple[int, ...], float]]:
    """The operators of groups, those that add least together, by ``size`` at least; and what they add."""
    bundles: list[tuple[tuple[int, ...], float]] = []
    members: tuple[int, ...] = ()
    square = 0.0
    for group in reversed(groups):
        members, square = members + group.members, square + group.error * group.error
        if len(members) >= size:
            bundles.append((members, math.sqrt(square)))
            members, square = (), 0.0
    return [*bundles, (members, math.sqrt(square))] if members else bundles


def _members(groups: Sequence[Group]) -> frozenset[int]:
    return frozenset(unit for group in groups for unit in group.members)
