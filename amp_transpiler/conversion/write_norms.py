"""Norms that are written out become operators that compute in fp32 inside."""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import OPTIONS
from amp_transpiler.conversion.protected import converted, protected
from amp_transpiler.ir.graph import Graph
from amp_transpiler.passes.canonicalize.floored_sums import write_shares
from amp_transpiler.passes.canonicalize.fuse_norm import fuse_layer_norms
from amp_transpiler.passes.canonicalize.hypotenuses import write_hypotenuses
from amp_transpiler.passes.canonicalize.root_mean_squares import write_as_norms
from amp_transpiler.passes.canonicalize.roots import write_roots
from amp_transpiler.passes.canonicalize.simplify import remove_dead
from amp_transpiler.passes.canonicalize.unit_vectors import write_unit_vectors
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view.typing import programs

#: The opset of LayerNormalization.
_LAYER_NORM = 17


class WriteNorms(Pass):
    """Norms, mean squares, magnitudes and lengths that are written out become operators that compute in fp32 inside,
    and floors under the sum of shares numbers of float16."""

    name = "write-norms"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)

    def applies(self, graph: Graph, context: Context) -> bool:
        return not converted(graph)

    def run(self, graph: Graph, context: Context) -> None:
        options = context[OPTIONS]
        names, keep = protected(graph, options)
        before = graph.version
        for each in list(programs(graph)):
            if graph.opset() >= _LAYER_NORM:
                context.notes += fuse_layer_norms(each, names, keep)
            if options.dtype == "float16" and options.numeric_guards:  # bfloat16 has too few digits for a whole row
                write_roots(each, names, keep)
                write_as_norms(each, names, keep)
                write_unit_vectors(each, names, keep)
                write_shares(each, names, keep)
                write_hypotenuses(each, names, keep)
        if graph.version != before:
            remove_dead(graph, names, keep)
