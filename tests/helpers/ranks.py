"""What several ranks sum, and what the result must be to the bit: written without the package."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

TYPES: dict[str, Any] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def rounded_once(parts: list[np.ndarray], op: str) -> np.ndarray:
    """Added in fp32 (fp64 for float64) in the order of ranks, divided there, rounded to the type once."""
    wide = np.float64 if parts[0].dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        total = parts[0].astype(wide)
        for part in parts[1:]:
            total = total + part.astype(wide)
        if op == "mean":
            total = total / wide(len(parts))
        return total.astype(parts[0].dtype)


def words(array: np.ndarray) -> np.ndarray:
    """The bits of an array's elements; every NaN has the same."""
    known = array.copy()
    known[np.isnan(array)] = np.nan
    return known.view(f"u{array.dtype.itemsize}")


def drawn(rank: int, size: int, dtype: str, seed: int = 0) -> np.ndarray:
    """What a rank contributes: numbers over many orders of magnitude, subnormal ones of fp16 among them."""
    generator = np.random.default_rng([seed, rank])
    return (generator.standard_normal(size) * 10.0 ** generator.uniform(-8, 2, size)).astype(TYPES[dtype])
