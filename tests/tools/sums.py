"""The error of a sum over ranks, by the way it is added: ``python -m tests.tools.sums [--ranks 64] [--elements 100000]``.

The ways: MPI's and NCCL's ring and tree, which add 16-bit numbers in 16 bit and round at every hop; the ring with addends
that were scaled by 2^-ceil(log2 N) first, as the NCCL engine does; Horovod's and torch's division by N before the sum;
and the order of ranks in fp32, rounded once, as the engines in memory do. Errors are against float64, of the mean, in units
in the last place of an addend: root mean square, and the largest; or how many means of finite gradients came out infinite.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np

from amp_transpiler.runtime.collective.sums import Reducer
from tests.helpers.ranks import TYPES

Rows = list[np.ndarray]


def ring(rows: Rows) -> np.ndarray:
    """From rank to rank, rounded at each. (Each chunk of a real ring begins at another rank.)"""
    total = rows[0]
    for row in rows[1:]:
        total = (total + row).astype(row.dtype)
    return total


def tree(rows: Rows) -> np.ndarray:
    """In pairs, and pairs of pairs, rounded at each."""
    while len(rows) > 1:
        pairs = [(a + b).astype(a.dtype) for a, b in zip(rows[::2], rows[1::2], strict=False)]
        rows = pairs + rows[len(pairs) * 2 :]
    return rows[0]


def _mean(add: Callable[[Rows], np.ndarray]) -> Callable[[Rows], np.ndarray]:
    """The mean of a sum in 16 bit, divided in fp32, as an unscale does."""
    return lambda rows: add(rows).astype(np.float64) / len(rows)


def scaled(rows: Rows) -> np.ndarray:
    """The ring of the NCCL engine."""
    down = 2.0 ** -math.ceil(math.log2(len(rows)))
    return ring([row * row.dtype.type(down) for row in rows]).astype(np.float64) / (len(rows) * down)


def divided(rows: Rows) -> np.ndarray:
    """Each addend divided by the number of ranks in 16 bit, then the ring."""
    return ring([(row / row.dtype.type(len(rows))).astype(row.dtype) for row in rows]).astype(np.float64)


def ordered(rows: Rows) -> np.ndarray:
    """The engines in memory."""
    out = np.empty_like(rows[0])
    Reducer().reduce(rows, out, "mean")
    return out.astype(np.float64)


WAYS: dict[str, Callable[[Rows], np.ndarray]] = {
    "ring": _mean(ring),
    "tree": _mean(tree),
    "divided before, ring": divided,
    "pre-scaled, ring": scaled,
    "in order, rounded once": ordered,
}
#: Magnitudes of gradients: what a loss scale leads to, what it should keep away from, and the largest finite ones.
KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda draw, n: draw.standard_normal(n),
    "small": lambda draw, n: draw.standard_normal(n) * 2e-6,
    "large": lambda draw, n: draw.standard_normal(n) * 2e4,
    "largest": lambda draw, n: np.full(n, 65504.0),
}


def gradients(kind: str, dtype: str, ranks: int, elements: int) -> Rows:
    """What the ranks contribute; what they share is larger than what they differ in, as with gradients of batches."""
    draw = np.random.default_rng(1)
    most = float(np.finfo(np.float16).max) if dtype == "float16" else 3e38
    factor = 1.0 if dtype == "float16" or kind in ("normal", "small") else most / 65504
    shared = KINDS[kind](draw, elements)
    rows = [shared + 0.5 * KINDS[kind](draw, elements) if kind != "largest" else shared for _ in range(ranks)]
    return [np.clip(row * factor, -most, most).astype(TYPES[dtype]) for row in rows]


def errors(dtype: str, kind: str, ranks: int, elements: int) -> dict[str, tuple[float, float, float]]:
    """By way: root mean square and largest error in units in the last place of an addend, and the share that is not finite."""
    rows = gradients(kind, dtype, ranks, elements)
    exact = np.mean([row.astype(np.float64) for row in rows], axis=0)
    size = np.mean([np.abs(row.astype(np.float64)) for row in rows], axis=0)
    bits, least = (10, -24) if dtype == "float16" else (7, -133)
    unit = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(size, 1e-300))) - bits, least)
    found = {}
    for name, way in WAYS.items():
        with np.errstate(all="ignore"):
            result = way(rows)
        finite = np.isfinite(result)
        off = np.abs(result[finite] - exact[finite]) / unit[finite]
        rms = float(np.sqrt(np.mean(off**2))) if off.size else math.nan
        found[name] = (rms, float(off.max(initial=0.0)), float(1 - finite.mean()))
    return found


def table(ranks: int, elements: int) -> str:
    """The table, in Markdown."""
    lines = [f"| type | gradients | {' | '.join(WAYS)} |", f"|---|---|{'---|' * len(WAYS)}"]
    for dtype in ("float16", "bfloat16"):
        for kind in KINDS:
            cells = []
            for rms, largest, lost in errors(dtype, kind, ranks, elements).values():
                cells.append(f"{rms:.2f}, {largest:.2f}" if not lost else f"{100 * lost:.0f} % infinite")
            lines.append(f"| {dtype} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--elements", type=int, default=100_000)
    chosen = parser.parse_args()
    print(table(chosen.ranks, chosen.elements))
