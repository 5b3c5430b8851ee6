"""The counter-based hash of ``amp_transpiler.ops.training.hashed_words`` again, in numpy."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
WEYL = 0x9E3779B9
MASKS, LINES = zlib.crc32(b"@masks"), zlib.crc32(b"@lines")
#: Elements from which on a mask is made of lines; lines that are drawn, decisions in each, words hashed for them.
LARGE, DRAWN, WIDE, HASHED = 1 << 20, 1 << 12, 1 << 10, 1 << 19


class Words:
    """The hash in numpy, uint32 arithmetic that wraps."""

    @staticmethod
    def permute(x: Array, odd: int) -> Array:
        return x * (x + x + np.uint32(odd % 2**32))

    @staticmethod
    def finish(x: Array, odd: int) -> Array:
        x = x + (x >> np.uint32(16))
        x = Words.permute(x, odd)
        x = x + (x >> np.uint32(15))
        return Words.permute(x, 1)

    @staticmethod
    def mix(word: int) -> int:
        x = np.array([word % 2**32], np.uint32)
        return int(Words.finish(Words.permute(x, 1), 1)[0])

    @staticmethod
    def keys(seed: int, step: int, stream: int) -> tuple[int, int]:
        found = []
        for start, stride in ((0x7F4A7C15, 0x2545F491), (0xBF58476D, 0x94D049BB)):
            found.append(Words.mix(Words.mix(seed + start) + step * stride))
        return found[0] + Words.mix(stream), 2 * found[1] + 2 * Words.mix(stream ^ WEYL) + 1

    @staticmethod
    def bits(count: int, seed: int, step: int, stream: int) -> Array:
        k1, k2 = Words.keys(seed, step, stream)
        x = ((np.arange(count, dtype=np.uint64) * WEYL + k1 % 2**32) % 2**32).astype(np.uint32)
        return Words.finish(Words.permute(x, 1), k2)

    @staticmethod
    def products(count: int, seed: int, step: int, stream: int) -> Array:
        """What masks compare: the words that all masks of a step share, times the stream's odd key."""
        return Words.bits(count, seed, step, MASKS) * np.uint32(Words.keys(seed, step, stream)[1] % 2**32)

    @staticmethod
    def kept(count: int, seed: int, step: int, stream: int, ratio: float) -> Array:
        """The mask of a dropout: True where an element is kept."""
        threshold = np.uint32(int(np.ceil(np.float32(ratio) * 2.0**24)) << 8)
        if count < LARGE:
            return Words.products(count, seed, step, stream) >= threshold
        words, key = Words.bits(HASHED, seed, step, MASKS), Words.keys(seed, step, 0)[1] - 2 * Words.mix(WEYL) - 1
        odd = [key + 2 * Words.mix(LINES ^ Words.mix(part)) + 1 for part in range(DRAWN * WIDE // HASHED)]
        lines = np.concatenate([words * np.uint32(number % 2**32) for number in odd]).reshape(DRAWN, WIDE) >= threshold
        number = np.arange(-(-count // WIDE))
        taken = lines[Words.order(stream)[number % DRAWN] - number // DRAWN * (2 * Words.start(stream) + 1) % DRAWN]
        return np.asarray(taken.ravel()[:count])

    @staticmethod
    def order(stream: int) -> Array:
        """In which order a stream takes the lines."""
        x = ((np.arange(DRAWN, dtype=np.uint64) * WEYL + Words.start(stream)) % 2**32).astype(np.uint32)
        return np.argsort(Words.finish(Words.permute(x, 1), 1), kind="stable")

    @staticmethod
    def start(stream: int) -> int:
        return Words.mix(stream + 0x7F4A7C15)
