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

Masks of a step share the words ``w`` of one stream: element ``i`` of the mask of a stream is dropped where
``w[i] * k2`` is below a threshold, with k2 of that stream. A product with an odd number is a permutation of the words,
so each mask is exactly uniform; two of them are the two coordinates of a lattice with a random multiplier, new each
step, whose coarsest period of unlucky masks is far below what training could see (Knuth, The Art of Computer
Programming 2, section 3.3.4). That is one pass over the words and one comparison, where hashing is a dozen passes.

A mask of :data:`_LARGE` elements or more is made of lines of 1024 decisions: ``lines`` of such lines are drawn once a
step for each ratio, words times 8 keys, and each mask takes them in an order of its stream that never changes. The
decisions of a mask are independent then, as the lines are; two masks of a step share about one line of 4096 at the same
place. A mask of more lines than were drawn takes them again, in an order that is turned by some lines. That is one pass
that reads and writes a byte for each element.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.infer import constant_array
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import for_test, gradient, lowering_rule, traits
from amp_transpiler.lists import keep_fp32
from amp_transpiler.ops.common import makes_multiples, size_of, times

#: Metadata entry of a Dropout: the stream of its mask, unique in its program.
MASK_ID = "mask_id"

#: The number of a stream, or those of several.
Streams = int | Sequence[int]

_WORD = 1 << 32
_WEYL = 0x9E3779B9
_KEY1, _KEY2 = (0x7F4A7C15, 0x2545F491), (0xBF58476D, 0x94D049BB)
_SHARED = zlib.crc32(b"@masks")  # the stream of the words that masks share
_LINE = 1 << 12  # elements in a line where a shape gives no good split
_LONG = 1 << 16  # elements of the longest constant
_LINES = zlib.crc32(b"@lines")  # the stream of the keys of the lines that large masks share
#: Lines that are drawn, decisions in each, and words that are hashed for them.
_DRAWN, _WIDE, _HASHED = 1 << 12, 1 << 10, 1 << 19
#: Elements of a mask from which on it is made of lines.
_LARGE = 1 << 20


def mix(word: int) -> int:
    """A 32-bit word scrambled, in python: what the graph computes for run-time words."""
    x = word % _WORD
    for shift, factor in ((16, 1), (15, 1)):
        x = x * (2 * x + factor) % _WORD
        x = (x + (x >> shift)) % _WORD
    return x * (2 * x + 1) % _WORD


def stream_of(name: str) -> int:
    """The stream that belongs to a variable's name: the same wherever and whenever it is built."""
    return zlib.crc32(name.encode())


def _word(e: Emitter, number: int) -> Value:
    return e.const(number % _WORD, "uint32")


def _permute(e: Emitter, x: Value, odd: Value) -> Value:
    return e.Mul(x, e.Add(x, e.Add(x, odd)))


def _fold(e: Emitter, x: Value, shift: int) -> Value:
    """x + x / 2**shift. BitShift has no CUDA kernel, and Div is three times slower on CPU."""
    if e.at.host:
        return e.Add(x, e.BitShift(x, _word(e, shift), direction="RIGHT"))
    return e.Add(x, e.Div(x, _word(e, 1 << shift)))


def _finish(e: Emitter, x: Value, odd: Value) -> Value:
    """The rounds after the first product."""
    x = _permute(e, _fold(e, x, 16), odd)
    return _permute(e, _fold(e, x, 15), _word(e, 1))


def _mix(e: Emitter, x: Value) -> Value:
    one = _word(e, 1)
    return _finish(e, _permute(e, x, one), one)


def _listed(streams: Streams) -> Sequence[int]:
    return [streams] if isinstance(streams, int) else streams


def _keys(e: Emitter, seed: Value, step: Value, streams: Streams) -> tuple[Value, Value]:
    """k1, k2 of a stream: two words of (seed, step), scrambled once per graph, and two constants of the stream.

    Of several streams they are [streams, 1, 1].
    """
    names = f"{seed.name} {step.name}"
    if names not in e.shared:
        if e.ranked:  # each rank draws masks of its own
            seed = e.Add(seed, e.Mul(e.cast(e.scalar("rank"), "uint32"), _word(e, _WEYL)))
        starts, strides = (e.const(np.array(row, np.uint32)) for row in zip(_KEY1, _KEY2, strict=True))
        both = _mix(e, e.Add(_mix(e, e.Add(seed, starts)), e.Mul(step, strides)))
        first, second = (e.reshape(word, ()) for word in e.Split(both, axis=0, num_outputs=2, outputs=2))
        e.shared[names] = (first, e.Add(second, second))
    streams = _listed(streams)
    numbers = [(mix(stream), (2 * mix(stream ^ _WEYL) + 1) % _WORD) for stream in streams]
    sizes = () if len(streams) == 1 else (len(streams), 1, 1)
    own = (e.const(np.array(row, np.uint32).reshape(sizes)) for row in zip(*numbers, strict=True))
    k1, k2 = (e.Add(word, number) for word, number in zip(e.shared[names], own, strict=True))
    return k1, k2


def _split(shape: Sequence[int]) -> tuple[int, int]:
    """(lines, elements per line) that cover the elements of ``shape`` with two small constants."""
    total = math.prod(shape)
    cuts = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(len(shape) + 1)]
    lines, line = min(cuts, key=sum)
    if max(lines, line) > _LONG:
        return -(-total // _LINE), _LINE
    return lines, line


def ahead_of(first: Any) -> Any:
    """What the elements before the ``first`` one add to a key, modulo 2**32 (uint32)."""
    return (np.asarray(first, np.uint64) * _WEYL).astype(np.uint32)


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
    k1, k2 = _keys(e, seed, step, streams)
    total, (lines, line), many = math.prod(shape), _split(shape), len(_listed(streams))
    apart, lead = line, (many,) * (many > 1)
    if part is not None:
        k1 = e.Add(k1, part.ahead)
        if part.apart is not None:
            lines, line, apart = shape[0], total // shape[0], part.apart
    starts = (np.arange(lines, dtype=np.uint64) * apart + first) * _WEYL
    steps = (np.arange(line, dtype=np.uint64) * _WEYL).astype(np.uint32)
    row = e.Add(e.const(starts.astype(np.uint32).reshape(lines, 1)), k1)
    x = e.Add(row, e.const(steps))
    doubled = e.Add(e.Add(row, e.Add(row, _word(e, 1))), e.const(steps * np.uint32(2)))  # 2 x + 1
    x = _finish(e, e.Mul(x, doubled), k2)
    if lines * line != total:
        x = e.Slice(e.reshape(x, [*lead, -1]), e.ints(0), e.ints(total), e.ints(1) if lead else None)
    return e.reshape(Value(x.name, x.dtype), (*lead, *shape))


def _shared_words(e: Emitter, shape: Sequence[int], seed: Value, step: Value) -> Value:
    """The words of this step that its masks share: each is hashed once, whatever the sizes of the masks are."""
    key, total = f"words {seed.name} {step.name}", math.prod(shape)
    drawn = e.shared.get(key, ())
    found = next((v for v in drawn if v.shape == (total,)), None)
    if found is None:
        longest = max(drawn, key=lambda v: math.prod(v.shape or ()), default=None)
        have = 0 if longest is None else math.prod(longest.shape or ())
        if longest is None:
            found = e.reshape(random_bits(e, shape, seed, step, _SHARED), [total])
        elif have > total:
            found = e.op("Slice", longest, e.ints(0), e.ints(total), shape=[total])
        else:
            more = random_bits(e, [total - have], seed, step, _SHARED, have)
            found = e.op("Concat", longest, more, axis=0, shape=[total])
        e.shared[key] = (*drawn, found)
    return e.reshape(found, shape)


def _fraction(e: Emitter, bits: Value, first: int) -> Value:
    """(k + first) / 2**24 as float32, k the upper 24 bits: exact."""
    k = e.cast(e.Div(bits, _word(e, 1 << 8)), "float32")
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


def kept_of(mask: Value, value: Value) -> str:
    """The key under which rules find what is kept of a value, the rest 0."""
    return f"kept by {mask.name}: {value.name}"


def keep_mask(
    e: Emitter, shape: Sequence[int], seed: Value, step: Value, stream: int, threshold: Value, late: Value | None = None
) -> Value:
    """bool, True where the stream's word is ``threshold`` (a uint32 scalar) or more.

    ``late``: a uint32 0 that is known only when the mask is to be computed (again).
    """
    if math.prod(shape) >= _LARGE:
        return _of_lines(e, shape, _lines(e, seed, step, threshold), stream, late)
    _, odd = _keys(e, seed, step, stream)
    odd = odd if late is None else e.Add(odd, late)
    return e.GreaterOrEqual(e.Mul(_shared_words(e, shape, seed, step), odd), threshold, shape=shape)


def _lines(e: Emitter, seed: Value, step: Value, threshold: Value) -> Value:
    """The lines of this step, bool: True where a decision is to keep."""
    words = f"lines {seed.name} {step.name}"
    if words not in e.shared:
        _keys(e, seed, step, _LINES)
        second = e.shared[f"{seed.name} {step.name}"][1]
        odd = _odd_numbers().reshape(-1, 1)
        shape = (len(odd), _HASHED)
        keys = e.Add(second, e.const(odd))
        e.shared[words] = (e.Mul(_shared_words(e, shape[1:], seed, step), keys, shape=shape),)
    key = f"{words} {threshold.name}"
    if key not in e.shared:
        kept = e.GreaterOrEqual(e.shared[words][0], threshold)
        e.shared[key] = (e.reshape(kept, (_DRAWN, _WIDE)),)
    return e.shared[key][0]


def _odd_numbers() -> np.ndarray[Any, Any]:
    """What is added to the second key of a step, for the keys of the parts of the lines."""
    parts = range(_DRAWN * _WIDE // _HASHED)
    return np.array([(2 * mix(_LINES ^ mix(part)) + 1) % _WORD for part in parts], np.uint32)


def _of_lines(e: Emitter, shape: Sequence[int], lines: Value, stream: int, late: Value | None) -> Value:
    total = math.prod(shape)
    count = -(-total // _WIDE)
    order, turns = _order(stream), -(-count // _DRAWN)
    by = 2 * _start(stream) + 1  # odd: no turn comes again
    back = -(np.arange(turns) * by % _DRAWN).astype(np.int32).reshape(turns, 1)
    if count <= _LONG:
        place = e.const((back + order).ravel()[:count])
    else:
        place = e.reshape(e.Add(e.const(back), e.const(order), shape=(turns, _DRAWN)), (turns * _DRAWN,))
    if late is not None:
        place = e.Add(place, e.cast(late, "int32"))
    taken = e.op("Gather", lines, place, axis=0, shape=(*size_of(place), _WIDE))
    if math.prod(size_of(taken)) != total:
        taken = e.Slice(e.reshape(taken, (math.prod(size_of(taken)),)), e.ints(0), e.ints(total), shape=(total,))
    return e.reshape(taken, shape)


def _start(stream: int) -> int:
    """Of a stream, whose number may be small, a word that is not."""
    return mix(stream + _KEY1[0])


@cache
def _order(stream: int) -> np.ndarray[Any, Any]:
    """0 … _DRAWN - 1 (int32) in an order that a hash of the stream and the number gives."""
    words = np.array([mix(_start(stream) + number * _WEYL) for number in range(_DRAWN)], np.uint32)
    return np.argsort(words, kind="stable").astype(np.int32)


# -- Dropout ---------------------------------------------------------------------------------------
def _training(op: Operator) -> bool:
    mode = op.input(2)
    value = None if mode is None else constant_array(mode)
    return value is not None and bool(value)


def mask_stream(op: Operator) -> int:
    """The mask's stream; for an imported operator that has no number, one from its output's name."""
    if MASK_ID in op.metadata:
        return int(op.metadata[MASK_ID])
    return stream_of(next(v.name for v in op.outputs if v is not None))


@dataclass(frozen=True)
class _Rate:
    """What follows from the probability of being dropped: computed here where that is known before the run."""

    ratio: Value | None
    known: np.ndarray | None

    @staticmethod
    def of(e: Emitter, op: Operator, slot: int, ratio: Value | None) -> _Rate:
        """The ratio in this input of ``op``; 0.5 where it is left out."""
        return _Rate(ratio, np.asarray(0.5, np.float32) if ratio is None else e.known(op.input(slot)))

    def threshold(self, e: Emitter) -> Value:
        """The uint32 below which a word is dropped: ratio * 2**32, the next multiple of 2**8."""
        if self.known is not None:
            return _word(e, int(np.ceil(np.float32(self.known.item()) * 2.0**24)) << 8)
        assert self.ratio is not None
        scaled = e.Ceil(e.Mul(e.cast(self.ratio, "float32"), e.const(2.0**24, "float32")))
        return e.Mul(e.cast(scaled, "uint32"), _word(e, 1 << 8))

    def scaled(self, e: Emitter, value: Value, mask: Value) -> Value:
        """value / (1 - ratio) where the mask is True, 0 elsewhere.

        Selected, not multiplied by 0: an overflowed value that is dropped is no NaN.
        """
        if self.known is not None:
            ratio = self.known if self.known.dtype == np.float64 else np.float32(self.known.item())
            factor = float(1 / (1 - ratio))
            if makes_multiples(e):
                kept = e.Where(mask, value, e.like(0, value), shape=value.shape)
                e.shared[kept_of(mask, value)] = (kept,)
                return times(e, kept, factor)
            scale = e.like(factor, value)
        else:
            assert self.ratio is not None
            wide = e.f32(self.ratio)
            one = e.like(1, wide)
            scale = e.cast(e.Div(one, e.Sub(one, wide)), value.dtype)
        return e.Where(mask, e.Mul(value, scale), e.like(0, value), shape=value.shape)


def masked(
    e: Emitter, op: Operator, slot: int, x: Value, ratio: Value | None, late: Value | None = None
) -> list[Value]:
    """Value and mask of a dropout at this step. ``slot``: the input of ``op`` that is the ratio."""
    assert x.shape is not None
    rate = _Rate.of(e, op, slot, ratio)
    mask = keep_mask(e, x.shape, e.scalar("seed"), e.scalar("step"), mask_stream(op), rate.threshold(e), late)
    return [rate.scaled(e, x, mask), mask][: len(op.outputs)]


# As it is evaluated; in training it scales the elements that it keeps, too.
traits("Dropout", moves=(0,), settings=(1,))
keep_fp32("Dropout", inputs=(1,))


@lowering_rule("Dropout", native=True, when=_training)
def dropout(e: Emitter, op: Operator, x: Value, ratio: Value | None, mode: Value) -> list[Value]:
    """ONNX Dropout in training mode. Its ``seed`` attribute belongs to the runtime's generator and is not used."""
    return masked(e, op, 1, x, ratio)


@for_test("Dropout")
def dropout_for_test(op: Operator) -> None:
    """Pass the data through."""
    op.metadata.pop(MASK_ID, None)
    if op.input(2) is not None:
        op.set_input(2, None)
    mask = op.output(1)
    if mask is not None and not mask.readers:
        op.set_output(1, None)


@gradient("Dropout", reads="x1 x2 y1 dy0", inputs=[0], native=True)
def dropout_gradient(
    e: Emitter, op: Operator, ratio: Value | None, mode: Value | None, mask: Value, dy: Value
) -> list[Value | None]:
    """dx = dy / (1 - ratio) where the forward mask is True, 0 elsewhere; dy where it does not train."""
    known = e.known(op.input(1))
    if mode is None or (known is not None and not known):
        return [dy, None, None]
    rate = _Rate.of(e, op, 0, ratio)
    if known is None:  # told in the run
        ratio = e.const(0.5, "float32") if ratio is None else ratio
        rate = _Rate(e.Where(mode, ratio, e.like(0, ratio)), None)
    return [rate.scaled(e, dy, mask), None, None]
