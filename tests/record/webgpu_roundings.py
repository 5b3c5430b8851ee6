"""Records how kernels of onnxruntime's WebGPU provider round 16 bit: ``python -m tests.record.webgpu_roundings``.

It runs where the provider and a device are (see ``docs/places.md``), and writes ``lists/roundings.toml``.

In which order a kernel adds up is read off sums of known rounding. All summands are tiny but two, a large number and its
negative: what was added to one of them before they meet is lost. So the result counts the summands outside of the
smallest partial sum that holds both, and these counts tell the tree of additions. Where nothing is lost, the kernel adds
up in fp32. Other kernels are compared with float64.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tests.helpers.rounded_sums import ORDERS as ROUNDED
from tests.helpers.rounding_kernels import AXIS, KERNELS, ONE, PRODUCTS, SUMS, SUMS_OF_FUNCTIONS, Sum, run, worth

FILE = Path(__file__).parents[2] / "lists" / "roundings.toml"
#: The large number, and what it swallows: of 2,048 tiny ones no sum is half a step of it.
_LARGE, _TINY = 2.0**15, 2.0**-8
#: Errors of fewer roundings than this are those of storing the result, and of the arithmetic of the comparison.
_ONE = 1.5

_HEAD = """\
# How kernels of a place round 16-bit values, as `python -m tests.record.webgpu_roundings` measures it on a device.
#
# `sums`: every partial result of these sums is rounded to 16 bit, and so is each product. By the order of additions:
#   "in turn"  each summand is added to the sum of those before it; of a convolution the channels of a kernel position
#              come before its next position; of a scatter threads may pass each other
#   "fours"    sums of four, in turn, are added in turn
#   "lanes"    64 sums of every 64th summand, in turn, are added by halves; "128 lanes", "256 lanes": as many
# `where` names what else must hold of the operands; the first entry that holds counts.
# `inside`: kernels that compute in 16 bit: their error is worth so many roundings of the result (mean squares; normal
# operands). What is neither here nor there adds up and computes in fp32, or rounds once.
"""


@dataclass(frozen=True)
class Order:
    """An order of additions: how many of ``count`` summands the smallest partial sum of summands i < j holds."""

    name: str
    together: Callable[[int, int, int], int]


def _in_turn(i: int, j: int, count: int) -> int:
    return j + 1


def _fours(i: int, j: int, count: int) -> int:
    return j % 4 + 1 if i // 4 == j // 4 else min(4 * (j // 4 + 1), count)


def _lanes(i: int, j: int, count: int, lanes: int = 64) -> int:
    lanes = min(count, lanes)
    if i % lanes == j % lanes:
        return j // lanes + 1
    sets = [{lane} for lane in range(lanes)]
    while True:
        kept = (len(sets) + 1) // 2
        sets = [sets[n] | (sets[n + kept] if n + kept < len(sets) else set()) for n in range(kept)]
        found = next((each for each in sets if {i % lanes, j % lanes} <= each), None)
        if found is not None:
            return sum(len(range(lane, count, lanes)) for lane in found)


ORDERS = (
    Order("in turn", _in_turn),
    Order("fours", _fours),
    Order("lanes", _lanes),
    Order("128 lanes", partial(_lanes, lanes=128)),
    Order("256 lanes", partial(_lanes, lanes=256)),
)


def order_of(case: Sum) -> str | None:
    """The order in which a kernel adds up what it rounds to 16 bit; None where it adds up in fp32.

    ValueError where no known order fits.
    """
    pairs = [(0, j) for j in range(1, case.count)] + [(j, j + 1) for j in range(1, case.count - 1)]
    rows = np.full((len(pairs), case.count), _TINY, np.float16)
    for row, (i, j) in zip(rows, pairs, strict=True):
        row[i], row[j] = _LARGE, -_LARGE
    together = case.count - np.asarray(case.add(rows), np.float64) / _TINY
    if np.allclose(together, 2, atol=0.5):
        return None
    counts = np.round(together)
    if case.atomic and np.allclose(together, counts, atol=0.25) and counts.min() >= 2 and counts.max() <= case.count:
        return ORDERS[0].name  # what was added between the two was lost, whoever came when
    for order in ORDERS:
        expected = [order.together(i, j, case.count) for i, j in pairs]
        if np.allclose(together, expected, atol=0.25):
            return order.name
    raise ValueError(f"{case.label}: no known order has the partial sums {np.round(together).astype(int).tolist()}")


def rounds_products(case: Sum) -> bool:
    """Whether a kernel rounds products before it adds them up."""
    a, b = np.zeros((1, case.count), np.float16), np.zeros(case.count, np.float16)
    square = np.float16(32 * (1 + 2.0**-10))  # its square is 1024 (1 + 2^-9 + 2^-20)
    a[0, :2], b[:2] = (-1024 * (1 + 2.0**-9), square), (1, square)
    return float(np.asarray(case.add(a, b))[0]) == 0


def orders() -> dict[str, dict[str, str]]:
    """Of each operator: its order, by what else holds of the operands."""
    found: dict[str, dict[str, str]] = {}
    for case in SUMS:
        order = order_of(case)
        print(f"{case.label}: {order or 'fp32'}", file=sys.stderr)
        if order is None:
            continue
        if case.operator in PRODUCTS and not rounds_products(case):
            raise ValueError(f"{case.label}: products are added up unrounded")
        if found.setdefault(case.operator, {}).setdefault(case.where, order) != order:
            raise ValueError(f"{case.label}: adds {order}, and elsewhere {found[case.operator][case.where]}")
    for operator, (before, after) in SUMS_OF_FUNCTIONS.items():
        x = np.abs(np.random.default_rng(0).standard_normal((64, 300))).astype(np.float16)
        of_rows = run(operator, {"x": x, **AXIS}, keepdims=0)
        of_each = np.array([run(operator, {"x": row[None], **AXIS}, keepdims=0)[0] for row in x])
        for where, made in (("", of_rows), (ONE, of_each)):
            fitting = [name for name, add in ROUNDED.items() if np.array_equal(made, after(add(before(x))))]
            found.setdefault(operator, {})[where] = fitting[0]
            print(f"{operator}, {where or 'rows'}: {fitting[0]}", file=sys.stderr)
    return found


def inside() -> dict[str, float]:
    """Of each operator: how many roundings of the result the error of its kernel is worth."""
    found = {operator: worth(operator) for operator in KERNELS}
    for operator, roundings in found.items():
        print(f"{operator}: {roundings:.1f}", file=sys.stderr)
    return {operator: round(roundings, 1) for operator, roundings in found.items() if roundings > _ONE}


def _written(values: dict[str, Any]) -> Iterable[str]:
    for name, value in sorted(values.items()):
        yield f"{name if name.isidentifier() else repr(name)} = {value!r}".replace("'", '"')


def main() -> None:
    """Measure, and write the file."""
    device = sys.argv[1] if len(sys.argv) > 1 else "llvmpipe, Mesa 25.0"
    sums = orders()
    lines = [_HEAD, "[webgpu]", f'measured = "onnxruntime {onnxruntime.__version__} on {device}, {platform.machine()}"']
    lines += ["", "[webgpu.float16.inside]", *_written(inside())]
    for order in ORDERS:
        for where in sorted({where for each in sums.values() for where in each}):
            names = sorted(op for op, each in sums.items() if each.get(where) == order.name)
            if names:
                lines += ["", "[[webgpu.float16.sums]]", f'order = "{order.name}"']
                lines += [f'where = "{where}"'] if where else []
                lines += ["operators = [", *(f'    "{name}",' for name in names), "]"]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
