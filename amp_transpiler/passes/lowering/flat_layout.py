"""Which parameters of a training step lie in one buffer on a place, with their masters and moments beside them.

And which running statistics: those of all layers, so that one update serves them.

Rows of an update whose parameters have one element type, and whose gradients take one way, are worked on together:
the update, the clip and the check before it see one tensor. On a GPU that makes a handful of kernels of thousands. On
CPU nothing is launched and a gradient is copied for it: there it pays for small parameters, where the step has many,
since a session takes more than its share of time to make for every node. A large parameter has a buffer of its own
there, which is worked on in chunks: what the operators of the update hand to each other stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from amp_transpiler.ir.flat import Rows, Segment
from amp_transpiler.ir.infer import Shapes, static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient_type, slots_of, traits_of
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import PlaceTraits, place_traits
from amp_transpiler.ops.training.clip import CLIPS, NORM
from amp_transpiler.ops.training.scaling import CHECK
from amp_transpiler.ops.training.update import BY_PARAMETER
from amp_transpiler.passes.lowering.lowered import Port
from amp_transpiler.passes.lowering.wanted import Cores

#: Elements of a parameter from which on copying its gradient into a buffer of several takes longer than the launches of
#: an update of its own: 2**24 of fp32 are 128 MiB to move.
_HUGE = 1 << 24
#: The share of a flat state from which on all of it is cast.
_NEARLY_ALL = 0.9
_CAST_GRADIENT = gradient_type("", "Cast")


@dataclass(frozen=True)
class FlatState:
    """State of one kind, of the parameters of a group: the variables, their new values, and where they lie."""

    name: str
    dtype: str
    rows: Rows
    states: tuple[Variable, ...]
    news: tuple[Variable, ...]

    @property
    def cast_whole(self) -> bool:
        """Whether the program casts all of these variables, or nearly all, to 16 bit."""
        sizes = [
            (math.prod(shape), _is_cast(state)) for shape, state in zip(self.rows.shapes, self.states, strict=True)
        ]
        return sum(size for size, cast in sizes if cast) > _NEARLY_ALL * sum(size for size, _ in sizes)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Where each variable lies."""
        return self.rows.segments([v.name for v in self.states])


def _is_cast(variable: Variable) -> bool:
    return any(
        op.full_type == "Cast" and (made := op.output(0)) is not None and made.dtype in HALF
        for op, _ in variable.readers
    )


@dataclass
class FlatLayout:
    """The flat states of a step, and the rows that its operators (by key) work on together."""

    states: list[FlatState] = field(default_factory=list)
    rows: dict[int, list[Rows]] = field(default_factory=dict)

    @property
    def variables(self) -> set[str]:
        """The names of the variables in flat states."""
        return {state.name for each in self.states for state in each.states}

    def unread(self, states: Sequence[Port], used: set[str]) -> set[str]:
        """Of state ports of their own, by variable, those that nothing reads but the update, in the flat state."""
        return {port.variable for port in states if port.tensor not in used} & self.variables


@dataclass(frozen=True)
class _Row:
    """A row of an update: its states with their new values by kind, and the rows through which its gradient comes.

    ``kept``: it is updated here, not by another rank. Its gradient is checked and clipped in either case, and in the
    same company: sums over several gradients then have the same bits on every rank, and on one alone.
    """

    number: int
    shape: tuple[int, ...]
    states: Mapping[str, tuple[Variable, Variable]]
    way: tuple[tuple[Operator, int], ...]
    kind: tuple[object, ...]
    kept: bool


def flat_layout(
    operators: Sequence[Operator],
    updates: Mapping[Variable, Variable],
    shapes: Shapes | None,
    place: str,
    left: Container[Variable],
    cores: Cores,
) -> FlatLayout:
    """What lies in flat buffers on ``place`` in a step of these operators, which gives these updates.

    ``left``: the variables of rows that are left to other ranks. ``cores``: of the machine that runs it.
    """
    layout = FlatLayout()
    at = place_traits(place)
    if not at.flat_fewest or shapes is None:
        return layout
    taken: dict[int, int] = {}
    for op in operators:
        slots = slots_of(op.type, op.domain)
        for v in op.inputs if slots is not None and slots.updates else ():
            if v is not None and v.persistable:
                taken[v.key] = taken.get(v.key, 0) + 1
    for op in operators:
        slots = slots_of(op.type, op.domain)
        if slots is None or not slots.updates or op.type in BY_PARAMETER or "rows" in slots.input_row:
            continue
        groups: dict[tuple[object, ...], list[_Row]] = {}
        rows_of = [
            row for row in _rows(op, updates, shapes, left) if all(taken[v.key] == 1 for v, _ in row.states.values())
        ]
        for row in rows_of:
            if _fits(row.shape, at):
                groups.setdefault(row.kind, []).append(row)
        # Gradients of the last group are made first; what the largest ones are made of takes the most until then.
        buffers = [rows for group in groups.values() for rows in _buffers(group, at)]
        for rows in sorted(buffers, key=lambda rows: sum(math.prod(row.shape) for row in rows)):
            _add(layout, op, rows)
        grouped = {row.number for rows in buffers for row in rows}
        for row in rows_of:
            if row.number not in grouped and (count := _chunks(row, *at.chunk(cores.cache, cores.threads))) > 1:
                _add(layout, op, [row], count)
    _add_statistics(layout, operators, updates, shapes, at)
    return layout


def _fits(shape: Sequence[int], at: PlaceTraits) -> bool:
    """Whether one of this shape is not too large for a buffer."""
    return not at.flat_largest or math.prod(shape) <= at.flat_largest


def _buffers(rows: Sequence[_Row], at: PlaceTraits) -> list[list[_Row]]:
    """The rows that lie in one buffer together; a row of huge size has one of its own."""
    if len(rows) < at.flat_fewest:
        return []
    huge = [row for row in rows if math.prod(row.shape) >= _HUGE]
    together = [row for row in rows if math.prod(row.shape) < _HUGE]
    return [*([together] if len(together) >= at.flat_fewest else []), *([row] for row in huge)]


def _add_statistics(
    layout: FlatLayout,
    operators: Sequence[Operator],
    updates: Mapping[Variable, Variable],
    shapes: Shapes,
    at: PlaceTraits,
) -> None:
    """The running statistics of all layers that have them: those of one slot in one flat state."""
    groups: dict[tuple[str, int, str | None], dict[Variable, tuple[int, ...]]] = {}
    for op in operators:
        for slot in traits_of(op).statistics:
            state = op.input(slot)
            if state is None or not state.persistable or state not in updates:
                continue
            shape = static(shapes[state][1])
            if shape is not None and 0 not in shape and _fits(shape, at):
                groups.setdefault((op.type, slot, state.dtype), {})[state] = shape
    for (type_, slot, dtype), found in groups.items():
        if len(found) >= at.flat_fewest:
            rows = Rows(tuple(range(len(found))), tuple(found.values()))
            news = tuple(updates[state] for state in found)
            layout.states.append(FlatState(f"@{type_}/{slot}", dtype or "", rows, tuple(found), news))


def _rows(op: Operator, updates: Mapping[Variable, Variable], shapes: Shapes, left: Container[Variable]) -> list[_Row]:
    slots = slots_of(op.type, op.domain)
    assert slots is not None
    found = []
    for number, row in enumerate(slots.rows(op.inputs)):
        first = len(slots.outputs) + number * len(slots.output_row)
        states = {
            kind: (state, new)
            for place, kind in enumerate(slots.output_row)
            if (state := row.get(kind)) is not None and (new := op.output(first + place)) is not None
        }
        gradient, parameter = row.get("gradient"), row.get("parameter")
        if gradient is None or parameter is None or "parameter" not in states:
            continue
        sizes = {static(shapes[v][1]) for v in (gradient, *(state for state, _ in states.values()))}
        shape = sizes.pop()
        if sizes or shape is None or not math.prod(shape):
            continue
        kept = not all(new in left for _, new in states.values())
        if any((kept and updates.get(state) is not new) or not state.persistable for state, new in states.values()):
            continue
        way, raw = _way(gradient)
        kind = (
            _before_cast(raw).dtype,
            raw.dtype,
            gradient.dtype,
            tuple((name, state.dtype) for name, (state, _) in states.items()),
            tuple(each.key for each, _ in way),
            op.attrs["with_decay"][number] if "with_decay" in op.attrs else None,
        )
        found.append(_Row(number, shape, states, way, kind, kept))
    return found


def _before_cast(gradient: Variable) -> Variable:
    """What a gradient was cast from: together with others that were cast from the same type it is cast once."""
    op = gradient.producer
    narrow = op.input(0) if op is not None and op.type == _CAST_GRADIENT else None
    return gradient if narrow is None else narrow


def _way(gradient: Variable) -> tuple[tuple[tuple[Operator, int], ...], Variable]:
    """The clips and the check through which a gradient came, the last first, each with the number of its row there.

    And the gradient as it was before.
    """
    way: list[tuple[Operator, int]] = []
    while (op := gradient.producer) is not None and op.type in (*CLIPS, CHECK):
        slots = slots_of(op.type, op.domain)
        number = -1 if slots is None else gradient.producer_slot - len(slots.outputs)
        source = None if slots is None or number < 0 else op.input(len(slots.inputs) + number)
        if source is None:
            break
        if op.type != NORM:  # a norm for each parameter
            way.append((op, number))
        gradient = source
    return tuple(way), gradient


def _chunks(row: _Row, start: int, wanted: int) -> int:
    """How many chunks a row that lies by itself is worked on in; 1: it is not.

    Numbers below a half and above twice the size wanted are no use: there a prime factor is too large.
    """
    size = math.prod(row.shape)
    held = [state.dtype for name, (state, _) in row.states.items() if name != "parameter" or "master" not in row.states]
    if not wanted or size < start or len(held) < 2 or any(dtype != "float32" for dtype in held):
        return 1
    counts = range(max(2, size // (2 * wanted)), 2 * size // wanted + 1)
    return min((n for n in counts if size % n == 0), key=lambda n: abs(size // n - wanted), default=1)


def _add(layout: FlatLayout, op: Operator, rows: list[_Row], chunks: int = 1) -> None:
    number = sum(map(len, layout.rows.values()))
    shapes = tuple(row.shape for row in rows)
    for step, (earlier, _) in enumerate(rows[0].way):
        layout.rows.setdefault(earlier.key, []).append(Rows(tuple(row.way[step][1] for row in rows), shapes, chunks))
    rows = [row for row in rows if row.kept]
    if not rows:
        return
    shapes = tuple(row.shape for row in rows)
    layout.rows.setdefault(op.key, []).append(Rows(tuple(row.number for row in rows), shapes, chunks))
    for kind in rows[0].states:
        states, news = zip(*(row.states[kind] for row in rows), strict=True)
        name = f"@{op.type}/{number}/{kind}"
        layout.states.append(
            FlatState(name, states[0].dtype or "", Rows(tuple(range(len(rows))), shapes, chunks), states, news)
        )
