"""What onnxruntime makes one integer kernel of, whose scales are fp32 alone.

Of the operators between DequantizeLinear and QuantizeLinear that its CPU provider fuses, Concat is the one of which it
does not ask whether the scales are float32: in float16 the model does not load (1.31).
"""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ops.fake_quantize import quantizer
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.names import written_name


def keep_quantised(program: Graph, constraints: Constraints) -> None:
    """Constrain to fp32 each Concat of dequantised tensors that is quantised, and what quantises around it."""
    for op in program.walk():
        made = op.output(0)
        if op.type != "Concat" or op.domain or made is None or made in made.program.outputs:
            continue
        before = [None if v is None else v.producer for v in op.inputs]
        behind: list[Operator | None] = [reader for reader, _ in made.readers]
        if _all_are("DequantizeLinear", before) and _all_are("QuantizeLinear", behind):
            why = Reason(Kind.QUANTISED, written_name(made))
            for each in (op, *before, *behind):
                if each is not None:
                    constraints.keep(each, why)


def keep_fake_quantised(program: Graph, constraints: Constraints) -> None:
    """Constrain to fp32 each pair that quantises and brings back: in 16 bit its scale would be another one."""
    for op in program.walk():
        before = quantizer(op)
        if before is not None:
            for each in (before, op):
                constraints.keep(each, Reason(Kind.FAKE_QUANTISED))


def _all_are(kind: str, operators: list[Operator | None]) -> bool:
    return bool(operators) and all(op is not None and op.type == kind for op in operators)
