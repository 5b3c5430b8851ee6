"""Statistics of tensors by plain numpy, on all values at once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from amp_transpiler.conversion.calibration.statistics import TensorStats

TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def by_numpy(values: list[np.ndarray], others: list[np.ndarray], dtype: str) -> dict[str, Any]:
    x = np.concatenate([v.ravel() for v in values]).astype(np.float64)
    y = np.concatenate([v.ravel() for v in others]).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        stored = np.concatenate([v.ravel() for v in values]).astype(TYPES[dtype]).astype(np.float64)
        lost, off = stored - x, y - x
    known = np.isfinite(x)
    kept = known & np.isfinite(stored)
    finite = bool(np.isfinite(y[known]).all())
    return {
        "largest": np.abs(x[known]).max(),
        "smallest": np.abs(x[known & (x != 0)]).min(),
        "overflow": (known & ~kept).sum() / known.sum(),
        "rounding": np.linalg.norm(lost[kept]) / np.linalg.norm(x[kept]),
        "error": np.linalg.norm(off[known]) / np.linalg.norm(x[known]) if finite else np.inf,
        "finite": finite,
    }


def check_equal(found: TensorStats, wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
