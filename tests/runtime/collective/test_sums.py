"""Sums over ranks: rounded once in the order of ranks, without overflow of partial sums, NaN and infinity kept."""

from __future__ import annotations

import numpy as np
import pytest

from amp_transpiler.runtime.collective import sums
from amp_transpiler.runtime.collective.sums import Reducer
from tests.helpers.ranks import TYPES, drawn, rounded_once, words
from tests.tools.sums import KINDS, errors

SIZES = [1, 2, 3, 4, 8, 9, 17, 64]


def reduced(parts: list[np.ndarray], op: str) -> np.ndarray:
    out = np.empty_like(parts[0])
    Reducer().reduce(parts, out, op)
    return out


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ranks", SIZES)
def test_rounded_once_in_the_order_of_ranks(ranks: int, dtype: str, op: str) -> None:
    parts = [drawn(rank, 1000, dtype) for rank in range(ranks)]
    np.testing.assert_array_equal(words(reduced(parts, op)), words(rounded_once(parts, op)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_number(dtype: str) -> None:
    """Each finite word, added to each of a few others: subnormal numbers, ties, both zeros."""
    every = np.arange(1 << 16, dtype=np.uint16).view(TYPES[dtype])
    with np.errstate(invalid="ignore"):
        every = every[np.isfinite(every)]
    for other in (0.0, -0.0, 1.0, -1.0, 6e-8, 1.0009765625, 1.0078125, 2048.0):
        parts = [every, np.full_like(every, other)]
        for op in ("sum", "mean"):
            np.testing.assert_array_equal(words(reduced(parts, op)), words(rounded_once(parts, op)))


@pytest.mark.parametrize("dtype", TYPES)
def test_pieces_and_results_in_place_change_nothing(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [drawn(rank, 1000, dtype) for rank in range(11)]
    whole = reduced(parts, "sum")
    monkeypatch.setattr(sums, "PIECE", 7)
    np.testing.assert_array_equal(words(reduced(parts, "sum")), words(whole))
    Reducer().reduce(parts, parts[3], "sum")
    np.testing.assert_array_equal(words(parts[3]), words(whole))


def largest(dtype: str) -> float:
    return float(np.finfo(dtype).max) if dtype != "bfloat16" else float.fromhex("0x1.fep127")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ranks", SIZES)
def test_no_partial_sum_overflows(dtype: str, ranks: int) -> None:
    most = largest(dtype)
    same = [np.full(5, most, TYPES[dtype]) for _ in range(ranks)]
    epsilon = np.finfo(np.float64).eps if dtype == "float64" else 0.0  # the others are computed in a wider type
    np.testing.assert_allclose(reduced(same, "mean").astype(np.float64), most, rtol=epsilon)
    # Two large ones and their opposites: the sum is what remains, though the first partial sum is out of range.
    signs = [1.0, 1.0, -1.0, -1.0, 1.0]
    parts = [np.full(5, most * signs[rank], TYPES[dtype]) for rank in range(min(ranks, 5))]
    if len(parts) in (4, 5, 3, 1):
        np.testing.assert_array_equal(reduced(parts, "sum").astype(np.float64), {4: 0.0}.get(len(parts), most))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_a_sum_beyond_the_type_is_infinite_and_nan_of_any_rank_survives(dtype: str, op: str) -> None:
    with np.errstate(all="ignore"):
        most = largest(dtype)
        rows = np.array([[most, np.inf, -np.inf, np.inf, np.nan, 1.0], [most, 1.0, 1.0, -np.inf, 1.0, np.nan]])
        expected = {
            "sum": [np.inf, np.inf, -np.inf, np.nan, np.nan, np.nan],
            "mean": [most, np.inf, -np.inf, np.nan, np.nan, np.nan],
            "max": [most, np.inf, 1.0, np.inf, np.nan, np.nan],
        }[op]
        for turned in (rows, rows[::-1]):
            parts = [row.astype(TYPES[dtype]) for row in turned]
            np.testing.assert_array_equal(reduced(parts, op).astype(np.float64), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_order_of_ranks_loses_least_and_overflows_never(dtype: str) -> None:
    """What the table of docs/distributed.md says."""
    for kind in KINDS:
        found = errors(dtype, kind, 64, 500)
        rms, largest, infinite = found.pop("in order, rounded once")
        assert largest <= 0.501 and infinite == found["pre-scaled, ring"][2] == 0
        for way in ("ring", "tree"):
            assert (found[way][2] > 0.9) == (kind in ("large", "largest"))
        if kind == "normal":
            assert all(rms < other for other, _, _ in found.values())
    assert errors("float16", "small", 64, 500)["pre-scaled, ring"][0] > 3


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint64"])
def test_integers(dtype: str) -> None:
    parts = [np.array([1, 100, 3], dtype) * dtype_factor for dtype_factor in np.array([1, 2, 1], dtype)]
    np.testing.assert_array_equal(reduced(parts, "sum"), parts[0] + parts[1] + parts[2])
    np.testing.assert_array_equal(reduced(parts, "max"), np.maximum(parts[0], parts[1]))


def test_max_of_bool_says_whether_any_is_true() -> None:
    parts = [np.array([False, False, True]), np.array([False, True, True])]
    assert reduced(parts, "max").tolist() == [False, True, True]
