"""Files with bytes changed."""

from __future__ import annotations

import random


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out, repeated, swapped, or the end cut off."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at, size = rng.randrange(len(data)), rng.choice([1, 1, 2, 8, 64])
        what = rng.randrange(6)
        if what <= 1:
            data[at] = rng.choice([0, 1, 127, 128, 255, data[at] ^ (1 << rng.randrange(8)), rng.randrange(256)])
        elif what == 2:
            del data[at : at + size]
        elif what == 3:
            data[at:at] = data[at : at + size]
        elif what == 4:
            data[at : at + size] = rng.randbytes(size)
        elif rng.random() < 0.2:
            del data[at:]
        data = data or bytearray(b"\0")
    return bytes(data)
