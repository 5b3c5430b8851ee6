"""Products that onnxruntime's optimisers fused with what follows are taken apart where only the parts run in 16 bit.

A file that was optimised for CPUs has them; the runtime of another place fuses again what it has kernels of.
"""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions
from amp_transpiler.conversion.simplification import Simplification
from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.decompose import decompose_operator
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.lists import unsupported_reason
from amp_transpiler.passes.pipeline import Property

#: What is fused -> the product in it.
_PRODUCTS = {f"{DOMAIN}::FusedConv": "Conv", f"{DOMAIN}::FusedGemm": "Gemm"}
#: The first opset that has the forms in which they are taken apart: a Clip reads its bounds, a Gemm needs no summand.
_APART = 11


class WriteFused(Simplification):
    """A convolution or product that is fused with its activation is written apart where the place has kernels of the
    parts alone in 16 bit."""

    name = "write-fused"
    needs = (Property.TYPED, OPTIONS)

    def wanted(self, graph: Graph, options: ConversionOptions) -> bool:
        return graph.opset() >= _APART and bool(_apart(graph, options))

    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> None:
        apart = _apart(graph, options)
        for op in list(graph.walk()):
            data = op.input(0)
            if op.full_type in apart and op not in keep and data is not None and data.dtype == "float32":
                decompose_operator(op)


def _apart(graph: Graph, options: ConversionOptions) -> set[str]:
    """The types of operators that have no kernel in 16 bit, and whose products have one."""
    dtype, opset, place = options.dtype, graph.opset(), options.kind
    return {
        fused
        for fused, product in _PRODUCTS.items()
        if fused not in options.lists.black_list
        and unsupported_reason(fused, dtype, opset, place)
        and not unsupported_reason(product, dtype, opset, place)
    }
