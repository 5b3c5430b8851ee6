"""The minimum cut: equal to brute force, deterministic, honest about rounding."""

from __future__ import annotations

import itertools
import random

import pytest

from amp_transpiler.passes.partition.cut import FULL, HALF, Cut, Tensor, solve, traffic

Problem = tuple[list[tuple[int, int]], list[Tensor]]


def problem(seed: int, largest: int = 12, unit: int = 1) -> Problem:
    """A random problem of up to ``largest`` free operators; zero costs, doubled readers and equal sizes included."""
    rng = random.Random(seed)
    count = rng.randint(1, largest)
    sizes = [0, 1, 1, 2, 3, 5, 8, 13, rng.randint(1, 1000)]
    costs = [(rng.choice(sizes) * unit, rng.choice(sizes) * unit) for _ in range(count)]
    tensors = []
    for _ in range(rng.randint(0, 2 * count)):
        producer: int | bool = rng.choice([HALF, FULL]) if rng.random() < 0.3 else rng.randrange(count)
        readers = tuple(rng.choices(range(count), k=rng.randint(0, 4)))
        tensors.append(Tensor(producer, readers, rng.random() < 0.2, rng.random() < 0.2, 6 * rng.choice(sizes) * unit))
    return costs, tensors


def least(costs: list[tuple[int, int]], tensors: list[Tensor]) -> int:
    """The least traffic of all assignments, counted one by one, apart from the code under test."""
    best = None
    for half in itertools.product([True, False], repeat=len(costs)):
        total = sum(c16 if h else c32 for (c16, c32), h in zip(costs, half, strict=True))
        for t in tensors:
            made = t.producer if isinstance(t.producer, bool) else half[t.producer]
            wanted = (
                {half[r] for r in t.readers} | ({True} if t.read_half else set()) | ({False} if t.read_full else set())
            )
            total += t.cast * len(wanted - {made})
        best = total if best is None else min(best, total)
    assert best is not None
    return best


@pytest.mark.parametrize("start", range(0, 1200, 100))
def test_it_is_the_least_of_all(start: int) -> None:
    for seed in range(start, start + 100):
        costs, tensors = problem(seed, 14 if seed % 100 == 0 else 8)
        cut = solve(costs, tensors)
        assert cut.exact and cut.bound == cut.value == traffic(costs, tensors, cut.half)
        assert cut.value == least(costs, tensors), seed


def test_ties_go_to_16_bit() -> None:
    assert solve([(4, 4), (0, 0)], [Tensor(0, (1,), False, False, 6)]).half == [True, True]
    assert solve([(2, 2)], [Tensor(FULL, (0,), False, False, 6)]).half == [False]


def test_one_cast_serves_many_readers() -> None:
    costs = [(2, 4)] * 3
    cut = solve(costs, [Tensor(FULL, (0, 1, 2), False, False, 5)])
    assert cut.half == [True, True, True] and cut.value == 11
    assert solve(costs, [Tensor(FULL, (0, 1, 2), False, False, 7)]).half == [False, False, False]


def test_the_cast_of_a_fixed_reader_serves_the_free_ones() -> None:
    tensor = Tensor(FULL, (0,), read_half=True, read_full=False, cast=100)
    assert solve([(1, 2)], [tensor]) == Cut([True], 101, 101)


def test_nothing_free() -> None:
    assert solve([], [Tensor(HALF, (), False, True, 6)]) == Cut([], 6, 6)
    assert solve([], []) == Cut([], 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_same_problem_gives_the_same_cut(seed: int) -> None:
    assert solve(*problem(seed, 60)) == solve(*problem(seed, 60))


@pytest.mark.parametrize("unit", [2**20, 2**40 + 1])
@pytest.mark.parametrize("seed", range(30))
def test_large_sizes_with_a_common_divisor_stay_exact(seed: int, unit: int) -> None:
    costs, tensors = problem(seed, 8, unit)
    cut = solve(costs, tensors)
    assert cut.exact and cut.value == least(costs, tensors)


def test_rounding_is_stated_and_bounded() -> None:
    rng = random.Random(0)
    for seed in range(30):
        costs, tensors = problem(seed, 8)
        costs = [(rng.randrange(2**50), rng.randrange(2**50)) for _ in costs]
        tensors = [Tensor(t.producer, t.readers, t.read_half, t.read_full, rng.randrange(2**50)) for t in tensors]
        cut, best = solve(costs, tensors), least(costs, tensors)
        assert cut.value == traffic(costs, tensors, cut.half)
        assert cut.bound <= best <= cut.value
        assert cut.exact or "rounded" in cut.rounding
        assert cut.value - cut.bound < 1e-6 * cut.value


@pytest.mark.parametrize("seed", range(30))
def test_what_is_small_beside_images_is_the_least_too(seed: int) -> None:
    costs, tensors = problem(seed, 8)
    count, sizes = len(costs), [2**40 + 1, 2**41 + 3, 2**42 + 7]
    large = [(size, 2 * size) for size in sizes]
    casts = [Tensor(count + i, (), False, True, 2 * size) for i, size in enumerate(sizes)]
    cut = solve(costs + large, tensors + casts)
    assert not cut.exact and cut.half[count:] == [False] * len(sizes)
    assert traffic(costs, tensors, cut.half[:count]) == least(costs, tensors)


def test_fifty_thousand_operators_in_a_chain() -> None:
    count = 50_000
    costs = [(400, 800)] * count
    tensors = [Tensor(i, (i + 1,), False, i % 10 == 3, 1200) for i in range(count - 1)]
    tensors += [Tensor(FULL, (i,), False, False, 1200) for i in range(0, count, 10)]
    cut = solve(costs, tensors)
    assert cut.exact and cut.value == traffic(costs, tensors, cut.half)
    assert cut.value <= min(traffic(costs, tensors, [side] * count) for side in (True, False))
