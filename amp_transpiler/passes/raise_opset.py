"""The opset at which most operators can run in 16 bit: bfloat16 came to ONNX an operator at a time."""

from __future__ import annotations

from ..errors import GraphError
from ..ir.annotate import annotate
from ..ir.program import Program
from ..lists import has_kernel
from .opset import TARGET, convert_opset
from .typing import Obstacle, has_float, narrowed, operator_name

_CUDA = "CUDAExecutionProvider"
#: The opset of bfloat16 convolutions; from here on onnxruntime's CUDA provider has no MaxPool, Dropout and others.
_LATER = 22


def raise_for(program: Program, dtype: str) -> str:
    """Bring ``program`` to a later opset, in place, where more of it can then run in ``dtype``; a sentence if it was.

    That is 21, or 22 where even more can and no operator loses its CUDA kernel. A program that cannot be expressed
    there stays as it is.
    """
    own = program.opset()
    if dtype != "bfloat16" or own >= _LATER:
        return ""
    best, count, trial = own, _able(program, dtype), program
    for target in (TARGET, _LATER):
        if target <= own:
            continue
        copy = program.clone()
        try:
            convert_opset(copy, target)
        except GraphError:
            continue
        found = _able(copy, dtype)
        if found > count and (target <= TARGET or not _lost(program, trial, copy)):
            best, count, trial = target, found, copy
    if best == own:
        return ""
    convert_opset(program, best)
    annotate(program)  # what the newer forms of operators say of shapes
    return f"opset {own} raised to {best}, at which {count} operators can run in {dtype}"


def _able(program: Program, dtype: str) -> int:
    """Operators that could run in ``dtype`` at the program's opset on CUDA."""
    return sum(
        not isinstance(narrowed(op, dtype), Obstacle)
        and has_kernel(_CUDA, op.type, dtype, op.program.opset(op.domain), op.domain)
        for op in program.walk()
        if has_float(op) and operator_name(op) not in ("Cast", "CastLike", "Constant") and not op.attrs.programs
        and op.domain in ("", "ai.onnx")
    )  # fmt: skip


def _lost(program: Program, before: Program, after: Program) -> bool:
    """Whether an operator with a CUDA kernel at the opset of ``before`` has none at that of ``after``."""
    old, new = before.opset(), after.opset()
    kinds = {op.type for op in program.walk() if op.domain in ("", "ai.onnx") and has_float(op)}
    return any(
        has_kernel(_CUDA, kind, "float32", old) and not has_kernel(_CUDA, kind, "float32", new) for kind in kinds
    )
