"""One update operator as nodes: scalars once for the group, then a step of every row, of several rows together, of some
rows of a table, or of those of one branch. What a step computes, the formulas of ``update.py`` say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.flat import Rows
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ops.training.branches import chosen
from amp_transpiler.ops.training.chunks import by_chunks
from amp_transpiler.ops.training.dealt_gradients import joined_gradients
from amp_transpiler.ops.training.few_rows import by_chunks_with_rows, few_rows
from amp_transpiler.ops.training.rows import joined, parts, rows_of
from amp_transpiler.ops.training.scaling import Gate, Switch, finite_step, gate, scaled, unscaled
from amp_transpiler.ops.training.sparse import picked, repeated, written

#: Parameters whose updates stand in one branch: the time to make a session is not linear in the nodes of one graph.
_IN_A_BRANCH = 64

#: ``step(index, master, gradient, *accumulators) -> (new master, *new accumulators)``, which a bad step leaves as they
#: were: a ``Switch`` sees to that. Rows of one buffer take a step together, and ``index`` is the first of them.
Step = Callable[..., tuple[Value, ...]]
#: ``prepare(e, op, switch, learning_rate, *scalars) -> (new scalars, step)``
Prepare = Callable[..., tuple[list[Value], Step]]


def emit_update(
    e: Emitter,
    op: Operator,
    slots: Slots,
    accumulators: Sequence[str],
    prepare: Prepare,
    found_inf: Value | None,
    inputs: Sequence[Value | None],
) -> list[Value | None]:
    """The outputs of an update operator: the new shared scalars, then rows; None for what another rank updates."""
    head, values = inputs[: len(slots.inputs) - 1], [None, *inputs]
    rate, *shared = [e.reshape(v, ()) for v in head if v is not None]
    if "lr_factor" in op.attrs:
        rate = e.Mul(rate, e.like(op.attrs["lr_factor"], rate))
    kept, switch = gate(e, found_inf), Switch(e, found_inf)
    advanced, step = prepare(e, op, switch, rate, *shared)
    scalars: list[Value | None] = [
        e.reshape(kept(new, old), was.shape or ())
        for new, old, was in zip(advanced, shared, head[1:], strict=True)
        if was is not None
    ]
    table = list(slots.rows(values))
    update = _Update(e, slots, accumulators, found_inf, table, kept, switch, step)
    update.take_all(rows_of(e, op, len(table)))
    return scalars + [update.made.get((number, name)) for number in range(len(table)) for name in slots.output_row]


@dataclass
class _Update:
    """``table``: the inputs of every row, by name. ``made``: its new values, by the row's number and name."""

    e: Emitter
    slots: Slots
    accumulators: Sequence[str]
    found_inf: Value | None
    table: list[dict[str, Value | None]]
    kept: Gate
    switch: Switch
    step: Step
    made: dict[tuple[int, str], Value] = field(default_factory=dict)

    def take_all(self, every: Sequence[Rows]) -> None:
        """Take the steps, those of rows that lie alone in branches where there may be some."""
        alone: list[Rows] = []
        for rows in every:
            first = len(self.slots.outputs) + rows.numbers[0] * len(self.slots.output_row)
            if not any(self.e.wanted[first : first + len(self.slots.output_row)] or [True]):
                continue  # another rank updates it
            if "rows" in self.slots.input_row:
                self._take([rows], self._some_rows(rows.numbers[0]))
            elif self.found_inf is None or not self.e.at.branches or (rows.shapes and rows.chunks == 1):
                self._take([rows], self._stepped(rows))
            else:
                alone.append(rows)
        for start in range(0, len(alone), _IN_A_BRANCH):
            each = alone[start : start + _IN_A_BRANCH]
            self._take(each, self._branched(each))

    def _take(self, each: Sequence[Rows], values: Sequence[Value]) -> None:
        whole = iter(values)
        for rows in each:
            for name in self.slots.output_row:
                if self.table[rows.numbers[0]][name] is not None:
                    keys = [(number, name) for number in rows.numbers]
                    self.made.update(zip(keys, parts(self.e, rows, next(whole)), strict=True))

    def _joint(self, rows: Rows, names: Sequence[str]) -> dict[str, Value]:
        """By name the values of rows that take a step together."""
        given = {name: [v for number in rows.numbers if (v := self.table[number][name]) is not None] for name in names}
        return {
            name: (joined_gradients if name == "gradient" else joined)(self.e, rows, values)
            for name, values in given.items()
            if values
        }

    def _stepped(self, rows: Rows) -> list[Value]:
        """Their new values, in the order of the row."""
        return self._moved(rows.numbers[0], self._joint(rows, self.slots.input_row), rows.chunks)

    def _some_rows(self, number: int) -> list[Value]:
        """The new values of a parameter of which some rows take a step."""
        given = self.table[number]
        at, gradient = given["rows"], given["gradient"]
        assert at is not None and gradient is not None
        whole = {name: value for name in self.slots.output_row if (value := given[name]) is not None}
        row = {name: picked(self.e, value, at) for name, value in whole.items()}
        news = self._moved(number, row | {"gradient": repeated(self.e, at, gradient)})
        return [written(self.e, old, at, new) for old, new in zip(whole.values(), news, strict=True)]

    def _branched(self, each: Sequence[Rows]) -> list[Value]:
        """The new values of rows that lie alone, in the branch of an If."""
        assert self.found_inf is not None
        olds = [old for rows in each for old in self._joint(rows, self.slots.output_row).values()]

        def new() -> list[Value]:
            with self.switch.off():
                return [value for rows in each for value in self._stepped(rows)]

        return chosen(self.e, finite_step(self.e, self.found_inf), new, olds)

    def _moved(self, number: int, row: dict[str, Value], chunks: int = 1) -> list[Value]:
        """The new values of one parameter, or of several in one tensor, in the order of the row."""
        e, parameter, master = self.e, row["parameter"], row.get("master")
        old = master or e.f32(parameter)
        gradient = Gradient(e, e.cast(row["gradient"], old.dtype), self.switch)

        def new(gradient: Gradient, old: Value, *before: Value) -> list[Value]:
            new, *after = self.step(number, old, gradient, *before)
            taken = dict(zip(self.accumulators, after, strict=True)) | {"master": new}
            taken["parameter"] = e.cast(new, parameter.dtype)
            if master and self.switch.bad is not None:
                taken["parameter"] = _narrowed(e, new, parameter, self.kept)
            return [taken[name] for name in self.slots.output_row if name in row]

        before = [row[name] for name in self.accumulators if name in row]
        if chunks == 1:
            return new(gradient, old, *before)

        def chunk(raw: Value, *values: Value) -> list[Value]:
            return new(gradient.chunk(raw), *values)

        few = few_rows(e, self.table[number]["gradient"], chunks)
        if few is not None:
            return by_chunks_with_rows(e, few, [old, *before], chunk)
        return by_chunks(e, [e.cast(gradient.raw, old.dtype), old, *before], chunk)


class Gradient:
    """The gradient of a step: ``value``, or ``tensor`` times a ``share``, where a bad step leaves nothing of it."""

    def __init__(self, e: Emitter, value: Value, switch: Switch) -> None:
        self.e, self.value, self.switch = e, value, switch
        self.raw, self.inverse = scaled(e, value)

    def chunk(self, raw: Value) -> Gradient:
        """That of a chunk, of which it is ``raw`` what it is of the whole."""
        return Gradient(self.e, raw if self.inverse is None else unscaled(self.e, raw, self.inverse), self.switch)

    def changed(self, value: Value) -> Gradient:
        """Another one in its place."""
        return self if value is self.value else Gradient(self.e, value, self.switch)

    @cached_property
    def tensor(self) -> Value:
        """It, perhaps not unscaled, and zeros on a bad step."""
        return self.e.cast(self.switch.added(self.raw), self.value.dtype)

    def share(self, factor: Value, power: int = 1) -> Value:
        """The factor of ``tensor``, or of its power, that stands for this factor of the gradient."""
        for _ in range(power if self.inverse is not None else 0):
            factor = self.e.Mul(factor, self.inverse, shape=())
        return self.switch.share(factor)


def _narrowed(e: Emitter, new: Value, parameter: Value, kept: Gate) -> Value:
    """A parameter that takes its new master weight. It may not have been the rounded old one, so it has a gate."""
    if e.emulates:
        return e.cast(kept(new, e.f32(parameter)), parameter.dtype)
    return kept(e.cast(new, parameter.dtype), parameter)
