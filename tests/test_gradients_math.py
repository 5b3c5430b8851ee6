"""Gradient rules of arithmetic, activations, matrix products, data movement, reductions and losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gradcheck import check_gradient, few

seeds = st.integers(0, 2**32 - 1)


@st.composite
def broadcastable(draw: st.DrawFn, count: int = 2, max_rank: int = 3) -> list[tuple[int, ...]]:
    """Shapes that broadcast against each other: leading dimensions missing, some sizes 1."""
    full = draw(st.lists(st.integers(1, 4), min_size=0, max_size=max_rank))
    shapes = []
    for _ in range(count):
        skip = draw(st.integers(0, len(full)))
        shapes.append(tuple(draw(st.sampled_from([d, 1])) for d in full[skip:]))
    return shapes


def smooth(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape)


def positive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.3, 3, size=shape)


def away(rng: np.random.Generator, shape: tuple[int, ...], *kinks: float) -> np.ndarray:
    """Values at least 0.05 from every kink, in 16 bit too."""
    x = rng.uniform(-3.5, 3.5, size=shape)
    for kink in kinks or (0.0,):
        x = np.where(np.abs(x - kink) < 0.05, kink + 0.15, x)
    return x


def distinct(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Values that differ from each other by at least 1/8, all of which 16 bit holds."""
    size = int(np.prod(shape))
    return (rng.permutation(size) - size // 2).reshape(shape) / 8 + 1 / 16


@pytest.mark.parametrize("type_", ["Add", "Sub", "Mul", "Div"])
@few
@given(shapes=broadcastable(), seed=seeds)
def test_binary(type_: str, shapes: list[tuple[int, ...]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_gradient(type_, [smooth(rng, shapes[0]), positive(rng, shapes[1])])


#: Operators that the reference evaluator computes in fp32 only.
FLOAT64: dict[str, Any] = {"Erf": lambda x: [np.vectorize(math.erf, otypes=[np.float64])(x)]}

UNARY: dict[str, Any] = {
    "Neg": smooth, "Abs": away, "Sqrt": positive, "Exp": smooth, "Log": positive, "Reciprocal": positive, "Sin": smooth,
    "Cos": smooth, "Erf": smooth, "Identity": smooth,
}  # fmt: skip


@pytest.mark.parametrize("type_", UNARY)
@few
@given(shape=broadcastable(1), seed=seeds)
def test_unary(type_: str, shape: list[tuple[int, ...]], seed: int) -> None:
    check_gradient(type_, [UNARY[type_](np.random.default_rng(seed), shape[0])], forward=FLOAT64.get(type_))
