"""Columns: a product of a transposed matrix and a vector is lowered as one with a column.

onnxruntime fuses a Transpose into the product behind it, also one that it first moves there past other operators. Its
fused kernel then takes wrong elements of a vector, in silence (1.31, on CPU), and the right ones of a column. Other
products with vectors stand as they do, since those with columns have other bits.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage


def emit_column(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit such a product; False for any other operator, and where a place has a body of its own for vectors."""
    e, result = storage.e, op.output(0)
    if op.full_type != "MatMul" or e.kernels is not None or result is None or result.dtype not in FLOATS:
        return False
    matrix, vector = op.inputs
    assert matrix is not None and vector is not None
    shape = storage.shape(vector)
    if shape is None or len(shape) != 1 or matrix not in storage.transposed:
        return False
    column = e.Unsqueeze(storage.read(op, vector), e.ints(-1))
    total = e.Squeeze(e.MatMul(storage.read(op, matrix), column), e.ints(-1))
    storage.env[result.key] = storage.finished(result, total, False)
    return True
