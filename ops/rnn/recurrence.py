"""A step function run over a known number of time steps.

Two forms that give equal bits. Unrolled, every step's operators stand in the graph: a CUDA graph can capture
that, at the price of nodes. As one ``Scan``, the step stands there once: on CPU the time to create a session grows
faster than the number of nodes, and from a few steps on Scan is no slower in the run either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ops.common import size_of, sliced

#: ``step(states, slices) -> (new states, outputs)``; slices and outputs belong to one time step.
Step = Callable[[Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]]
#: On CPU up to so many steps are unrolled.
FEW = 4
#: More steps than this are not unrolled: each is some ten nodes.
LIMIT = 2048
#: Split and Concat of more tensors than this, or of tensors of different sizes, copy a table from host memory that is
#: gone when a CUDA graph is replayed.
_AT_ONCE = 32


def recur(
    e: Emitter, op: Operator, step: Step, states: Sequence[Value], sequences: Sequence[Value], reverse: bool = False
) -> tuple[list[Value], list[Value]]:
    """The states after the last step, and each output of ``step`` stacked over time.

    ``sequences``: tensors [T, ...] of one T; step t gets their slices [...] and writes row t of each stacked output
    [T, ...]. ``reverse``: from the last time step to the first. All shapes are known. GraphError where ``op`` would
    have to be unrolled over more than ``LIMIT`` steps.
    """
    steps = size_of(sequences[0])[0]
    if e.at.host and steps > FEW:
        return _scanned(e, step, states, sequences, reverse)
    if steps > LIMIT and e.at.device:
        raise GraphError(
            f"'{op.label}' ({op.full_type}) runs over {steps} time steps; for a GPU at most {LIMIT} are unrolled. Cut "
            "the sequences into shorter ones, or run on CPU"
        )
    return _unrolled(e, step, states, sequences, reverse)


def _unrolled(
    e: Emitter, step: Step, states: Sequence[Value], sequences: Sequence[Value], reverse: bool
) -> tuple[list[Value], list[Value]]:
    slices = list(zip(*(_rows(e, s) for s in sequences), strict=True))
    rows: list[Sequence[Value]] = []
    for each in reversed(slices) if reverse else slices:
        states, outputs = step(states, each)
        rows.append(outputs)
    if reverse:
        rows.reverse()
    return list(states), [_stacked(e, column) for column in zip(*rows, strict=True)]


def _rows(e: Emitter, sequence: Value) -> list[Value]:
    return [e.reshape(row, size_of(row)[1:]) for row in _pieces(e, sequence)]


def _pieces(e: Emitter, value: Value) -> list[Value]:
    """Slices [1, ...] of the first dimension."""
    count, *rest = size_of(value)
    if count == 1:
        return [value]
    if count > _AT_ONCE:
        starts = range(0, count, _AT_ONCE)
        blocks = [(start, min(start + _AT_ONCE, count)) for start in starts]
        return [row for start, end in blocks for row in _pieces(e, sliced(e, value, 0, start, end))]
    return list(e.Split(value, e.ints(*[1] * count), axis=0, outputs=count, shape=(1, *rest)))


def _stacked(e: Emitter, rows: Sequence[Value]) -> Value:
    parts = [e.reshape(row, (1, *size_of(row))) for row in rows]
    while len(parts) > 1:
        groups = -(-len(parts) // _AT_ONCE)
        size = -(-len(parts) // groups)
        parts += parts[-1:] * (groups * size - len(parts))  # so that all groups have one size
        parts = [concat(e, parts[i : i + size], 0) for i in range(0, len(parts), size)]
    return sliced(e, parts[0], 0, 0, len(rows))


def concat(e: Emitter, parts: Sequence[Value], axis: int) -> Value:
    """The parts behind each other along ``axis``."""
    if len(parts) == 1:
        return parts[0]
    shape = list(size_of(parts[0]))
    shape[axis] = sum(size_of(part)[axis] for part in parts)
    return e.Concat(*parts, axis=axis, shape=shape)


def _scanned(
    e: Emitter, step: Step, states: Sequence[Value], sequences: Sequence[Value], reverse: bool
) -> tuple[list[Value], list[Value]]:
    count = len(states)

    def write(*values: Value) -> list[Value]:
        new, outputs = step(values[:count], values[count:])
        return [*new, *outputs]

    slices = [Value(s.name, s.dtype, size_of(s)[1:]) for s in sequences]
    graph, results = e.graph("step", [*states, *slices], write)
    outputs = len(results) - count
    found = e.Scan(
        *states,
        *sequences,
        outputs=len(results),
        dtype="float32",
        body=graph,
        num_scan_inputs=len(sequences),
        scan_input_directions=[int(reverse)] * len(sequences),
        scan_output_directions=[int(reverse)] * outputs,
    )
    steps = size_of(sequences[0])[0]
    typed = [
        Value(v.name, r.dtype, size_of(r) if i < count else (steps, *size_of(r)))
        for i, (v, r) in enumerate(zip(found, results, strict=True))
    ]
    return typed[:count], typed[count:]
