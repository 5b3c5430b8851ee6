"""What a model computes of shapes alone: onnxruntime runs that on the CPU, beside a GPU that computes the rest."""

from __future__ import annotations

import onnx

from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.ir.opdef import traits_of


def size_nodes(graph: onnx.GraphProto) -> frozenset[str]:
    """The names of nodes that read nothing but shapes, and numbers that are known."""
    found: set[str] = set()
    _collect(graph, set(), set(), found)
    return frozenset(found)


def _collect(graph: onnx.GraphProto, known: set[str], sizes: set[str], found: set[str]) -> None:
    known |= {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        read, bodies = [name for name in node.input if name], list(nested_graphs(node))
        if traits_of(node.op_type, node.domain).shape_only:
            sizes.update(node.output)
        elif all(name in known for name in read) and not bodies:
            known.update(node.output)
        elif read and all(name in known or name in sizes for name in read) and not bodies:
            sizes.update(node.output)
            found.add(node.name)
        for body in bodies:
            _collect(body, set(known), set(sizes), found)
