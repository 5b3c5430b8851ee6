"""The dictionaries that networkx keeps a graph in: its methods and views cost several times as much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import networkx as nx

#: By key of a node, its neighbours by key, and for each the edges by slot.
Adjacency = Mapping[int, Mapping[int, Mapping[int | str, Any]]]


def successors(graph: nx.MultiDiGraph) -> Adjacency:
    """What reads a variable, or what an operator writes."""
    found: Adjacency = graph._succ
    return found


def predecessors(graph: nx.MultiDiGraph) -> Adjacency:
    """What writes a variable, or what an operator reads."""
    found: Adjacency = graph._pred
    return found


def contents(graph: nx.MultiDiGraph) -> Mapping[int, Mapping[str, Any]]:
    """By key, the node's variable or operator under ``"item"``."""
    found: Mapping[int, Mapping[str, Any]] = graph._node
    return found


def add_nodes(graph: nx.MultiDiGraph, items: Iterable[Any]) -> None:
    """What ``graph.add_node(item.key, item=item)`` does for each of some items with new keys."""
    succ, pred, node = graph._succ, graph._pred, graph._node
    for item in items:
        key = item.key
        succ[key], pred[key], node[key] = {}, {}, {"item": item}
    _changed(graph)


def add_edge(graph: nx.MultiDiGraph, tail: int, head: int, slot: int | str) -> None:
    """What ``graph.add_edge(tail, head, key=slot)`` does between nodes that are there."""
    slots = graph._succ[tail].get(head)
    if slots is None:
        slots = graph._succ[tail][head] = graph._pred[head][tail] = {}
    slots.setdefault(slot, {})
    _changed(graph)


def add_operator(graph: nx.MultiDiGraph, op: Any) -> None:
    """What ``graph.add_node(op.key, item=op)``, and ``graph.add_edge`` for each of its slots, do for a new operator.

    What it writes knows it.
    """
    succ, pred, key = graph._succ, graph._pred, op.key
    after: dict[int, Any] = {}
    before: dict[int, Any] = {}
    succ[key], pred[key], graph._node[key] = after, before, {"item": op}
    for slot, item in enumerate(op.inputs):
        if item is not None:
            tail = item.key
            if tail in before:
                before[tail][slot] = {}
            else:
                before[tail] = succ[tail][key] = {slot: {}}
    for slot, item in enumerate(op.outputs):
        if item is not None:
            item.producer, item.producer_slot = op, slot
            after[item.key] = pred[item.key][key] = {slot: {}}
    _changed(graph)


def remove_node(graph: nx.MultiDiGraph, key: int) -> None:
    """What ``graph.remove_node(key)`` does for a node that is there."""
    for head in graph._succ.pop(key):
        del graph._pred[head][key]
    for tail in graph._pred.pop(key):
        if tail != key:
            del graph._succ[tail][key]
    del graph._node[key]
    _changed(graph)


def _changed(graph: nx.MultiDiGraph) -> None:
    """Forget what networkx's backends made of the graph."""
    if graph.__networkx_cache__:
        graph.__networkx_cache__.clear()


def filled(slots: Sequence[Any], slot: int) -> list[Any]:
    """The list of slots, long enough for this one."""
    assert isinstance(slots, list)
    slots.extend([None] * (slot + 1 - len(slots)))
    return slots


def trim(slots: list[Any]) -> None:
    """Trailing optional slots that are left out are not written."""
    while slots and slots[-1] is None:
        slots.pop()
