"""Counter-based random numbers from uint32 Add, Mul and Div alone, which CPU and CUDA both have.

Element ``i`` of stream ``stream`` at ``(seed, step)`` is a hash of these four numbers and of nothing else,
so that a resumed, recomputed or moved run draws the same numbers. Arithmetic wraps at 2**32::

    k1, k2 = key(seed, step, stream)            # k2 is odd
    x = k1 + i * WEYL
    x = x * (2 * x + 1);  x = x + x / 2**16     # x -> x * (2 x + odd) is a permutation of 32-bit words
    x = x * (2 * x + k2); x = x + x / 2**15
    x = x * (2 * x + 1)                         # the upper 24 bits are used

The product by itself is what makes it a hash: sums, shifts and constant factors alone leave the differences of
neighbours to a handful of values. ``i * WEYL`` is the sum of two small constants, and the key, known only
at run time, goes into one of them first: constant folding finds no full-size constant to make.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import LONG

#: The number of a stream, or those of several.
Streams = int | Sequence[int]

WORD, WEYL = 1 << 32, 0x9E3779B9
#: What the two words of a key are begun with, and multiplied by.
KEYS1, _KEYS2 = (0x7F4A7C15, 0x2545F491), (0xBF58476D, 0x94D049BB)
_LINE = 1 << 12  # elements in a line where a shape gives no good split


def mix(number: int) -> int:
    """A 32-bit word scrambled, in python: what the graph computes for run-time words."""
    x = number % WORD
    for shift, factor in ((16, 1), (15, 1)):
        x = x * (2 * x + factor) % WORD
        x = (x + (x >> shift)) % WORD
    return x * (2 * x + 1) % WORD


def stream_of(name: str) -> int:
    """The stream that belongs to a variable's name: the same wherever and whenever it is built."""
    return zlib.crc32(name.encode())


def word(e: Emitter, number: int) -> Value:
    """A constant word."""
    return e.const(number % WORD, "uint32")


def _permute(e: Emitter, x: Value, odd: Value) -> Value:
    return e.Mul(x, e.Add(x, e.Add(x, odd)))


def _fold(e: Emitter, x: Value, shift: int) -> Value:
    """x + x / 2**shift. BitShift has no CUDA kernel, and Div is three times slower on CPU."""
    if e.at.host:
        return e.Add(x, e.BitShift(x, word(e, shift), direction="RIGHT"))
    return e.Add(x, e.Div(x, word(e, 1 << shift)))


def _finish(e: Emitter, x: Value, odd: Value) -> Value:
    """The rounds after the first product."""
    x = _permute(e, _fold(e, x, 16), odd)
    return _permute(e, _fold(e, x, 15), word(e, 1))


def _mix(e: Emitter, x: Value) -> Value:
    one = word(e, 1)
    return _finish(e, _permute(e, x, one), one)


def _listed(streams: Streams) -> Sequence[int]:
    return [streams] if isinstance(streams, int) else streams


def keys(e: Emitter, seed: Value, step: Value, streams: Streams) -> tuple[Value, Value]:
    """k1, k2 of a stream: two words of (seed, step), scrambled once per graph, and two constants of the stream.

    Of several streams they are [streams, 1, 1].
    """
    names = f"{seed.name} {step.name}"
    if names not in e.shared:
        if e.ranked:  # each rank draws masks of its own
            seed = e.Add(seed, e.Mul(e.cast(e.scalar("rank"), "uint32"), word(e, WEYL)))
        starts, strides = (e.const(np.array(row, np.uint32)) for row in zip(KEYS1, _KEYS2, strict=True))
        both = _mix(e, e.Add(_mix(e, e.Add(seed, starts)), e.Mul(step, strides)))
        first, second = (e.reshape(half, ()) for half in e.Split(both, axis=0, num_outputs=2, outputs=2))
        e.shared[names] = (first, e.Add(second, second))
    streams = _listed(streams)
    numbers = [(mix(stream), (2 * mix(stream ^ WEYL) + 1) % WORD) for stream in streams]
    sizes = () if len(streams) == 1 else (len(streams), 1, 1)
    own = (e.const(np.array(row, np.uint32).reshape(sizes)) for row in zip(*numbers, strict=True))
    k1, k2 = (e.Add(half, number) for half, number in zip(e.shared[names], own, strict=True))
    return k1, k2


def _split(shape: Sequence[int]) -> tuple[int, int]:
    """(lines, elements per line) that cover the elements of ``shape`` with two small constants."""
    total = math.prod(shape)
    cuts = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(len(shape) + 1)]
    lines, line = min(cuts, key=sum)
    if max(lines, line) > LONG:
        return -(-total // _LINE), _LINE
    return lines, line


def ahead_of(first: Any) -> Any:
    """What the elements before the ``first`` one add to a key, modulo 2**32 (uint32)."""
    return (np.asarray(first, np.uint64) * WEYL).astype(np.uint32)


class Part(NamedTuple):
    """Other elements of a stream than its first: those behind ``ahead``, a uint32 scalar that is :func:`ahead_of` their
    number, in rows that begin so many elements ``apart`` (None: one after the other)."""

    ahead: Value
    apart: int | None = None


def random_bits(
    e: Emitter,
    shape: Sequence[int],
    seed: Value,
    step: Value,
    streams: Streams,
    first: int = 0,
    part: Part | None = None,
) -> Value:
    """uint32 words of which the upper 24 bits are random: those of the elements from ``first`` on, or of a ``part``.

    ``seed`` and ``step`` are uint32 scalars. Of several streams they are [streams, …].
    """
    k1, k2 = keys(e, seed, step, streams)
    total, (lines, line), many = math.prod(shape), _split(shape), len(_listed(streams))
    if e.hangs(total) and shape[0]:
        lines, line = shape[0], total // shape[0]
    apart, lead = line, (many,) * (many > 1)
    if part is not None:
        k1 = e.Add(k1, part.ahead)
        if part.apart is not None:
            lines, line, apart = shape[0], total // shape[0], part.apart
    row = e.Add(_multiples(e, (lines, 1), apart * WEYL, first * WEYL), k1)
    x = e.Add(row, _multiples(e, (line,), WEYL))
    doubled = e.Add(e.Add(row, e.Add(row, word(e, 1))), _multiples(e, (line,), 2 * WEYL))  # 2 x + 1
    x = _finish(e, e.Mul(x, doubled), k2)
    if lines * line != total:
        x = e.Slice(e.reshape(x, [*lead, -1]), e.ints(0), e.ints(total), e.ints(1) if lead else None)
    return e.reshape(Value(x.name, x.dtype), (*lead, *shape))


def _multiples(e: Emitter, shape: Sequence[int], of: int, begin: int = 0) -> Value:
    """uint32 of this shape: ``begin`` and what follows it in steps of ``of``."""
    count = math.prod(shape)
    if e.hangs(count):  # how many numbers there are, the run knows
        places = e.reshape(e.cast(e.const(np.arange(count)), "uint32"), shape)
        return e.Add(e.Mul(places, word(e, of)), word(e, begin))
    numbers = np.arange(count, dtype=np.uint64) * (of % WORD) + begin % WORD
    return e.const(numbers.astype(np.uint32).reshape(shape))


def _fraction(e: Emitter, bits: Value, first: int) -> Value:
    """(k + first) / 2**24 as float32, k the upper 24 bits: exact."""
    k = e.cast(e.Div(bits, word(e, 1 << 8)), "float32")
    return e.Mul(e.Add(k, e.like(first, k)) if first else k, e.like(2.0**-24, k))


def uniform(
    e: Emitter, shape: Sequence[int], seed: Value, step: Value, streams: Streams, part: Part | None = None
) -> Value:
    """float32 uniform in [0, 1), multiples of 2**-24; of several streams [streams, …]."""
    return _fraction(e, random_bits(e, shape, seed, step, streams, part=part), 0)


def normal(
    e: Emitter, shape: Sequence[int], seed: Value, step: Value, streams: Streams, part: Part | None = None
) -> Value:
    """float32 standard normal, |z| < 5.8 (Box & Muller 1958, the cosine half); of several streams [streams, …]."""
    others = [mix(stream + 1) for stream in _listed(streams)]
    radius = _fraction(e, random_bits(e, shape, seed, step, streams, part=part), 1)  # (0, 1]: a finite logarithm
    angle = _fraction(e, random_bits(e, shape, seed, step, others, part=part), 0)
    return e.Mul(e.Sqrt(e.Mul(e.Log(radius), e.like(-2, radius))), e.Cos(e.Mul(angle, e.like(2 * math.pi, angle))))
