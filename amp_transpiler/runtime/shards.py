"""State that is dealt out among the ranks: what this rank updates, and how all get what the others have updated.

A parameter lies on every rank. Its master weight and accumulators lie on the one that updates it, which sends the new
parameter to the others behind the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import element_type, numpy_dtype
from amp_transpiler.passes.lowering.own_rows import own_updates
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import holds, several
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.journal import Journal
from amp_transpiler.runtime.dealt import clear_spare, collected, deal_out, dealt_variables, whole_rows
from amp_transpiler.runtime.scope import Scope

#: Bytes of parameters that travel at once.
_ROOM = 1 << 24


def owned_state(program: Program) -> list[Variable]:
    """The state of a program that one rank each holds."""
    return [v for v in program.variables if v.owner is not None and v.persistable and not v.is_parameter]


def open_sums(program: Program, scope: Scope) -> list[Variable]:
    """The sums of gradients of a window of accumulation that is open, of which each rank has its own: their mean over
    the ranks is what counts. None on a single rank, and between windows, where all are zeros."""
    window = program.accumulation
    if window is None or several() is None or not scope.has_var(window.counter.name):
        return []
    return list(training_step(program).sums) if scope.find_var(window.counter.name).item() else []


def elsewhere(program: Program) -> dict[str, int]:
    """The state of a program that other ranks hold: their numbers, by name."""
    engine = several()
    if engine is None:
        return {}
    owners = {v.name: v.owner % engine.size for v in owned_state(program) if v.owner is not None}
    return {name: owner for name, owner in owners.items() if owner != engine.rank}


def settle(program: Program, values: Mapping[str, Any], scope: Scope, held: bool) -> None:
    """Let a scope hold what a startup program has made, as far as it lies on this rank; master weights that it has not
    made, as the file of a model, follow their parameters.

    ``held``: of what is dealt out, it has made what this rank keeps.
    """
    if held:
        clear_spare(program, values)
    scope.hold({**values, **({} if held else deal_out(program, values))})
    scope.leave(elsewhere(program))
    scope.deal(whole_rows(program), values)
    for name in values:
        if scope.has_var(name) and not values.keys() >= set(filter(scope.has_var, scope.masters(name))):
            scope.set_var(name, scope.ort_value(name))


def run_updates(program: Program, spread: bool) -> tuple[bool | Mapping[Variable, Variable], list[Variable]]:
    """What a run writes here, and new values that other ranks take; ``spread``: it does not end a window."""
    if spread and program.accumulation is not None:
        return program.accumulation.updates, []
    return own_updates(program, holds)


def found_var(name: str, scope: Scope) -> np.ndarray:
    """A copy of a variable's value, on whatever rank it lies: where on several, that of the first of them.

    All ranks call it. ScopeError: no rank has it.
    """
    engine = several()
    value = scope.find_var(name) if engine is None or scope.has_var(name) else None
    if engine is None:
        assert value is not None
        return value
    if name in scope.dealt and value is not None:
        return collected(engine, value, scope.dealt[name])
    of_all = engine.all_gather_object(None if value is None else [element_type(value.dtype), list(value.shape)])
    root = next((rank for rank, said in enumerate(of_all) if said is not None), None)
    if root is None:
        return scope.find_var(name)  # raises
    dtype, shape = of_all[root]
    found = value if value is not None and engine.rank == root else np.empty(shape, numpy_dtype(dtype))
    engine.broadcast(found, root)
    return found


class Sent:
    """Parameters that a run of a program updates on one rank each, and that all ranks get."""

    def __init__(self, program: Program, spread: bool) -> None:
        states = () if spread else program.updates
        self.owners = {v.name: v.owner for v in states if v.owner is not None and v.is_parameter}

    def exchange(self, engine: Engine, scope: Scope, journal: Journal) -> None:
        """Write those of the other ranks into their values in the scope."""
        if not self.owners:
            return
        streams: list[list[Any]] = [[] for _ in range(engine.size)]
        for name, owner in self.owners.items():
            streams[owner % engine.size].append(scope.ort_values[name])
        size = sum(value.tensor_size_in_bytes() for values in streams for value in values)
        call = partial(journal.exchange, engine, "parameters", size, partial(_exchange, engine, streams))
        with journal.timed(journal.waits, "wait for parameters"):
            engine.submit(call).wait()


def _exchange(engine: Engine, streams: Sequence[Sequence[Any]]) -> None:
    """Fill the values of each rank with what they hold there."""
    if engine.stream:  # they lie on its device
        engine.broadcast_each(streams)
        return
    _gather(engine, [[device_tensors.shared_array(each).view(np.uint8) for each in values] for values in streams])


def _gather(engine: Engine, streams: Sequence[Sequence[np.ndarray]]) -> None:
    """Fill the arrays of each rank with what they hold there, as much at a time as there is room for."""
    totals = [sum(array.size for array in arrays) for arrays in streams]
    share = max(1, _ROOM // engine.size)
    room = np.empty(sum(min(share, total) for total in totals), np.uint8)
    for start in range(0, max(totals), share):
        sizes = [max(0, min(share, total - start)) for total in totals]
        ends = [*accumulate(sizes, initial=0)]
        parts = [room[begin:end] for begin, end in pairwise(ends)]
        for held, piece in _pieces(streams[engine.rank], start, parts[engine.rank]):
            piece[:] = held
        engine.all_gather(parts[engine.rank], sizes, room[: ends[-1]])
        for rank, part in enumerate(parts):
            for held, piece in _pieces(streams[rank], start, part) if rank != engine.rank else ():
                held[:] = piece


def _pieces(arrays: Sequence[np.ndarray], start: int, part: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces of arrays that lie one behind the other, from ``start`` on, and the pieces of ``part`` that stand for
    them."""
    begin = 0
    for array in arrays:
        first, last = max(start, begin), min(start + part.size, begin + array.size)
        if first < last:
            yield array[first - begin : last - begin], part[first - start : last - start]
        begin += array.size


class Pieces:
    """The bytes of state that other ranks hold, on its way to rank 0: one variable at a time, in an order of all ranks.

    Of the sums of an open window it is their mean. Rank 0 iterates, the others send, and all :meth:`finish`.
    """

    def __init__(self, program: Program, scope: Scope) -> None:
        self._engine, self._scope = several(), scope
        self._sums = open_sums(program, scope)
        kept = [*owned_state(program), *dealt_variables(program)] if self._engine is not None else []
        self._left = iter([*kept, *self._sums])

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, content) for name, content in self._exchanged() if content is not None)

    def finish(self) -> None:
        """Let what is left come to rank 0, for nothing there."""
        for _ in self._exchanged():
            pass

    def _exchanged(self) -> Iterator[tuple[str, np.ndarray | None]]:
        """Variables, with what came here of each."""
        for variable in self._left:
            engine, owner = self._engine, variable.owner
            assert engine is not None
            if variable in self._sums:
                mean = engine.all_reduce(self._scope.find_var(variable.name), "mean")
                yield variable.name, None if engine.rank else mean.reshape(-1).view(np.uint8)
                continue
            if variable.dealt is not None:
                held = device_tensors.to_array(self._scope.ort_value(variable.name))
                whole = collected(engine, held, self._scope.dealt[variable.name], root=0)
                yield variable.name, None if engine.rank else whole.reshape(-1).view(np.uint8)
                continue
            assert owner is not None
            if owner % engine.size == 0:
                continue
            parts, value = [np.empty(0, np.uint8)] * engine.size, None
            if owner % engine.size == engine.rank:
                value = device_tensors.on_host(self._scope.ort_value(variable.name))
                parts[0] = device_tensors.shared_array(value).view(np.uint8)
            come = engine.all_to_all(parts)[owner % engine.size]
            yield variable.name, None if engine.rank else come
