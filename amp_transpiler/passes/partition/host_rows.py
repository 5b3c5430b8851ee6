"""A program for a device whose large tables stay on the host: in their place it has the rows of one batch.

The copy has, for each lookup, an input that says where among these rows those of its ids are; a table, its master
weight and its accumulators have as many rows as a batch names ids. What an update does with rows it does with these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.clone import clone
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.ops.training.sparse import GATHER
from amp_transpiler.passes.view.lookups import is_row_lookup

_Graph = TypeVar("_Graph", bound=Graph)


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
    ids, states = dict[str, str](), {table.name: table}
    for op, slot in table.readers:
        if is_row_lookup(op, slot):
            indices = op.input(1)
            assert indices is not None
            ids[indices.name] = f"{indices.name}@IN@{table.name}"
            continue
        row = _sparse_row(op, table)
        if row is None:
            raise ArgumentError(
                f"host_tables: all of table '{table.name}' is read or written by '{op.label}' ({op.type}), and rows of "
                "it alone come to the device. Mark it sparse (is_sparse=True), and let its optimizer change no other "
                "rows: SGD or Adagrad without weight_decay, or lazy_mode=True"
            )
        states |= {v.name: v for v in row}
    shape = table.shape
    if not shape or not isinstance(shape[0], int) or not ids:
        raise ArgumentError(f"host_tables: no rows of '{table.name}' are looked up in program '{program.name}'")
    updated = tuple(name for name, state in states.items() if state in program.updates)
    return HostTable(table.name, shape[0], tuple(states), updated, ids)


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
        for ids, name in table.lookups.items():
            source = copy.var(ids)
            local = copy.add_input(name, "int64", source.shape)
            for op, slot in [*source.readers]:
                of_table = op.type == GATHER and op.domain == OWN and _grad_of(op) is own
                if (slot == 1 and op.input(0) is own) or (slot == 0 and of_table):
                    op.set_input(slot, local)
                    if of_table:
                        op.attrs["size"] = count
        for name in table.states:
            state = copy.var(name)
            for variable in (state, copy.updates.get(state)):
                if variable is not None and variable.shape is not None:
                    variable.shape = (count, *variable.shape[1:])
    copy.touch()
    return copy


def _grad_of(op: Operator) -> Variable | None:
    made = op.output(1)
    return None if made is None else made.grad_of
