"""What exporters wrote out becomes what it stands for, before precisions are decided."""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.simplification import Simplification
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.lists import unsupported_reason
from amp_transpiler.passes.canonicalize.floored_sums import write_shares
from amp_transpiler.passes.canonicalize.fuse_hard_swish import write_hard_sigmoids
from amp_transpiler.passes.canonicalize.fuse_norm import LAYER_NORM, fuse_layer_norms
from amp_transpiler.passes.canonicalize.hypotenuses import write_hypotenuses
from amp_transpiler.passes.canonicalize.root_mean_squares import write_as_norms
from amp_transpiler.passes.canonicalize.roots import write_roots
from amp_transpiler.passes.canonicalize.triangles import invert_triangles
from amp_transpiler.passes.canonicalize.unit_vectors import write_unit_vectors
from amp_transpiler.passes.view.typing import programs

_GATE, _PARTS = "HardSigmoid", ("Add", "Clip", "Div", "Mul")


class InvertTriangles(Simplification):
    """Loops over rows that invert a unit triangular matrix, unrolled by an exporter, become products of blocks."""

    name = "invert-triangles"

    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> list[str]:
        return [note for each in list(programs(graph)) for note in invert_triangles(each, names, keep)]


class WriteNorms(Simplification):
    """Norms, mean squares, magnitudes and lengths that are written out become operators that compute in fp32 inside,
    and floors under the sum of shares numbers of float16."""

    name = "write-norms"

    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> list[str]:
        notes = list[str]()
        for each in list(programs(graph)):
            if graph.opset() >= LAYER_NORM:
                notes += fuse_layer_norms(each, names, keep)
            if options.dtype == "float16" and options.numeric_guards:  # bfloat16 has too few digits for a whole row
                for write in (write_roots, write_as_norms, write_unit_vectors, write_shares, write_hypotenuses):
                    write(each, names, keep)
        return notes


class WriteHardSwishes(Simplification):
    """Hard swishes that are written out with a Clip, four kernels, become the product with a HardSigmoid, two, where
    the place has its kernel in 16 bit."""

    name = "write-hard-swishes"

    def wanted(self, graph: Graph, options: ConversionOptions) -> bool:
        if any(options.binds_full(kind) for kind in (_GATE, *_PARTS)):
            return False
        return unsupported_reason(_GATE, options.dtype, graph.opset(), options.kind) is None

    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> None:
        for each in list(programs(graph)):
            write_hard_sigmoids(each, names, keep)
