"""Logarithms of sigmoids are written with a softplus when they are trained.

Exporters write torch's LogSigmoid as two operators. A sigmoid is 0 where its logarithm is still a number: from -17 on
in float16, in onnxruntime's CPU kernel (1.31) from -18 on; there losses and gradients were infinite or NaN.
"""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.passes.canonicalize.matching import computed, maker, put
from amp_transpiler.passes.view.of_type import of_type


def write_log_sigmoids(program: Graph) -> list[str]:
    """Put -softplus(-x) in the place of each log(sigmoid(x)); in place."""
    count = 0
    for log in of_type(program, "Log"):
        sigmoid, out = maker(log.input(0), "Sigmoid"), log.outputs[0]
        x = None if sigmoid is None else sigmoid.inputs[0]
        if x is None or out is None:
            continue
        back = computed(log, "Neg", [x], f"{out.name}.negated", out.shape)
        above = computed(log, "Softplus", [back], f"{out.name}.softplus", out.shape)
        put(log, "Neg", [above])
        count += 1
    return [f"{count} logarithms of sigmoids are written with softplus"] if count else []
