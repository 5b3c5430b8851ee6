"""Where onnxruntime may move a transposition to."""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.opdef import traits_of


def behind_transpositions(graph: Graph) -> set[Variable]:
    """What a Transpose makes, and all that is made of it without a product of matrices in between."""
    found: set[Variable] = set()
    for op in graph.walk():
        if op.full_type == "Transpose" or (not traits_of(op).product and not found.isdisjoint(filter(None, op.inputs))):
            found.update(filter(None, op.outputs))
    return found
