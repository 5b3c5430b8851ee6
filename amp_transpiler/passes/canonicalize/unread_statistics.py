"""A BatchNormalization that trains reads its running statistics only to make new ones, which may be read by nobody."""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.types import numpy_dtype


def forget_unread_statistics(program: Graph) -> None:
    """Let such operators read constants in place of computed statistics, in nested graphs too.

    Exporters write standardised weights so. What computed the statistics lies on no path to the results then.
    """
    for op in [op for op in program.walk() if op.full_type == "BatchNormalization" and _makes_none(op)]:
        _forget(op)


def _makes_none(op: Operator) -> bool:
    kept = {*op.program.outputs, *op.program.updates.values()}
    made = [v for v in (op.output(1), op.output(2)) if v is not None]
    return bool(op.attrs.get("training_mode", 0)) and not any(v.readers or v in kept for v in made)


def _forget(op: Operator) -> None:
    computed = [(slot, v) for slot in (3, 4) if (v := op.input(slot)) is not None and v.producer is not None]
    shapes = [static(v.shape) for _, v in computed]
    for (slot, variable), shape in zip(computed, shapes, strict=True) if None not in shapes else ():
        fixed = np.full(shape or (), slot - 3, numpy_dtype(variable.dtype or "float32"))
        op.set_input(slot, op.program.add_constant(f"{variable.name}.unread", fixed))
