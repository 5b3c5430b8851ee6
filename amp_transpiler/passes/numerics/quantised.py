"""What onnxruntime makes of a quantised model while it loads it, and where that fails.

Of the operators between DequantizeLinear and QuantizeLinear that its CPU provider fuses, Concat is the one of which it
does not ask whether the scales are float32: in float16 the model does not load (1.31).
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.lists import TARGET_OPSET
from amp_transpiler.ops.fake_quantize import quantizer
from amp_transpiler.passes.canonicalize.opset import convert_opset
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import written_name
from amp_transpiler.warn import warn_user

#: From this opset on QuantizeLinear may name the type that it makes.
_NAMES_ITS_TYPE = 21
#: Behind which onnxruntime quantises again what comes from a DequantizeLinear, and brings it back.
_HANDED_ON = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def loads_at(program: Graph, opset: int) -> bool:
    """Whether onnxruntime loads the program at a later opset as well.

    On x86 processors it makes uint8 of int8, and forgets what a QuantizeLinear that it put in itself says of its type:
    two types, with which the model does not load (1.31, 1.32).
    """
    return opset < _NAMES_ITS_TYPE or not any(
        op.type == "DequantizeLinear"
        and not op.domain
        and (read := op.input(0)) is not None
        and read.dtype == "int8"
        and any(reader.full_type in _HANDED_ON for made in op.outputs for reader, _ in _readers(made))
        for op in program.walk()
    )


def latest_opset(program: Graph) -> int:
    """The latest opset to raise a program to: the one that bodies are written at, if onnxruntime loads it there."""
    return TARGET_OPSET if loads_at(program, TARGET_OPSET) else _NAMES_ITS_TYPE - 1


def let_load(program: Graph) -> None:
    """Bring a program that was trained, and so raised, to an opset at which onnxruntime loads it.

    An AmpWarning where an operator has no form there: the program stays as it is.
    """
    if loads_at(program, program.opset()):
        return
    try:
        with unchanged_on_error(program):
            convert_opset(program, latest_opset(program))
    except GraphError as error:
        warn_user(
            f"program '{program.name}' is written at opset {program.opset()}, at which onnxruntime does not load it on "
            f"x86 processors, since it moves int8 that a DequantizeLinear brought back: {error}"
        )


def _readers(variable: Variable | None) -> Sequence[tuple[Operator, int | str]]:
    return () if variable is None else variable.readers


def keep_quantised(flow: Flow, constraints: Constraints) -> None:
    """Constrain to fp32 each Concat of dequantised tensors that is quantised, and what quantises around it."""
    for op, _, _ in flow.of("Concat"):
        made = op.outputs[0]
        if made is None or made in made.program.outputs:
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
