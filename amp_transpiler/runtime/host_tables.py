"""Tables in host memory beside a device: the rows of a batch go there before a step, and come back changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from amp_transpiler.errors import ArgumentError, FeedError
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.passes.lowering.place import CPUPlace
from amp_transpiler.passes.partition.host_rows import HostTable, host_tables, with_rows
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import several
from amp_transpiler.runtime.locks import Uninterrupted
from amp_transpiler.runtime.scope import Scope
from amp_transpiler.runtime.states import fetched_state

#: ``run(program, feed, fetches, scope, return_numpy)``
Run = Callable[[Program, Mapping[Any, Any], Sequence[str], Scope, bool], list[Any]]


@dataclass
class _Known:
    """What is known of one version of a program: its tables, and its copies by how many rows they have."""

    version: int
    tables: list[HostTable]
    #: The name of the variable that says whether a step was bad; None where nothing does.
    found_inf: str | None
    #: The forward pass, which computes ids that are not fed; made when it is first needed.
    forward: Program | None = None
    copies: dict[tuple[int, ...], Program] = field(default_factory=dict)
    #: The copies' state, by scope: that of the scope, but for the tables.
    scopes: WeakKeyDictionary[Scope, dict[tuple[int, ...], Scope]] = field(default_factory=WeakKeyDictionary)


class HostTables:
    """Runs programs whose tables of these names stay in host memory."""

    def __init__(self, names: Collection[str], on_host: Run) -> None:
        """``on_host``: runs a program on the host."""
        self.names = frozenset(names)
        self._on_host = on_host
        self._known: WeakKeyDictionary[Program, _Known] = WeakKeyDictionary()
        self._copies: WeakSet[Program] = WeakSet()

    def keep(self, program: Program) -> bool:
        """Whether a program is one for :meth:`run`: it looks up rows of these tables, or makes them.

        ArgumentError: it needs one whole, or is one of several ranks'.
        """
        return program not in self._copies and bool(self._of(program).tables or self._initialises(program))

    def _initialises(self, program: Program) -> bool:
        return any(v.name in self.names and v.persistable and v.producer is not None for v in program.variables)

    def _of(self, program: Program) -> _Known:
        known = self._known.get(program)
        if known is None or known.version != program.version:
            step = training_step(program) if program.updates else None
            verdict = None if step is None or step.found_inf is None else step.found_inf.name
            known = self._known[program] = _Known(program.version, host_tables(program, self.names), verdict)
        if known.tables and several() is not None:
            raise ArgumentError(
                "host_tables are for one rank; of several, amp.distributed.shard_tables deals the rows out"
            )
        return known

    def run(
        self, run: Run, program: Program, feed: Mapping[Any, Any], fetches: Sequence[str], scope: Scope, as_array: bool
    ) -> list[Any]:
        """``run``: runs a program on the device."""
        known = self._of(program)
        if not known.tables:
            return self._on_host(program, feed, fetches, scope, as_array)
        fed = {getattr(name, "name", name): value for name, value in feed.items()}
        with scope.writing(), Uninterrupted():
            local, rows = dict[str, np.ndarray](), dict[str, np.ndarray]()
            for table in known.tables:
                ids = self._ids(program, known, table, fed, scope)
                rows[table.name], places = _numbered(table, ids)
                local |= dict(zip(table.lookups.values(), places, strict=True))
            counts = {table.name: sum(local[name].size for name in table.lookups.values()) for table in known.tables}
            key = tuple(max(1, count) for count in counts.values())
            copy = known.copies.get(key)
            if copy is None:
                counts = dict(zip(counts, key, strict=True))
                copy = known.copies[key] = with_rows(program, known.tables, counts)
                self._copies.add(copy)
            inner = known.scopes.setdefault(scope, {}).setdefault(key, Scope())
            self._fetch(known.tables, rows, key, scope, inner)
            return self._stepped(run, copy, known, rows, fed | local, fetches, scope, inner, as_array)

    def _ids(
        self, program: Program, known: _Known, table: HostTable, fed: Mapping[str, Any], scope: Scope
    ) -> list[np.ndarray]:
        """The arrays of ids that its lookups name; what the program computes of feeds is computed on the host."""
        found = {name: _array(fed[name]) for name in table.lookups if name in fed}
        others = [name for name in table.lookups if name not in found]
        if others:
            forward = known.forward = known.forward or program.clone(for_test=True)
            targets = [forward.var(name) for name in others]
            read = {v.name for op in needed(forward, targets) for v in op.inputs if v is not None and v.is_input}
            feeds = {name: _array(value) for name, value in fed.items() if name in read}
            found |= dict(zip(others, self._on_host(forward, feeds, others, scope, True), strict=True))
        return [found[name] for name in table.lookups]

    def _fetch(
        self,
        tables: Sequence[HostTable],
        rows: Mapping[str, np.ndarray],
        counts: Sequence[int],
        scope: Scope,
        inner: Scope,
    ) -> None:
        """Let the inner scope hold the state of the scope, and of tables the rows that are named."""
        kept = {name for table in tables for name in table.states}
        inner.hold({name: value for name, value in scope.ort_values.items() if name not in kept})
        for table, count in zip(tables, counts, strict=True):
            for name in table.states:
                whole = _on_host(scope, name)
                part = np.zeros((count, *whole.shape[1:]), whole.dtype)
                np.take(whole, rows[table.name], axis=0, out=part[: rows[table.name].size])
                held = inner.ort_values.get(name)
                if held is None:
                    inner.hold({name: device_tensors.from_array(part)})
                else:
                    device_tensors.write(held, part)

    def _stepped(
        self,
        run: Run,
        copy: Program,
        known: _Known,
        rows: Mapping[str, np.ndarray],
        feed: Mapping[str, Any],
        fetches: Sequence[str],
        scope: Scope,
        inner: Scope,
        as_array: bool,
    ) -> list[Any]:
        """Run the step on the device, and write the changed rows back unless it was bad."""
        kept, found_inf = {name for table in known.tables for name in table.states}, known.found_inf
        asked = [name for name in fetches if name not in kept]
        also = [found_inf] if found_inf is not None and found_inf not in asked else []
        results = dict(zip([*asked, *also], run(copy, feed, [*asked, *also], inner, as_array), strict=True))
        scope.hold({name: value for name, value in inner.ort_values.items() if name not in kept})
        if found_inf is None or not _array(results[found_inf]).any():
            for table in known.tables:
                at = rows[table.name]
                for name in table.updated:
                    _on_host(scope, name)[at] = device_tensors.to_array(inner.ort_values[name])[: at.size]
        for name in kept.intersection(fetches):
            results[name] = fetched_state(copy.var(name), scope, CPUPlace(), as_array)
        return [results[name] for name in fetches]


def _numbered(table: HostTable, ids: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The rows that are named, ascending and each once, and the places of the ids among them."""
    flat = np.concatenate([array.reshape(-1) for array in ids]).astype(np.int64)
    outside = flat[(flat < -table.rows) | (flat >= table.rows)]
    if outside.size:
        raise FeedError(f"id {outside[0]} is out of range for table '{table.name}', which has {table.rows} rows")
    rows, places = np.unique(np.where(flat < 0, flat + table.rows, flat), return_inverse=True)
    ends = np.cumsum([array.size for array in ids])
    parts = np.split(places.reshape(-1).astype(np.int64), ends[:-1])
    return rows, [part.reshape(array.shape) for part, array in zip(parts, ids, strict=True)]


def _on_host(scope: Scope, name: str) -> np.ndarray:
    """The value of a variable where it lies on the host, to be read and written."""
    value = scope.ort_value(name) if scope.ort_value_on(CPUPlace(), name) is None else scope.ort_values[name]
    return device_tensors.shared_array(value).reshape(value.shape())


def _array(value: Any) -> np.ndarray:
    return device_tensors.to_array(value) if hasattr(value, "data_ptr") else np.asarray(value)
