"""How far a model that quantises moves by itself: a number that is rounded may fall on the other side of a step."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.conversion.calibration.measure import Batch, floors, outputs_of
from amp_transpiler.conversion.calibration.statistics import Difference
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.passes.view import constants
from amp_transpiler.program import Program


def own_steps(program: Program, batches: Sequence[Batch], dtype: str) -> list[str]:
    """A sentence on how far an output of ``program``, the fp32 one, moves where nothing but what it quantises is
    rounded to ``dtype``; none where that is constant.

    Raises what :func:`.outputs_of` raises.
    """
    rounding = program.clone()
    if not _round(rounding, dtype):
        return []
    moved = [Difference(floor) for floor in floors(program).values()]
    for exact, other in zip(outputs_of(program, batches), outputs_of(rounding, batches), strict=True):
        for difference, one, another in zip(moved, exact, other, strict=True):
            difference.add(one, another)
    error, name = max((found.error, v.name) for found, v in zip(moved, program.outputs, strict=True))
    return [
        f"the model quantises what it computes: with that rounded to {dtype} before, and all else in float32, output "
        f"'{name}' moves by {error:.3g}"
    ]


def _round(program: Program, dtype: str) -> bool:
    """Round what the operators of a program quantise, in place; whether there is any."""
    found = False
    for op in program.operators:
        read = op.input(0)
        if not traits_of(op).quantises or read is None or read.dtype != "float32" or constants.is_constant(read):
            continue
        narrow = program.fresh_variable(f"{read.name}.rounded", dtype, read.shape)
        wide = program.fresh_variable(f"{read.name}.widened", "float32", read.shape)
        program.add_operator("Cast", [read], [narrow], attrs={"to": ONNX_TYPES[dtype]}, like=op)
        program.add_operator("Cast", [narrow], [wide], attrs={"to": ONNX_TYPES["float32"]}, like=op)
        op.set_input(0, wide)
        found = True
    return found
