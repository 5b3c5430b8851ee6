"""Segments for recompute that meet a byte budget, found by forecasting the lowered forward and backward pass.

The forward operators are cut, in their order, into parts of about equal activation bytes; near an even cut, the one
that the fewest bytes cross is taken. More parts keep less between them and recompute less at a time, but keep more
cuts: the number of parts with the least peak is found by doubling. Of these parts the first ones, whose activations
wait longest, are recomputed: as few as the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Shapes
from amp_transpiler.ir.nodes import FORWARD, OWN, Operator, Variable
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.ir.types import BYTES
from amp_transpiler.ops.training.scaling import CHECK
from amp_transpiler.passes.autodiff.recompute import Segment
from amp_transpiler.passes.lowering.liveness import plan
from amp_transpiler.passes.lowering.lowering import lower

_MOST_PARTS = 64
_MIB = 2**20


class _Undo(Exception):
    """Ends a trial: what it did to the program is taken back."""


def working_peak(
    program: Graph, loss: Variable, gradients: Sequence[Variable], shapes: Mapping[str, tuple[int, ...]], place: str
) -> int:
    """The bytes that tensors take at their peak while loss and gradients are computed at ``place`` ("cpu", "cuda").

    State and feeds are not counted. A finite check is appended, which, like an optimizer's, decides in which order the
    gradients are computed.
    """
    gradients = sorted(gradients, key=lambda g: -1 if g.producer is None else g.producer.key, reverse=True)
    scale = program.add_constant("scale", np.ones(1, np.float32))
    found_inf = program.fresh_variable("found_inf", "bool", (1,))
    program.add_operator(CHECK, [scale, *gradients], [found_inf], domain=OWN)
    lowered = lower(program, place, dict(shapes), [loss, found_inf, *gradients])
    return max(plan(lowered.sized or lowered).totals(), default=0)


def within_budget(
    loss: Variable,
    gradients: Sequence[Variable],
    budget: int,
    shapes: Mapping[str, tuple[int, ...]],
    place: str,
    insert: Callable[[Sequence[Segment]], object],
) -> list[Segment]:
    """The segments to recompute so that loss and gradients are computed within ``budget`` bytes.

    ``insert`` does the recomputing; the program is unchanged when this returns. ArgumentError where no choice fits,
    with the least peak that was found.
    """
    program = loss.program

    def peak(segments: Sequence[Segment]) -> int:
        found = 0
        try:
            with unchanged_on_error(program):
                insert(segments)
                found = working_peak(program, loss, gradients, shapes, place)
                raise _Undo
        except _Undo:
            return found

    without = peak([])
    if without <= budget:
        return []
    least, parts = _least(program, shapes, peak)
    if least > budget:
        raise ArgumentError(
            f"recompute: program '{program.name}' cannot compute its gradients within memory_budget={budget} "
            f"({budget / _MIB:.2f} MiB): the least that was found is {min(least, without)} "
            f"({min(least, without) / _MIB:.2f} MiB), and {without / _MIB:.2f} MiB without recompute. Give it that, or "
            "feed smaller batches"
        )
    return parts[: _fewest(len(parts), lambda count: peak(parts[:count]) <= budget)]


def _least(
    program: Graph, shapes: Mapping[str, tuple[int, ...]], peak: Callable[[Sequence[Segment]], int]
) -> tuple[int, list[Segment]]:
    """The least peak over numbers of parts, and the parts but for the last, which is needed at once."""
    forward = [op for op in program.operators if op.role == FORWARD]
    made, crossing = _sizes(program, forward, shapes)
    best: tuple[int, list[Segment]] | None = None
    count = 2
    while count <= min(_MOST_PARTS, len(forward)):
        parts = _cut(forward, made, crossing, count)[:-1]
        found = peak(parts)
        if best is not None and found >= best[0]:
            break
        best, count = (found, parts), 2 * count
    return best or (peak([]), [])


def _fewest(most: int, fits: Callable[[int], bool]) -> int:
    """The smallest number for which ``fits`` holds, as ``most`` does, by bisection."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _sizes(
    program: Graph, forward: Sequence[Operator], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[int], list[int]]:
    """For each operator the bytes that it makes, and those that later ones still read when it is done."""
    types = Shapes(program, dict(shapes))
    last = {v.key: i for i, op in enumerate(forward) for v in (*op.inputs, *op.captures) if v is not None}
    made: list[int] = []
    change = [0] * (len(forward) + 1)
    for i, op in enumerate(forward):
        size = 0
        for v in op.outputs:
            if v is not None:
                size += _bytes(*types[v])
                change[i] += _bytes(*types[v])
                change[max(i, last.get(v.key, i))] -= _bytes(*types[v])
        made.append(size)
    crossing, live = [], 0
    for step in change[:-1]:
        live += step
        crossing.append(live)
    return made, crossing


def _bytes(dtype: str | None, shape: Sequence[int | str | None] | None) -> int:
    known = [d for d in shape or () if isinstance(d, int)]
    return math.prod(known) * BYTES.get(dtype or "", 1) if shape is not None and len(known) == len(shape) else 0


def _cut(forward: Sequence[Operator], made: Sequence[int], crossing: Sequence[int], count: int) -> list[Segment]:
    """``count`` parts (fewer where cuts coincide) of about equal bytes, cut where little crosses."""
    total, sums = sum(made), []
    so_far = 0
    for size in made:
        so_far += size
        sums.append(so_far)
    cuts = [0]
    for number in range(1, count):
        low, high = (number - 0.4) * total / count, (number + 0.4) * total / count
        near = [i for i, at in enumerate(sums) if low <= at <= high and i + 1 > cuts[-1]]
        if near:
            cuts.append(min(near, key=lambda i: (crossing[i], abs(sums[i] - number * total / count))) + 1)
    cuts.append(len(forward))
    return [
        Segment(f"part {n + 1} of {len(cuts) - 1}", list(forward[start:end]))
        for n, (start, end) in enumerate(pairwise(cuts))
        if end > start
    ]
