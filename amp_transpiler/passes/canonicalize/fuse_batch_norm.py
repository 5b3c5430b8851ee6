"""Batch norms whose slope is computed beside them are whole again when they are trained.

Kernels of 16 bit take all parameters of a BatchNormalization in one type, so a trained model that is served computes
scale / sqrt(variance + epsilon) in fp32, and normalises by a variance of one. Read back, the running variance would be
none of the norm's: it could not train with the statistics of the batch.
"""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ops.norm_parts import epsilon_of
from amp_transpiler.passes.canonicalize.matching import added_number, drop_unread, holds, maker, remove
from amp_transpiler.passes.view.of_type import of_type


def fuse_batch_norms(program: Graph) -> list[str]:
    """Let each BatchNormalization with a computed slope take scale, variance and epsilon itself; in place."""
    count = 0
    for norm in of_type(program, "BatchNormalization"):
        slope, ones = norm.input(1), norm.input(4)
        found = _slope(slope)
        if found is None or slope is None or ones is None or not _divides_by_one(norm):
            continue
        scale, variance, epsilon = found
        for slot, variable in ((1, scale), (4, variance)):
            norm.set_input(slot, variable)
        norm.attrs["epsilon"] = epsilon
        if slope.producer is not None and not slope.readers and slope not in program.outputs:
            remove(slope.producer, {scale, variance})
            program.remove_variable(slope)
        drop_unread(ones)
        count += 1
    return [f"{count} BatchNormalization whose slope was computed have their variance again"] if count else []


def _slope(variable: Variable | None) -> tuple[Variable, Variable, float] | None:
    """The scale, the running variance and epsilon of which a slope is computed; None of another variable."""
    quotient = maker(variable, "Div")
    root = None if quotient is None else maker(quotient.input(1), "Sqrt")
    variance, epsilon = (None, None) if root is None else added_number(root.input(0))
    scale = None if quotient is None else quotient.input(0)
    if scale is None or variance is None or epsilon is None or not (scale.persistable and variance.persistable):
        return None
    alike = scale.shape == variance.shape and scale.dtype == variance.dtype == "float32" and epsilon >= 0
    return (scale, variance, epsilon) if alike else None


def _divides_by_one(norm: Operator) -> bool:
    """Whether a norm in its form for evaluation divides by nothing else than ones."""
    return not norm.attrs.get("training_mode", 0) and epsilon_of(norm) == 0 and holds(norm.input(4), 1)
