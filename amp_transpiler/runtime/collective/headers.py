"""The header that travels before each exchange: which call a rank makes, so that ranks which differ find out."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Calls, by the number they travel under.
KINDS = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"),
    *("all_gather_object", "agree"),
)
#: What a reduction computes, likewise.
OPS = ("", "sum", "mean", "max")
#: Element types, likewise.
DTYPES = (
    *("", "float16", "bfloat16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_FORM = struct.Struct("<qiiiiqq")
#: Bytes of a header.
SIZE = _FORM.size
#: Calls whose length may differ between ranks.
_OWN_LENGTH = frozenset({"all_gather", "all_gather_object", "all_to_all", "agree"})


@dataclass(frozen=True)
class Call:
    """One call of a rank: its number, what it is, its elements, and a check sum of all sizes or shapes with it."""

    number: int
    kind: str
    op: str = ""
    dtype: str = ""
    root: int = 0
    length: int = 0
    check: int = 0

    def packed(self) -> np.ndarray:
        """As bytes."""
        values = (KINDS.index(self.kind), OPS.index(self.op), DTYPES.index(self.dtype))
        return np.frombuffer(_FORM.pack(self.number, *values, self.root, self.length, self.check), np.uint8)

    @classmethod
    def unpacked(cls, row: np.ndarray) -> Call:
        """What :meth:`packed` wrote."""
        number, kind, op, dtype, root, length, check = _FORM.unpack(row.tobytes())
        return cls(number, KINDS[kind], OPS[op], DTYPES[dtype], root, length, check)

    def agrees(self, other: Call) -> bool:
        """Whether two ranks make the same call."""
        mine, theirs = self._compared(), other._compared()
        return mine == theirs

    def _compared(self) -> tuple[object, ...]:
        length = None if self.kind in _OWN_LENGTH else self.length
        return self.number, self.kind, self.op, self.dtype, self.root, length, self.check

    def __str__(self) -> str:
        said = " ".join(filter(None, (self.kind, self.op)))
        if self.dtype:
            said += f" {self.dtype}[{self.length}]"
        if self.kind == "broadcast":
            said += f" from rank {self.root}"
        return f"call {self.number} ({said})"


def check_sum(sizes: Sequence[int]) -> int:
    """A number that differs where the sizes do."""
    return zlib.crc32(np.asarray(sizes, np.int64).tobytes())


def difference(calls: Sequence[Call], rank: int) -> tuple[int, str] | None:
    """The first rank that makes another call than ``rank`` does, and both of them in words; None where all agree."""
    mine = calls[rank]
    for other, call in enumerate(calls):
        if not mine.agrees(call):
            same = "; their sizes differ" if str(call) == str(mine) else ""
            return other, f"rank {rank} made {mine}, rank {other} made {call}{same}"
    return None
