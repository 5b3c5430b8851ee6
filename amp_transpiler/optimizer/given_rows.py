"""Gradients that code of the user's computes of those of sparse tables, whose values belong to rows."""

from __future__ import annotations

from collections.abc import Callable

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.infer import one_element
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.passes.view.constants import constant_content


def keep_rows(parameter: Variable, grad: Variable) -> None:
    """Let a gradient that is computed of the rows of a sparse one, each by itself, be of these rows.

    Scaling and clips do: 0 stays 0 of what stands for no row. ArgumentError where another operator computes it.
    """
    if grad.rows is not None or not parameter.sparse:
        return
    source: Variable | None = grad
    while source is not None and source.rows is None and source.producer is not None:
        op = source.producer
        source = _kept(op)
        if source is None and (lost := _rows_behind(op, parameter)) is not None:
            raise ArgumentError(
                f"gradient '{grad.name}' of '{parameter.name}': operator '{op.label}' ({op.type}) computes it of "
                f"'{lost.name}', which holds some rows of the table alone. Scaling by one number, casts and clips "
                "around 0 keep to these rows; for other code create the table without is_sparse"
            )
    if source is not None and source.rows is not None:
        grad.grad_of, grad.rows = source.grad_of, source.rows


def _rows_behind(op: Operator, parameter: Variable) -> Variable | None:
    """The gradient of rows of the parameter that an operator computes of, by code of the user's."""
    found, seen = [op], {op.key}
    while found:
        op = found.pop()
        for variable in () if op.domain == OWN else op.inputs:
            if variable is not None and variable.rows is not None and variable.grad_of is parameter:
                return variable
            producer = None if variable is None else variable.producer
            if producer is not None and producer.key not in seen:
                seen.add(producer.key)
                found.append(producer)
    return None


def _kept(op: Operator) -> Variable | None:
    """The input of which an operator maps each element by itself, and 0 to 0; None where it is another operator."""
    rule = None if op.domain else _KEEPING.get(op.type)
    return None if rule is None else rule(op)


def _scaled(op: Operator) -> Variable | None:
    x, factor = op.inputs
    if op.type == "Mul" and _is_number(x):
        x, factor = factor, x
    return x if _is_number(factor) else None


def _is_number(variable: Variable | None) -> bool:
    return variable is not None and one_element(variable.shape)


def _clipped(op: Operator) -> Variable | None:
    """What is clipped, where the bounds are constants on both sides of 0."""
    for slot, sign in (1, -1), (2, 1):
        bound = constant_content(op.input(slot))
        if op.input(slot) is not None and (bound is None or sign * as_array(bound).item() < 0):
            return None
    return op.input(0)


_KEEPING: dict[str, Callable[[Operator], Variable | None]] = {
    **dict.fromkeys(("Cast", "Identity", "Neg"), lambda op: op.input(0)),
    **dict.fromkeys(("Mul", "Div"), _scaled),
    "Clip": _clipped,
}
