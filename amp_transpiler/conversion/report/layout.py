"""Where the operators of a program stand in its picture: in layers, from the inputs down.

An operator's layer is the length of the longest path to it; what constants alone feed moves down to just above its
first reader. Within a layer, operators stand near the mean of their neighbours: a few sweeps down and up, each
of which places a layer by least squares under the constraint that neighbours are a column apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from amp_transpiler.conversion.report.record import ProgramRecord

#: Sweeps in turn down and up; more change little.
_SWEEPS = 6


@dataclass(frozen=True)
class Layout:
    """``layer`` (0 at the top) and ``column`` (0 at the left, neighbours at least 1 apart) of every operator."""

    layer: list[int]
    column: list[float]


def layout(program: ProgramRecord) -> Layout:
    """The places of the operators; time grows as the number of operators and slots, times its logarithm."""
    before = _predecessors(program)
    after: list[list[int]] = [[] for _ in before]
    for i, near in enumerate(before):
        for j in near:
            after[j].append(i)
    layer = _layers(program, before, after)
    return Layout(layer, _columns(layer, before, after))


def _predecessors(program: ProgramRecord) -> list[list[int]]:
    """The operators that make what each one reads, and the one whose nested graph holds it, each once."""
    found = []
    for op in program.operators:
        makers = (program.tensors[t].producer for t in op.reads)
        near = dict.fromkeys(m for m in (*makers, op.holder) if m is not None and m < op.index)
        found.append(list(near))
    return found


def _layers(program: ProgramRecord, before: list[list[int]], after: list[list[int]]) -> list[int]:
    layer: list[int] = []
    floating: list[bool] = []
    for op, near in zip(program.operators, before, strict=True):
        layer.append(1 + max((layer[j] for j in near), default=-1))
        tensors = [program.tensors[t] for t in op.reads]
        fed = any(t.producer is None and not t.constant for t in tensors)
        floating.append(not fed and all(floating[j] for j in near if j != op.holder))
    for i in reversed(range(len(layer))):
        if floating[i] and after[i]:
            layer[i] = min(layer[j] for j in after[i]) - 1
    return layer


def _columns(layer: list[int], before: list[list[int]], after: list[list[int]]) -> list[float]:
    rows: list[list[int]] = [[] for _ in range(max(layer, default=-1) + 1)]
    for i, number in enumerate(layer):
        rows[number].append(i)
    column = [0.0] * len(layer)
    for row in rows:
        for k, i in enumerate(row):
            column[i] = k - (len(row) - 1) / 2
    for sweep in range(_SWEEPS):
        near = after if sweep % 2 else before
        for row in reversed(rows) if sweep % 2 else rows:
            wanted = {i: sum(column[j] for j in near[i]) / len(near[i]) if near[i] else column[i] for i in row}
            row.sort(key=wanted.__getitem__)
            for i, place in zip(row, spread([wanted[i] for i in row]), strict=True):
                column[i] = place
    left = min(column, default=0.0)
    return [place - left for place in column]


def spread(wanted: list[float]) -> list[float]:
    """The places nearest in least squares to ``wanted`` (ascending) that are at least 1 apart.

    Pool adjacent violators: with k taken from the k-th place, "1 apart" becomes "not descending".
    """
    pools: list[tuple[float, int]] = []  # mean, count
    for k, place in enumerate(wanted):
        mean, count = place - k, 1
        while pools and pools[-1][0] > mean:
            other, many = pools.pop()
            mean, count = (mean * count + other * many) / (count + many), count + many
        pools.append((mean, count))
    flat = [mean for mean, count in pools for _ in range(count)]
    return [mean + k for k, mean in enumerate(flat)]
