"""Products of a tensor and its sigmoid (SiLU, Swish, QuickGELU) become one operator when they are trained.

Written out, their gradient reads and writes tensors of the size of the activation six times over; that of the one
operator, onnxruntime's QuickGelu, reads what it was computed from. What is saved for inference has them written out
again.
"""

from __future__ import annotations

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import FUSED
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.matching import added_number, factor, only_reader, put
from amp_transpiler.passes.view.of_type import of_type

TYPE = "QuickGelu"
_STANDS_FOR = "Sigmoid Mul"


def fuse_swishes(program: Graph) -> list[str]:
    """Put one operator in the place of each ``x * sigmoid(alpha * x)`` with a number ``alpha``; in place.

    Those that a program has as onnxruntime's operator are trained in the same way.
    """
    count = 0
    for op in program.operators:
        if op.full_type == f"{DOMAIN}::{TYPE}":
            op.metadata[FUSED] = _STANDS_FOR
    for sigmoid in of_type(program, "Sigmoid"):
        found = _found(sigmoid)
        if found is not None:
            product, x, alpha = found
            put(product, TYPE, [x], DOMAIN, alpha=alpha).metadata[FUSED] = _STANDS_FOR
            count += 1
    return [f"{count} products of a tensor and its sigmoid are one operator each"] if count else []


def _found(sigmoid: Operator) -> tuple[Operator, Variable, float] | None:
    """The product, what it is of, and the number before that in the sigmoid."""
    share, z = sigmoid.outputs[0], sigmoid.inputs[0]
    product = only_reader(share)
    if product is None or z is None or z.dtype != "float32":
        return None
    x = factor(product, share)
    scaled, alpha = (z, 1.0) if x is z else added_number(z, "Mul")
    if x is None or x is not scaled or alpha is None or alpha <= 0 or z.shape != x.shape:
        return None
    return product, x, alpha
