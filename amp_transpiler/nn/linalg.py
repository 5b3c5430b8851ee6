"""Matrices: their products and triangles."""

from __future__ import annotations

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn.building import FLOATING, LARGEST, append, appending, variable, whole
from amp_transpiler.nn.calls import function
from amp_transpiler.option_checks import switch


@function()
def matmul(
    x: Variable, y: Variable, transpose_x: bool = False, transpose_y: bool = False, *, name: str | None = None
) -> Variable:
    """Matrix product over the last two dimensions, the others broadcast.

    ``transpose_x``, ``transpose_y``: swap the last two dimensions of that operand first. Both of one float type.
    """
    call = "matmul"
    operands = []
    for name, value, transposed in (("x", x, transpose_x), ("y", y, transpose_y)):
        turned = switch(f"{call}: transpose_{name}", transposed)
        variable(call, name, value, min_rank=2 if turned else 1)
        if turned:
            rank = len(value.shape or ())
            value = append("transpose", "Transpose", [value], attrs={"perm": [*range(rank - 2), rank - 1, rank - 2]})
        operands.append(value)
    return append(call, "MatMul", operands)


@function()
def mm(x: Variable, y: Variable, *, name: str | None = None) -> Variable:
    """Matrix product, as :func:`matmul`."""
    return append("mm", "MatMul", [variable("mm", "x", x, min_rank=1), variable("mm", "y", y, min_rank=1)])


@function()
def bmm(x: Variable, y: Variable, *, name: str | None = None) -> Variable:
    """Matrix product of each pair: [batch, m, k] times [batch, k, n]."""
    return append("bmm", "MatMul", [variable("bmm", "x", x, rank=3), variable("bmm", "y", y, rank=3)])


@function()
def dot(x: Variable, y: Variable, *, name: str | None = None) -> Variable:
    """The sum of x * y over the last dimension: of two vectors, a scalar; of [batch, n], [batch]."""
    call = "dot"
    rank = len(variable(call, "x", x, dtypes=FLOATING, min_rank=1).shape or ())
    if rank > 2:
        raise ArgumentError(f"{call}: x '{x.name}' must have 1 or 2 dimensions, not {rank}")
    variable(call, "y", y, dtypes=FLOATING, rank=rank)
    return append(call, "Einsum", [x, y], attrs={"equation": "i,i->" if rank == 1 else "bi,bi->b"})


@function()
def einsum(equation: str, *operands: Variable, name: str | None = None) -> Variable:
    """Einstein summation, as numpy's: ``einsum("bij,bjk->bik", a, b)``. Operands: float, of one type."""
    call = "einsum"
    if not isinstance(equation, str):
        raise ArgumentTypeError(f"{call}: the equation comes first, a string, not {equation!r}")
    if not operands:
        raise ArgumentError(f"{call}: no operands")
    inputs = [variable(call, f"operand {i}", item, dtypes=FLOATING) for i, item in enumerate(operands)]
    return append(call, "Einsum", inputs, attrs={"equation": equation.replace(" ", "")})


@function()
def linear(x: Variable, weight: Variable, bias: Variable | None = None, *, name: str | None = None) -> Variable:
    """x @ weight + bias. ``x``: float [.., in]; ``weight`` [in, out] (torch's is transposed); ``bias`` [out]."""
    call = "linear"
    variable(call, "x", x, dtypes=FLOATING, min_rank=1)
    variable(call, "weight", weight, dtypes=(str(x.dtype),), rank=2)
    put = appending(call)
    y = put("MatMul", x, weight)
    if bias is None:
        return y
    return put("Add", y, variable(call, "bias", bias, dtypes=(str(x.dtype),), rank=1))


def _triangle(call: str, x: Variable, diagonal: int, upper: int) -> Variable:
    variable(call, "x", x, min_rank=2)
    offset = np.array(whole(call, "diagonal", diagonal, -LARGEST), np.int64)
    return append(call, "Trilu", [x, offset], attrs={"upper": upper})


@function()
def tril(x: Variable, diagonal: int = 0, *, name: str | None = None) -> Variable:
    """``x`` with zeros above the ``diagonal`` of its last two dimensions."""
    return _triangle("tril", x, diagonal, 0)


@function()
def triu(x: Variable, diagonal: int = 0, *, name: str | None = None) -> Variable:
    """``x`` with zeros below the ``diagonal`` of its last two dimensions."""
    return _triangle("triu", x, diagonal, 1)
