"""A model in the 16-bit type that is not asked for, as the fp32 model that it stands for.

Language models are exported in bfloat16, the type of their checkpoints. Left as it is, such a model would become one
of two 16-bit types with casts between them, which no kernel takes together.
"""

from __future__ import annotations

import math
from collections import Counter

from amp_transpiler.conversion.conversion_options import OPTIONS
from amp_transpiler.conversion.io_types import io_to_narrow
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.tensors import tensor_type
from amp_transpiler.ir.types import FLOATS, HALF
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.precision.widen import widen
from amp_transpiler.passes.view.typing import programs


class WidenOther(Pass):
    """A model whose weights are of the 16-bit type that is not asked for becomes the fp32 one that it stands for."""

    name = "widen-other"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)

    def run(self, graph: Graph, context: Context) -> bool:
        options = context[OPTIONS]
        if weight_type(graph) not in HALF - {options.dtype}:
            return False
        context.notes += widen(graph, free=io_to_narrow(graph, options, HALF))
        return True


def weight_type(program: Graph) -> str:
    """The type of float that most elements of constants have; "" where there are none."""
    elements = Counter[str]()
    for each in programs(program):
        for variable in each.variables:
            if variable.data is not None and variable.producer is None:
                dtype, shape = tensor_type(variable.data)
                elements[dtype if dtype in FLOATS else ""] += math.prod(shape) if dtype in FLOATS else 0
    return elements.most_common(1)[0][0] if elements else ""
