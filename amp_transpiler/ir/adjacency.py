"""The edges of a program: each variable knows its readers, and a networkx graph is drawn where somebody asks for one.

A drawn graph is kept in step from then on. It has ten dictionaries for each operator, two thirds of all that a program
of thousands holds, and most programs are read, decided and written without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import networkx as nx

#: What a slot is called in which a nested graph of an operator reads.
CAPTURE = "capture"


def draw(graph: nx.MultiDiGraph, variables: Iterable[Any], operators: Iterable[Any]) -> nx.MultiDiGraph:
    """Fill an empty graph: variables and operators by key, edges by slot."""
    variables, operators = list(variables), list(operators)
    items: list[Any] = [*variables, *operators]
    for item in sorted(items, key=attrgetter("key")):
        graph.add_node(item.key, item=item)
    for variable in variables:
        for op, slots in variable.uses.items():
            for slot in slots:
                graph.add_edge(variable.key, op.key, key=slot)
    for op in operators:
        _draw_outputs(graph, op)
    return graph


def add_variables(variables: Iterable[Any]) -> None:
    """Put new variables into the graph of their program, where it is drawn."""
    for variable in variables:
        if variable.program.drawn is None:
            return
        variable.program.drawn.add_node(variable.key, item=variable)


def remove_variable(variable: Any) -> None:
    """Take a variable that nothing reads or writes out of the graph of its program, where it is drawn."""
    if variable.program.drawn is not None:
        variable.program.drawn.remove_node(variable.key)


def add_operator(op: Any) -> None:
    """Let the variables that a new operator reads and writes know it."""
    for slot, variable in enumerate(op.outputs):
        if variable is not None:
            variable.producer, variable.producer_slot = op, slot
    for slot, variable in enumerate(op.inputs):
        if variable is not None:
            uses = variable.uses
            uses[op] = (*uses[op], slot) if op in uses else (slot,)
    graph = op.program.drawn
    if graph is not None:
        graph.add_node(op.key, item=op)
        for slot, variable in enumerate(op.inputs):
            if variable is not None:
                graph.add_edge(variable.key, op.key, key=slot)
        _draw_outputs(graph, op)


def _draw_outputs(graph: nx.MultiDiGraph, op: Any) -> None:
    for slot, variable in enumerate(op.outputs):
        if variable is not None:
            graph.add_edge(op.key, variable.key, key=slot)


def add_use(variable: Any, op: Any, slot: int | str) -> None:
    """Let a variable know that the operator reads it in this slot as well."""
    variable.uses[op] = (*variable.uses.get(op, ()), slot)
    if op.program.drawn is not None:
        op.program.drawn.add_edge(variable.key, op.key, key=slot)


def drop_use(variable: Any, op: Any, slot: int | str) -> None:
    """Let a variable know that the operator does not read it in this slot any more."""
    slots = tuple(other for other in variable.uses[op] if other != slot)
    if slots:
        variable.uses[op] = slots
    else:
        del variable.uses[op]
    if op.program.drawn is not None:
        op.program.drawn.remove_edge(variable.key, op.key, key=slot)


def add_result(variable: Any, op: Any, slot: int) -> None:
    """Let a variable without a producer know that the operator writes it."""
    variable.producer, variable.producer_slot = op, slot
    if op.program.drawn is not None:
        op.program.drawn.add_edge(op.key, variable.key, key=slot)


def drop_result(variable: Any, op: Any, slot: int) -> None:
    """Let a variable know that the operator does not write it any more."""
    variable.producer, variable.producer_slot = None, -1
    if op.program.drawn is not None:
        op.program.drawn.remove_edge(op.key, variable.key, key=slot)


def remove_operator(op: Any) -> None:
    """Let what the operator reads and writes, in its nested graphs too, forget it."""
    for variable in op.outputs:
        if variable is not None:
            variable.producer, variable.producer_slot = None, -1
    for variable in (*op.inputs, *op.captured):
        if variable is not None:
            variable.uses.pop(op, None)
    if op.program.drawn is not None:
        op.program.drawn.remove_node(op.key)


def filled(slots: Sequence[Any], slot: int) -> list[Any]:
    """The list of slots, long enough for this one."""
    assert isinstance(slots, list)
    slots.extend([None] * (slot + 1 - len(slots)))
    return slots


def trim(slots: list[Any]) -> None:
    """Trailing optional slots that are left out are not written."""
    while slots and slots[-1] is None:
        slots.pop()
