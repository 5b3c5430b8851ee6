"""What onnxruntime's arena makes of the memory that a step on CPU asks for: a simulation of its best-fit allocator.

Sizes are rounded up to 256 bytes. A request takes the smallest free chunk that is large enough, of equal ones the
lowest, and leaves what it does not need where that is as much again, or more than ``WASTE``. Freed neighbours become
one chunk. Where nothing fits, the arena grows by a region of ``REGION`` bytes, by one twice as large the next time, or
as many times two as it takes. A page counts from the moment in which it is first written, and never less again: what
is resident is what was ever touched. Beside its regions the arena keeps a table, with a number for every unit of them.

That each region is larger than the last matters from the second step on. All are free when that begins, and it fills
them from the smallest one, as the first step did. Of regions of one size it would begin with that at the lowest
address, which is the one that the first step took last and did not fill: in the end all of them would be written to.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from amp_transpiler.passes.lowering.liveness import Buffer, Liveness
from amp_transpiler.passes.lowering.workspace import EARLY

#: How the arena is set up: bytes of the region that it always keeps, of the next one, of the largest (onnxruntime's
#: Python takes less than 2 GiB, and the arena multiples of a unit alone), and by which a chunk may be larger than what
#: is in it.
FIRST_REGION, REGION, LARGEST_REGION, WASTE = 2**16, 2**28, 2**31 - 256, 2**16
_UNIT, _PAGE, _NUMBER = 256, 4096, 8


@dataclass(eq=False)
class Chunk:
    """A piece of a region, from ``start`` on. Regions do not touch: neighbours are of one region."""

    start: int
    size: int
    free: bool = True
    before: Chunk | None = None
    after: Chunk | None = None


class Arena:
    """An arena that nothing was asked of yet. Addresses count from 0, with room between the regions."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # size and start of free chunks
        self._at: dict[int, Chunk] = {}
        self._region = REGION
        self._units = FIRST_REGION // _UNIT
        self._end = FIRST_REGION + _PAGE
        self._touched: list[list[int]] = []  # first and last page, apart and in order
        self._offer(Chunk(0, FIRST_REGION))

    def take(self, size: int) -> Chunk:
        """Memory for so many bytes, written to."""
        rounded = max(_UNIT, -(-size // _UNIT) * _UNIT)
        index = bisect_left(self._free, (rounded, -1))
        if index == len(self._free):
            self._grow(rounded)
            index = bisect_left(self._free, (rounded, -1))
        _, start = self._free.pop(index)
        chunk = self._at[start]
        chunk.free = False
        if chunk.size >= 2 * rounded or chunk.size - rounded >= WASTE:
            rest = Chunk(start + rounded, chunk.size - rounded, True, chunk, chunk.after)
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.size, chunk.after = rounded, rest
            self._offer(rest)
        self._touch(start, size)
        return chunk

    def give(self, chunk: Chunk) -> None:
        """Memory that is no longer needed."""
        chunk.free = True
        after, before = chunk.after, chunk.before
        if after is not None and after.free:
            self._join(chunk, after)
        if before is not None and before.free:
            self._free.remove((before.size, before.start))
            self._join(before, chunk, known=False)
            chunk = before
        self._offer(chunk)

    @property
    def resident(self) -> int:
        """Bytes of the pages that were ever written to."""
        return sum(last - first + 1 for first, last in self._touched) * _PAGE

    @property
    def table(self) -> int:
        """Bytes of the table of units."""
        return self._units * _NUMBER

    # -- pieces ----------------------------------------------------------------------------------------
    def _grow(self, size: int) -> None:
        """Take a region in which so many bytes fit."""
        fits = self._region >= size
        while self._region < size:
            self._region *= 2
        self._units += self._region // _UNIT
        self._offer(Chunk(self._end, self._region))
        self._end += self._region + _PAGE
        if fits:
            self._region = min(2 * self._region, LARGEST_REGION)

    def _offer(self, chunk: Chunk) -> None:
        self._at[chunk.start] = chunk
        insort(self._free, (chunk.size, chunk.start))

    def _join(self, chunk: Chunk, after: Chunk, known: bool = True) -> None:
        """Let ``chunk`` take in the one behind it, which ``known``: is offered."""
        if known:
            self._free.remove((after.size, after.start))
        del self._at[after.start]
        chunk.size += after.size
        chunk.after = after.after
        if after.after is not None:
            after.after.before = chunk

    def _touch(self, start: int, size: int) -> None:
        first, last = start // _PAGE, (start + max(size, 1) - 1) // _PAGE
        low = bisect_left(self._touched, first - 1, key=lambda span: span[1])
        high = low
        while high < len(self._touched) and self._touched[high][0] <= last + 1:
            high += 1
        if low < high:
            first, last = min(first, self._touched[low][0]), max(last, self._touched[high - 1][1])
        self._touched[low:high] = [[first, last]]


def resident(live: Liveness) -> int:
    """Bytes that the arena takes from the system in a step with these buffers and this workspace."""
    arena = Arena()
    born: dict[int, list[Buffer]] = {}
    dead: dict[int, list[Buffer]] = {}
    for buffer in live.buffers:
        born.setdefault(buffer.first, []).append(buffer)
        dead.setdefault(buffer.last, []).append(buffer)
    held: dict[int, Chunk] = {}
    for step, extra in enumerate(live.workspace):
        first = live.order[step].proto.op_type in EARLY
        taken = [arena.take(size) for size in extra if first]
        for buffer in born.get(step, ()):
            held[id(buffer)] = arena.take(buffer.size)
        for chunk in taken or [arena.take(size) for size in extra]:
            arena.give(chunk)
        for buffer in dead.get(step, ()):
            arena.give(held.pop(id(buffer)))
    return arena.resident + arena.table
