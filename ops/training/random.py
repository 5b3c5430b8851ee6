"""Masks of Dropout, of words that are random (:mod:`.hashed_words`).

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
from typing import Any

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Types
from amp_transpiler.ir.opdef import for_test, gradient, lowering_rule, traits
from amp_transpiler.lists import keep_fp32
from amp_transpiler.ops.common import LONG, makes_multiples, size_of, times
from amp_transpiler.ops.training.hashed_words import KEYS1, WEYL, WORD, keys, mix, random_bits, stream_of, word

#: Metadata entry of a Dropout: the stream of its mask, unique in its program.
MASK_ID = "mask_id"

_SHARED = zlib.crc32(b"@masks")  # the stream of the words that masks share
_LINES = zlib.crc32(b"@lines")  # the stream of the keys of the lines that large masks share
#: Lines that are drawn, decisions in each, and words that are hashed for them.
_DRAWN, _WIDE, _HASHED = 1 << 12, 1 << 10, 1 << 19
#: Elements of a mask from which on it is made of lines.
_LARGE = 1 << 20


def _shared_words(e: Emitter, shape: Sequence[int], seed: Value, step: Value) -> Value:
    """The words of this step that its masks share: each is hashed once, whatever the sizes of the masks are."""
    key, total = f"words {seed.name} {step.name}", math.prod(shape)
    drawn = e.shared.get(key, ())
    found = next((v for v in drawn if v.shape == (total,)), None)
    if found is None:
        shared = [] if e.hangs(total) else [v for v in drawn if not e.hangs(math.prod(v.shape or ()))]
        longest = max(shared, key=lambda v: math.prod(v.shape or ()), default=None)
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


def kept_of(mask: Value, value: Value) -> str:
    """The key under which rules find what is kept of a value, the rest 0."""
    return f"kept by {mask.name}: {value.name}"


def keep_mask(
    e: Emitter, shape: Sequence[int], seed: Value, step: Value, stream: int, threshold: Value, late: Value | None
) -> Value:
    """bool, True where the stream's word is ``threshold`` (a uint32 scalar) or more.

    ``late``: a uint32 0 that is known only when the mask is to be computed (again).
    """
    if math.prod(shape) >= _LARGE and not e.hangs(math.prod(shape)):
        return _of_lines(e, shape, _lines(e, seed, step, threshold), stream, late)
    _, odd = keys(e, seed, step, stream)
    odd = odd if late is None else e.Add(odd, late)
    return e.GreaterOrEqual(e.Mul(_shared_words(e, shape, seed, step), odd), threshold, shape=shape)


def _lines(e: Emitter, seed: Value, step: Value, threshold: Value) -> Value:
    """The lines of this step, bool: True where a decision is to keep."""
    words = f"lines {seed.name} {step.name}"
    if words not in e.shared:
        keys(e, seed, step, _LINES)
        second = e.shared[f"{seed.name} {step.name}"][1]
        odd = _odd_numbers().reshape(-1, 1)
        shape = (len(odd), _HASHED)
        own = e.Add(second, e.const(odd))
        e.shared[words] = (e.Mul(_shared_words(e, shape[1:], seed, step), own, shape=shape),)
    key = f"{words} {threshold.name}"
    if key not in e.shared:
        kept = e.GreaterOrEqual(e.shared[words][0], threshold)
        e.shared[key] = (e.reshape(kept, (_DRAWN, _WIDE)),)
    return e.shared[key][0]


def _odd_numbers() -> np.ndarray[Any, Any]:
    """What is added to the second key of a step, for the keys of the parts of the lines."""
    parts = range(_DRAWN * _WIDE // _HASHED)
    return np.array([(2 * mix(_LINES ^ mix(part)) + 1) % WORD for part in parts], np.uint32)


def _of_lines(e: Emitter, shape: Sequence[int], lines: Value, stream: int, late: Value | None) -> Value:
    total = math.prod(shape)
    count = -(-total // _WIDE)
    order, turns = _order(stream), -(-count // _DRAWN)
    by = 2 * _start(stream) + 1  # odd: no turn comes again
    back = -(np.arange(turns) * by % _DRAWN).astype(np.int32).reshape(turns, 1)
    if count <= LONG:
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
    return mix(stream + KEYS1[0])


@cache
def _order(stream: int) -> np.ndarray[Any, Any]:
    """0 … _DRAWN - 1 (int32) in an order that a hash of the stream and the number gives."""
    words = np.array([mix(_start(stream) + number * WEYL) for number in range(_DRAWN)], np.uint32)
    return np.argsort(words, kind="stable").astype(np.int32)


# -- Dropout ---------------------------------------------------------------------------------------
def _training(op: Operator) -> bool:
    value = constant_array(op.input(2))
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

    @property
    def drops_all(self) -> bool:
        """Whether it is known that nothing is kept."""
        return self.known is not None and np.float32(self.known.item()) == 1

    def threshold(self, e: Emitter) -> Value:
        """The uint32 below which a word is dropped: ratio * 2**32, the next multiple of 2**8."""
        if self.known is not None:
            return word(e, int(np.ceil(np.float32(self.known.item()) * 2.0**24)) << 8)
        assert self.ratio is not None
        scaled = e.Ceil(e.Mul(e.cast(self.ratio, "float32"), e.const(2.0**24, "float32")))
        return e.Mul(e.cast(scaled, "uint32"), word(e, 1 << 8))

    def scaled(self, e: Emitter, value: Value, mask: Value) -> Value:
        """value / (1 - ratio) where the mask is True, 0 elsewhere.

        Selected, not multiplied by 0: an overflowed value that is dropped is no NaN.
        """
        if self.known is not None:
            ratio = self.known if self.known.dtype == np.float64 else np.float32(self.known.item())
            factor = 1.0 if self.drops_all else float(1 / (1 - ratio))
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
    if rate.drops_all:
        mask = e.Less(x, x, shape=x.shape)
    else:
        mask = keep_mask(e, x.shape, e.scalar("seed"), e.scalar("step"), mask_stream(op), rate.threshold(e), late)
    return [rate.scaled(e, x, mask), mask][: len(op.outputs)]


# As it is evaluated; in training it scales the elements that it keeps, too.
traits("Dropout", moves=(0,), settings=(1,))
keep_fp32("Dropout", inputs=(1,))


def _like_data(op: Operator) -> Types:
    """The mask has the shape of the data, and until opset 10 its type, of which ONNX's inference says nothing."""
    data = op.inputs[0]
    assert data is not None
    return [(data.dtype, data.shape), ("bool" if op.program.opset() >= 10 else data.dtype, data.shape)]


@lowering_rule("Dropout", native=True, when=_training, infer=_like_data)
def dropout(e: Emitter, op: Operator, x: Value, ratio: Value | None, mode: Value) -> list[Value]:
    """ONNX Dropout in training mode. Its ``seed`` attribute belongs to the runtime's generator and is not used."""
    return masked(e, op, 1, x, ratio)


@for_test("Dropout")
def dropout_for_test(op: Operator) -> None:
    """Pass the data through."""
    op.metadata.pop(MASK_ID, None)
    if op.input(2) is not None:
        op.set_input(2, None)
    ratio = op.input(1)
    known = constant_array(ratio)
    if known is not None and np.float32(known.item()) == 1:  # which onnxruntime refuses where it reads none, too
        op.set_input(1, None)
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
