"""Gradients of tables that are marked sparse: of the rows that the step looks up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_transpiler.ir.infer import declare_outputs
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ops.training.sparse import DENSE, GATHER, MERGE
from amp_transpiler.passes.view.lookups import is_row_lookup


def is_sparse_lookup(op: Operator) -> bool:
    """Whether an operator looks up rows of a parameter that is marked sparse."""
    table = op.input(0)
    return table is not None and table.sparse and table.is_parameter and bool(table.shape) and is_row_lookup(op, 0)


def append_rows(op: Operator, gradient: Variable, name: str) -> Variable:
    """Append the gradient of a lookup's table, as its rows; ``gradient`` is that of what was looked up."""
    table, indices = op.inputs[0], op.inputs[1]
    assert table is not None and indices is not None and table.shape is not None
    return _appended(GATHER, table, name, [indices, gradient], {"size": table.shape[0]})


def alike(table: Variable, parts: Sequence[Variable], name: str) -> list[Variable]:
    """The parts of a table's gradient, merged where all are of rows, else all of the whole table."""
    if not any(part.rows is not None for part in parts):
        return [*parts]
    if all(part.rows is not None for part in parts):
        return [append_merged(table, parts, name)]
    return [part if part.rows is None else append_dense(part, f"{part.name}@DENSE") for part in parts]


def append_merged(table: Variable, parts: Sequence[Variable], name: str, **attrs: int) -> Variable:
    """Append the sum of gradients of rows of a table; with ``ranks`` the mean over so many."""
    return _appended(MERGE, table, name, [v for part in parts for v in (part.rows, part)], attrs)


def append_dense(gradient: Variable, name: str) -> Variable:
    """Append the gradient of the whole table, of its rows."""
    program, table = gradient.program, gradient.grad_of
    assert table is not None
    dense = program.fresh_variable(name, gradient.dtype, table.shape)
    dense.grad_of = table
    program.add_operator(DENSE, [gradient.rows, gradient], [dense], domain=OWN)
    return dense


def _appended(
    type_: str, table: Variable, name: str, inputs: Sequence[Variable | None], attrs: dict[str, Any]
) -> Variable:
    """The gradient of some rows that an operator makes, with its rows beside it."""
    program = table.program
    rows = program.fresh_variable(f"{name}.rows", "int64", None)
    values = program.fresh_variable(name, table.dtype, None)
    values.grad_of, values.rows = table, rows
    op = program.add_operator(type_, inputs, [rows, values], attrs=attrs, domain=OWN)
    declare_outputs(op)
    return values


def replacement(grad: Variable, name: str, dtype: str | None = None) -> Variable:
    """A variable to take the place of a gradient, sparse or not, in its element type or another."""
    new = grad.program.fresh_variable(name, dtype or grad.dtype, grad.shape)
    new.grad_of, new.rows = grad.grad_of, grad.rows
    return new
