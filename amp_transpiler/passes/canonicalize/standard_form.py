"""The operators that gradient rules and precision lists are written for."""

from __future__ import annotations

from amp_transpiler.ir.decompose import decompose, decompose_operator, runs_by_parts
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


def decompose_for_runtime(program: Graph) -> bool:
    """Decompose what nothing runs as it stands, and is no call of a function of the program; whether there is any.

    What comes of it has the form of the target opset, and so has the program then. GraphError names an operator that
    cannot be decomposed.
    """
    functions = {(each.domain, each.name) for each in program.info.functions}
    found = [op for op in program.walk() if runs_by_parts(op) and (op.domain, op.type) not in functions]
    if found:
        convert_opset(program)
    for op in found:
        decompose_operator(op)
    return bool(found)


class DecomposeForRuntime(Pass):
    """Operators of other domains that neither onnxruntime nor a lowering rule knows are decomposed."""

    name = "decompose-for-runtime"

    def applies(self, graph: Graph, context: Context) -> bool:
        return any(map(runs_by_parts, graph.walk()))

    def run(self, graph: Graph, context: Context) -> bool:
        return decompose_for_runtime(graph)


class Canonicalize(Pass):
    """Operators are at the target opset; those without a gradient rule are decomposed where there is a way; a product
    of a tensor and its sigmoid is one operator, whose gradient fits 16 bit where that of the product may not."""

    name = "canonicalize"
    needs = (Property.TYPED,)
    guarantees = (Property.TARGET_OPSET,)

    def run(self, graph: Graph, context: Context) -> None:
        standardize(graph)
        fuse_swishes(graph)
