"""Sums of 16-bit numbers of which every partial result is rounded, in numpy, in the orders of ``lists/roundings.toml``."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def in_turn(summands: Array) -> Array:
    """The sum along the last axis, one summand after the other."""
    total = summands[..., 0].copy()
    for k in range(1, summands.shape[-1]):
        total = total + summands[..., k]
    assert total.dtype == summands.dtype
    return total


def fours(summands: Array) -> Array:
    """Sums of four along the last axis, added in turn."""
    return in_turn(in_turn(summands.reshape(*summands.shape[:-1], -1, 4)))


def lanes(summands: Array, width: int = 64) -> Array:
    """64 sums of every 64th summand, added by halves; or so many."""
    count = summands.shape[-1]
    width = min(count, width)
    rounds = -(-count // width)
    filled = np.zeros((*summands.shape[:-1], rounds * width), summands.dtype)
    filled[..., :count] = summands
    total = in_turn(np.moveaxis(filled.reshape(*summands.shape[:-1], rounds, width), -2, -1))
    while total.shape[-1] > 1:
        kept = (total.shape[-1] + 1) // 2
        upper = total[..., kept:]
        total = total[..., :kept].copy()
        total[..., : upper.shape[-1]] += upper
    return total[..., 0]


ORDERS = {
    "in turn": in_turn,
    "fours": fours,
    "lanes": lanes,
    "128 lanes": partial(lanes, width=128),
    "256 lanes": partial(lanes, width=256),
}


def products(a: Array, b: Array) -> Array:
    """The rounded products that a matrix product adds up: [.., m, n, k]."""
    return a[..., :, None, :] * np.swapaxes(b, -1, -2)[..., None, :, :]
