"""Hard swishes that are written out with a Clip, four kernels, become the product with a HardSigmoid, two."""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import OPTIONS
from amp_transpiler.conversion.protected import converted, protected
from amp_transpiler.ir.graph import Graph
from amp_transpiler.lists import unsupported_reason
from amp_transpiler.passes.canonicalize.fuse_hard_swish import write_hard_sigmoids
from amp_transpiler.passes.canonicalize.simplify import remove_dead
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view.typing import programs

_GATE, _PARTS = "HardSigmoid", ("Add", "Clip", "Div", "Mul")


class WriteHardSwishes(Pass):
    """Hard swishes that are written out with a Clip become the product with a HardSigmoid where the place has its
    kernel in 16 bit."""

    name = "write-hard-swishes"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)

    def applies(self, graph: Graph, context: Context) -> bool:
        options = context[OPTIONS]
        if any(options.binds_full(kind) for kind in (_GATE, *_PARTS)) or converted(graph):
            return False
        return unsupported_reason(_GATE, options.dtype, graph.opset(), options.kind) is None

    def run(self, graph: Graph, context: Context) -> None:
        names, keep = protected(graph, context[OPTIONS])
        before = graph.version
        for each in list(programs(graph)):
            write_hard_sigmoids(each, names, keep)
        if graph.version != before:
            remove_dead(graph, names, keep)
