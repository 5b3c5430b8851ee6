"""The operators that gradient rules and precision lists are written for."""

from __future__ import annotations

from dataclasses import dataclass

from amp_transpiler.ir.decompose import decompose
from amp_transpiler.ir.graph import Graph
from amp_transpiler.passes.canonicalize.fuse_swish import fuse_swishes
from amp_transpiler.passes.canonicalize.opset import convert_opset
from amp_transpiler.passes.canonicalize.unread_statistics import forget_unread_statistics
from amp_transpiler.passes.pipeline import Context, Pass, Property


def standardize(program: Graph) -> None:
    """Bring ``program`` to the operators that gradient rules and precision lists are written for, in place.

    That is the target opset; later operators, and those that onnxruntime's optimisers write, are decomposed; batch
    normalisations that train read statistics where they make new ones for somebody.
    GraphError names an operator that cannot be.
    """
    convert_opset(program)
    decompose(program)
    forget_unread_statistics(program)


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Operators are at the target opset; those without a gradient rule are decomposed where there is a way; a product
    of a tensor and its sigmoid is one operator, whose gradient fits 16 bit where that of the product may not."""

    name = "canonicalize"
    needs = (Property.TYPED,)
    guarantees = (Property.TARGET_OPSET,)

    def run(self, graph: Graph, context: Context) -> None:
        standardize(graph)
        fuse_swishes(graph)
