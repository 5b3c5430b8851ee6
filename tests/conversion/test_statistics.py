"""Statistics over batches: against plain numpy, on numbers of every kind, and of outputs of every kind."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from amp_transpiler.conversion.calibration import statistics
from amp_transpiler.conversion.calibration.statistics import Difference, TensorStats
from tests.helpers.statistics_of import TYPES, by_numpy, check_equal


# -- tensors -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("chunk", [7, 1 << 16])
def test_numbers_of_every_kind(dtype: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_CHUNK", chunk)
    rng = np.random.default_rng(2)
    found, values, others = TensorStats(), [], []
    for scale in (1e-9, 1.0, 1e6):
        x = (rng.standard_normal((5, 9)) * scale).astype(np.float32)
        x[0, :4] = 0, -np.inf, np.nan, 3.4e38 if scale > 1 else 0
        y = x * np.float32(0.999)
        found.add(x, y, dtype)
        values, others = [*values, x], [*others, y]
    check_equal(found, by_numpy(values, others, dtype))
    assert found.finite and found.overflow > 0 and found.largest < math.inf


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_that_of_the_type(dtype: str) -> None:
    """Every number of the type, the ties between them, and the neighbours of the ties."""
    every = np.arange(1 << 16, dtype=np.uint16).view(TYPES[dtype]).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    ties = ((every[:-1].astype(np.float64) + every[1:]) / 2).astype(np.float32)
    ties = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    for numbers in (every, ties, np.geomspace(1e-45, 3.4e38, 100000).astype(np.float32)):
        with np.errstate(over="ignore"):
            wanted = numbers.astype(TYPES[dtype]).astype(np.float64)
        found = statistics.rounded(numbers.astype(np.float64), dtype)
        fits = np.isfinite(wanted)
        assert np.array_equal(found[fits], wanted[fits])
        assert (np.abs(found[~fits]) > float(ml_dtypes.finfo(TYPES[dtype]).max)).all()


def test_nothing_and_zeros() -> None:
    found = TensorStats()
    found.add(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float16), "float16")
    assert (found.largest, found.smallest, found.overflow, found.rounding, found.error) == (0, math.inf, 0, 0, 0)
    found.add(np.zeros(4, np.float32), np.zeros(4, np.float16), "float16")
    assert (found.rounding, found.error) == (0, 0)
    found.add(np.zeros(4, np.float32), np.full(4, 0.5, np.float16), "float16")
    assert found.error == 1


def test_a_number_that_is_lost_is_lost_for_good() -> None:
    """Not a number in one batch, and right ones in the next."""
    found, one = TensorStats(), np.ones(4, np.float32)
    found.add(one, np.array([1, np.nan, 1, 1], np.float16), "float16")
    found.add(one, one.astype(np.float16), "float16")
    assert not found.finite and found.error == math.inf


def test_tensors_of_other_shapes_have_nothing_in_common() -> None:
    found = TensorStats()
    found.add(np.ones(4, np.float32), np.ones(3, np.float16), "float16")
    assert found.error == 1 and found.finite
    found = TensorStats()
    found.add(np.zeros((0, 3), np.float32), np.ones((2, 3), np.float16), "float16")
    assert found.error == 1


# -- outputs -------------------------------------------------------------------------------------------------
DIFFERENCES: dict[str, tuple[Any, Any, float]] = {
    "the same": (np.ones(4, np.float32), np.ones(4, np.float16), 0),
    "not a number in both": (np.array([1, np.nan]), np.array([1, np.nan]), 0),
    "infinite in both": (np.array([1, np.inf]), np.array([1, np.inf]), 0),
    "a tenth": (np.full(4, 10.0), np.full(4, 11.0), 0.1),
    "infinite in one": (np.zeros(2), np.array([0, np.inf]), math.inf),
    "other infinity": (np.array([1, np.inf]), np.array([1, -np.inf]), math.inf),
    "other shape": (np.ones(4), np.ones(3), 1),
    "another shape of nothing": (np.ones((0, 3)), np.ones(2), 1),
    "a quarter of integers": (np.arange(4), np.array([0, 1, 2, 4]), 0.25),
    "strings": (np.array(["a", "b"], object), np.array(["a", "c"], object), 0.5),
    "maps": ([{"cat": 0.5, "dog": 0.5}], [{"cat": 0.5, "dog": 0.5}], 0),
    "maps of other values": ([{1: 3.0, 2: 4.0}], [{1: 3.0, 2: 9.0}], 1),
    "maps of other keys": ([{1: 3.0}], [{2: 3.0}], 1),
    "shorter sequence": ([np.ones(2), np.ones(2)], [np.ones(2)], 1),
    "a sequence": ([np.ones(2), np.arange(4)], [np.ones(2), np.array([0, 1, 0, 0])], 0.5),
    "absent in both": (None, None, 0),
    "absent in one": (None, np.ones(2), 1),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_differences(case: str) -> None:
    wanted, got, error = DIFFERENCES[case]
    found = Difference()
    found.add(wanted, got)
    assert found.error == pytest.approx(error)


def test_what_becomes_not_a_number_is_neither_small_nor_large() -> None:
    found = Difference()
    found.add(np.ones(2), np.array([1, np.nan]))
    found.add(np.ones(2), np.ones(2))
    assert math.isnan(found.error)
