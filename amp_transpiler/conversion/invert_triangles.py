"""Inverses of triangular matrices that an exporter unrolled become products before precisions are decided."""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import OPTIONS
from amp_transpiler.conversion.protected import converted, protected
from amp_transpiler.ir.graph import Graph
from amp_transpiler.passes.canonicalize.triangles import invert_triangles
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view.typing import programs


class InvertTriangles(Pass):
    """Loops over rows that invert a unit triangular matrix, unrolled by an exporter, become products of blocks."""

    name = "invert-triangles"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)

    def applies(self, graph: Graph, context: Context) -> bool:
        return not converted(graph)

    def run(self, graph: Graph, context: Context) -> None:
        names, keep = protected(graph, context[OPTIONS])
        for each in list(programs(graph)):
            context.notes += invert_triangles(each, names, keep)
