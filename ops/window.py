"""How a convolution's or pool's window slides: the geometry that both families share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import size_of


@dataclass(frozen=True)
class Window:
    """A window over the spatial axes: position ``o`` of ``target`` reads ``o * stride + tap * dilation - begin``
    of ``source``. ``begin`` is the padding before each axis; what lies behind it follows from the sizes."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.kernel)

    @property
    def extent(self) -> tuple[int, ...]:
        """The reach of one window along each axis, dilation included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def overhang(self) -> tuple[int, ...]:
        """How far the last window reaches beyond ``source``; negative where it leaves a tail unread."""
        return tuple(
            (t - 1) * s + x - b - n
            for t, s, x, b, n in zip(self.target, self.strides, self.extent, self.begin, self.source, strict=True)
        )

    @property
    def end(self) -> tuple[int, ...]:
        """The padding behind each axis that the windows read."""
        return tuple(max(o, 0) for o in self.overhang)

    @property
    def tail(self) -> tuple[int, ...]:
        """How many elements at the end of each axis no window reads."""
        return tuple(max(-o, 0) for o in self.overhang)

    @property
    def pads(self) -> list[int]:
        """``begin`` and ``end`` as the ``pads`` attribute has them."""
        return [*self.begin, *self.end]

    @property
    def taps(self) -> list[tuple[int, ...]]:
        """The kernel's positions in row-major order."""
        return list(itertools.product(*(range(k) for k in self.kernel)))

    @property
    def overlaps(self) -> bool:
        """Whether two windows can read the same element."""
        return any(x > s and t > 1 for x, s, t in zip(self.extent, self.strides, self.target, strict=True))

    @property
    def is_tiling(self) -> bool:
        """Whether the windows cover ``source`` exactly, each element once, without padding or dilation."""
        return (
            self.kernel == self.strides
            and set(self.dilations) == {1}
            and not any(self.begin)
            and self.source == tuple(k * t for k, t in zip(self.kernel, self.target, strict=True))
        )

    def attributes(self) -> dict[str, Any]:
        """Strides, dilations and padding as attributes of Conv."""
        return {"strides": list(self.strides), "dilations": list(self.dilations), "pads": self.pads}

    def pad(self, e: Emitter, value: Value, first_axis: int) -> Value:
        """``value`` with zeros around the spatial axes, which start at ``first_axis``, as far as windows read them."""
        if not any(self.pads):
            return value
        sizes = size_of(value)
        before, after = [0] * len(sizes), [0] * len(sizes)
        before[first_axis : first_axis + self.rank] = self.begin
        after[first_axis : first_axis + self.rank] = self.end
        shape = [n + b + a for n, b, a in zip(sizes, before, after, strict=True)]
        return e.op("Pad", value, e.ints(*before, *after), shape=shape)

    def read(self, e: Emitter, padded: Value, tap: Sequence[int], first_axis: int) -> Value:
        """What every window reads at one position of the kernel: ``padded`` sliced to the ``target`` sizes."""
        shape = list(size_of(padded))
        starts = [t * d for t, d in zip(tap, self.dilations, strict=True)]
        ends = [b + (n - 1) * s + 1 for b, n, s in zip(starts, self.target, self.strides, strict=True)]
        axes = slice(first_axis, first_axis + self.rank)
        steps = [] if set(self.strides) == {1} else [e.ints(*self.strides)]
        if not any(starts) and not steps and shape[axes] == ends:
            return padded
        shape[axes] = self.target
        where = e.ints(*range(len(shape))[axes])
        return e.op("Slice", padded, e.ints(*starts), e.ints(*ends), where, *steps, shape=shape)

    def scatter(self, e: Emitter, values: Value, weights: Value, group: int) -> Value:
        """Each window's value times the kernel, added up where the windows lie: ``[N, C, *source]``."""
        lead = (size_of(values)[0], size_of(weights)[1] * group)
        # CUDA has no ConvTranspose with asymmetric pads: it takes what both sides share, the rest is cut off.
        common = [min(b, a) for b, a in zip(self.begin, self.end, strict=True)]
        begin, end = (self.begin, self.end) if e.at.host else (common, common)
        cuts = [b - m for b, m in zip(self.begin, begin, strict=True)]
        sizes = [c + n + a - m for c, n, a, m in zip(cuts, self.source, self.end, end, strict=True)]
        made = e.op(
            "ConvTranspose",
            values,
            weights,
            group=group,
            output_padding=list(self.tail),
            shape=(*lead, *sizes),
            strides=list(self.strides),
            dilations=list(self.dilations),
            pads=[*begin, *end],
        )
        if tuple(sizes) == self.source:
            return made
        ends = [c + n for c, n in zip(cuts, self.source, strict=True)]
        axes = range(2, 2 + self.rank)
        return e.op("Slice", made, e.ints(*cuts), e.ints(*ends), e.ints(*axes), shape=(*lead, *self.source))


def window_by(attrs: Mapping[str, Any], kernel: Sequence[int], source: Sequence[int], target: Sequence[int]) -> Window:
    """The window of a convolution or pool from its attributes and the spatial sizes that it joins."""
    rank = len(kernel)
    strides = tuple(attrs.get("strides") or [1] * rank)
    dilations = tuple(attrs.get("dilations") or [1] * rank)
    plain = Window(tuple(kernel), strides, dilations, (0,) * rank, tuple(source), tuple(target))
    auto_pad = attrs.get("auto_pad", "NOTSET")
    if auto_pad == "NOTSET":
        begin = tuple((attrs.get("pads") or [0] * rank)[:rank])
    elif auto_pad == "VALID":
        begin = (0,) * rank
    else:
        begin = tuple((p + 1) // 2 if auto_pad == "SAME_LOWER" else p // 2 for p in plain.end)
    return Window(plain.kernel, strides, dilations, begin, plain.source, plain.target)
