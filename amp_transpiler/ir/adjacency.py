"""The dictionaries that networkx keeps a graph in: its public views cost several times as much to read."""

from __future__ import annotations

from collections.abc import Mapping
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
