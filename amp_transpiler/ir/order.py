"""The order of operators: stable, so that the same program gives the same file."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.adjacency import contents, predecessors
from amp_transpiler.ir.nodes import Operator


def topological_order(graph: nx.MultiDiGraph, operators: Mapping[int, Operator], name: str) -> list[Operator]:
    """The operators of program ``name`` in stable order: as added, each after its producers. GraphError on a cycle."""
    added = [operators[key] for key in sorted(operators)]
    pred, nodes = predecessors(graph), contents(graph)
    if all(p is None or p.key < op.key for op in added for v in pred[op.key] for p in (nodes[v]["item"].producer,)):
        return added  # as a file is written, and a program is built
    done: set[int] = set()
    open_: set[int] = set()
    order: list[Operator] = []
    for root in (op.key for op in added):
        if root in done:
            continue
        stack = [(root, False)]
        while stack:
            key, leave = stack.pop()
            if leave:
                open_.discard(key)
                done.add(key)
                order.append(operators[key])
                continue
            if key in done:
                continue
            if key in open_:
                label = operators[key].label
                raise GraphError(f"program '{name}' has a cycle through operator '{label}'")
            open_.add(key)
            stack.append((key, True))
            producers = {p.key for v in pred[key] if (p := nodes[v]["item"].producer) is not None}
            for producer in sorted(producers - done, reverse=True):
                if producer in open_:
                    raise GraphError(
                        f"program '{name}' has a cycle through operators '{operators[producer].label}' "
                        f"and '{operators[key].label}'"
                    )
                stack.append((producer, False))
    return order
