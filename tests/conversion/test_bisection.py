"""The search for the operators that return to fp32, on errors whose best answer is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from amp_transpiler.conversion.bisection import BUDGET, Bisection, Found


class Errors:
    """Independent roundings: squares add up. Counts the runs."""

    def __init__(self, each: Sequence[float]) -> None:
        self.squares, self.runs = np.square(np.asarray(each, np.float64)), 0

    def __call__(self, kept: frozenset[int]) -> float:
        self.runs += 1
        rest = np.ones(len(self.squares), bool)
        rest[list(kept)] = False
        return math.sqrt(self.squares[rest].sum())


def best(each: Sequence[float], tolerance: float) -> int:
    """The fewest units without which the others keep to the tolerance."""
    rest = sum(e * e for e in each)
    for count, e in enumerate(sorted(each, reverse=True)):
        if rest <= tolerance * tolerance:
            return count
        rest -= e * e
    return len(each)


def found(each: Sequence[float], tolerance: float) -> tuple[Found, Errors]:
    errors = Errors(each)
    result = Bisection(range(len(each)), errors).find(tolerance)
    assert Errors(each)(result.kept) == pytest.approx(result.error) and result.error <= tolerance
    assert errors.runs <= BUDGET + 1
    return result, errors


@pytest.mark.parametrize("count", [1, 7, 40, 41, 400, 5000])
def test_one_culprit_is_found_alone(count: int) -> None:
    each = [1e-5] * count
    each[count * 2 // 3] = 1.0
    result, _ = found(each, 0.01)
    assert result.kept == {count * 2 // 3}


def test_a_few_culprits_far_apart_are_found() -> None:
    each = [1e-5] * 900
    for at in (17, 411, 412, 880):
        each[at] = 0.3
    result, _ = found(each, 0.01)
    assert {17, 411, 412, 880} <= result.kept and len(result.kept) <= 8


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [60, 700])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_uneven_errors_give_up_little_more_than_they_must(share: float, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    along = np.repeat(rng.lognormal(0, 1.5, 1 + count // 20), 20)[:count]  # neighbours are alike
    each = along * rng.lognormal(0, 0.5, count)
    whole = Errors(each)(frozenset())
    result, _ = found(each, share * whole)
    # some 34 groups tell operators apart no finer than a 34th of all, here and there
    assert len(result.kept) <= 1.35 * best(each, share * whole) + 0.1 * count


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_even_errors_keep_what_the_tolerance_allows(share: float) -> None:
    each = [1.0] * 600
    whole = math.sqrt(600)
    result, _ = found(each, share * whole)
    assert len(result.kept) <= best(each, share * whole) + 60


def test_runs_do_not_grow_with_the_model() -> None:
    runs = []
    for count in (100, 1000, 20000):
        each = np.random.default_rng(count).lognormal(0, 2, count)
        runs.append(found(each, 0.3 * Errors(each)(frozenset()))[1].runs)
    assert max(runs) <= BUDGET + 1


def test_what_is_not_finite_returns_first() -> None:
    each = [1.0] * 300
    each[123] = math.inf
    assert found(each, 17.0)[0].kept >= {123}

    def nan(kept: frozenset[int]) -> float:
        return 0.001 if 5 in kept else math.nan

    assert Bisection(range(50), nan).find(0.01).kept == {5}


def test_a_tighter_tolerance_asks_no_group_again() -> None:
    errors = Errors(np.random.default_rng(1).lognormal(0, 2, 500))
    search = Bisection(range(500), errors)
    whole = errors(frozenset())
    loose = search.find(0.5 * whole)
    before = errors.runs
    tight = search.find(0.3 * whole)
    assert tight.error <= 0.3 * whole and len(tight.kept) > len(loose.kept)
    assert errors.runs - before <= 8 + 16 + 1


def test_units_may_be_any_numbers_and_none() -> None:
    units = [3, 10, 11, 40]
    result = Bisection(units, lambda kept: 0.0 if 11 in kept else 1.0).find(0.5)
    assert result.kept == {11}
