"""A program for a device whose large tables stay on the host: in their place it has the rows of one batch.

The copy has, for each lookup, an input that says where among these rows those of its ids are; a table, its master
weight and its accumulators have as many rows as a batch names ids. What an update does with rows it does with these.
A lookup that is recomputed reads that input late, as it read its ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.clone import clone
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import BACKWARD, OWN, Operator, Variable
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.ops.training.recompute_barrier import INPUT
from amp_transpiler.ops.training.sparse import GATHER
from amp_transpiler.passes.view.lookups import is_row_lookup

_Graph = TypeVar("_Graph", bound=Graph)
_Pair = tuple[Variable | None, Variable | None]


@dataclass(frozen=True)
class HostTable:
    """A table that stays on the host, by names: ``states`` are what has its rows, itself too, and ``updated`` those
    of them that a step writes; ``lookups`` has for each variable of ids the input of the copy that stands for it."""

    name: str
    rows: int
    states: tuple[str, ...]
    updated: tuple[str, ...]
    lookups: dict[str, str]


def host_tables(program: Graph, names: Collection[str]) -> list[HostTable]:
    """Those of the tables that a program has. ArgumentError: something reads or writes more than rows of one."""
    found = []
    for table in program.variables:
        if table.name in names and table.persistable and table.producer is None:
            found.append(_host_table(program, table))
    return found


def _host_table(program: Graph, table: Variable) -> HostTable:
    looked_up, states, updates = list[Variable](), {table.name: table}, list[Operator]()
    for op, slot in table.readers:
        if is_row_lookup(op, slot):
            indices = op.input(1)
            assert indices is not None
            looked_up.append(indices)
            continue
        row = _sparse_row(op, table)
        if row is None:
            raise ArgumentError(
                f"host_tables: all of table '{table.name}' is read or written by '{op.label}' ({op.type}), and rows of "
                "it alone come to the device. Mark it sparse (is_sparse=True), and let its optimizer change no other "
                "rows: SGD or Adagrad without weight_decay, or lazy_mode=True"
            )
        updates.append(op)
        states |= {v.name: v for v in row}
    for state in states.values():
        beside = [op for op, _ in (*_others(state, table), *_others(program.updates.get(state), table))]
        whole = next((op for op in beside if op not in updates), None)
        if whole is not None:
            raise ArgumentError(
                f"host_tables: all of table '{table.name}' is read by '{whole.label}' ({whole.type}), and rows of it "
                "alone come to the device. Leave the table out of host_tables, or that out of the program"
            )
    first = [v for v in looked_up if not any(_again(other, v) for other in looked_up if other is not v)]
    ids = {v.name: f"{v.name}@IN@{table.name}" for v in first}
    shape = table.shape
    if not shape or not isinstance(shape[0], int) or not ids:
        raise ArgumentError(f"host_tables: no rows of '{table.name}' are looked up in program '{program.name}'")
    updated = tuple(name for name, state in states.items() if state in program.updates)
    return HostTable(table.name, shape[0], tuple(states), updated, ids)


def _others(state: Variable | None, table: Variable) -> list[tuple[Operator, int | str]]:
    """What reads a state, or its new value, but for lookups of rows of the table."""
    readers = () if state is None else state.readers
    return [(op, slot) for op, slot in readers if state is not table or not is_row_lookup(op, slot)]


def _again(first: Variable, late: Variable) -> bool:
    """Whether ``late`` is what a recomputed part of the forward pass has in the place of ``first``."""
    pairs: list[_Pair] = [(first, late)]
    for one, other in pairs:  # those of their inputs come behind; each once
        if one is other:
            continue
        op, copy = (None if v is None else v.producer for v in (one, other))
        if one is None or other is None or copy is None or copy.role != BACKWARD:
            return False
        new: Iterable[_Pair]
        if _is_late(copy):
            new = [(one, copy.input(1))]
        elif op is None or _makes(op, one) != _makes(copy, other):
            return False
        else:
            new = zip(op.inputs, copy.inputs, strict=True)
        pairs += [pair for pair in new if pair not in pairs]
    return True


def _makes(op: Operator, result: Variable) -> tuple[object, ...]:
    """What an operator computes of its inputs, so far as that tells it from others, and which result that is."""
    return op.type, op.domain, result.producer_slot, len(op.inputs), str(dict(op.attrs))


def _is_late(op: Operator) -> bool:
    return op.type == INPUT and op.domain == OWN


def _lateness(late: Variable) -> Operator:
    """The operator that makes ``late``, or what it is computed of, wait for a gradient."""
    queue: list[Variable | None] = [late]
    for variable in queue:
        op = None if variable is None else variable.producer
        if op is not None and _is_late(op):
            return op
        queue += () if op is None else [v for v in op.inputs if v not in queue]
    raise AssertionError(f"'{late.name}' is not recomputed")


def _sparse_row(op: Operator, table: Variable) -> list[Variable] | None:
    """The states of the row of a sparse update that takes a table; None where it is none."""
    slots = slots_of(op.type, op.domain)
    if slots is None or "rows" not in slots.input_row:
        return None
    for row in slots.rows(op.inputs):
        if row.get("parameter") is table:
            return [v for name in slots.output_row if (v := row.get(name)) is not None]
    return None


def with_rows(program: _Graph, tables: Collection[HostTable], counts: Mapping[str, int]) -> _Graph:
    """The copy of a program in which each table, by name, has as many rows as ``counts`` says."""
    copy = clone(program)
    for table in tables:
        own, count = copy.var(table.name), counts[table.name]
        sources = {copy.var(ids): name for ids, name in table.lookups.items()}
        local = {ids: copy.add_input(name, "int64", ids.shape) for ids, name in sources.items()}
        for op, slot in [*_readers_of_ids(copy, own)]:
            op.set_input(slot, _local(copy, local, op.input(slot)))
            if slot == 0:
                op.attrs["size"] = count
        for name in table.states:
            state = copy.var(name)
            for variable in (state, copy.updates.get(state)):
                if variable is not None and variable.shape is not None:
                    variable.shape = (count, *variable.shape[1:])
    copy.touch()
    return copy


def _readers_of_ids(program: Graph, table: Variable) -> Iterable[tuple[Operator, int]]:
    """The operators that look rows of a table up, and those that say whose gradients are whose, each with a slot."""
    for op in program.operators:
        if is_row_lookup(op, 0) and op.input(0) is table:
            yield op, 1
        elif op.type == GATHER and op.domain == OWN and _grad_of(op) is table:
            yield op, 0


def _local(program: Graph, local: Mapping[Variable, Variable], ids: Variable | None) -> Variable:
    """What stands for these ids; where they are recomputed, it waits as they do."""
    assert ids is not None
    if ids in local:
        return local[ids]
    source = next(own for first, own in local.items() if _again(first, ids))
    waits = _lateness(ids)
    late = program.fresh_variable(f"{source.name}@LATE", source.dtype, source.shape)
    late.stop_gradient = True
    program.add_operator(INPUT, [waits.input(0), source], [late], domain=OWN, like=waits)
    return late


def _grad_of(op: Operator) -> Variable | None:
    made = op.output(1)
    return None if made is None else made.grad_of
