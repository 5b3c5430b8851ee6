"""Batch norms of one example by its own statistics, as exporters write them for standardised weights, are layer norms.

NFNets and BiT standardise the weights of a convolution; torch takes them for a batch of one, whose channels are the
rows. The exporter writes out mean and variance and gives them to a BatchNormalization as running ones: its gradient is
two dozen operators for each convolution, and squares stay fp32. A LayerNormalization of the rows is one operator, and
computes in fp32 inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.ops.norm_parts import epsilon_of
from amp_transpiler.passes.canonicalize.matching import computed, holds, maker, reduced_axes, remove, squaring
from amp_transpiler.passes.view.of_type import of_type


@dataclass(frozen=True)
class _Rows:
    """A batch norm of one example: what it normalises, its scale and its bias."""

    last: Operator
    x: Variable
    scale: Variable
    bias: Variable


def normalise_rows(program: Graph) -> list[str]:
    """Put a LayerNormalization in the place of each BatchNormalization of one example by its own statistics; in
    place."""
    found = [rows for op in of_type(program, "BatchNormalization") if (rows := _found(op)) is not None]
    for rows in found:
        _write(rows)
    return [f"{len(found)} batch norms of one example by its own statistics are layer norms"] if found else []


def _found(op: Operator) -> _Rows | None:
    x, scale, bias, mean, variance = op.inputs[:5]
    shape = None if x is None else static(x.shape)
    if x is None or scale is None or bias is None or shape is None or len(shape) < 3 or shape[0] != 1:
        return None
    if op.attrs.get("training_mode", 0) or any(v is not None for v in op.outputs[1:]):
        return None
    square = _mean(variance, keeps=False)
    product = squaring(square)
    centred = None if product is None else maker(product.input(0), "Sub")
    own = centred is not None and centred.input(0) is x and _mean(centred.input(1), keeps=True) is x
    return _Rows(op, x, scale, bias) if own and _mean(mean, keeps=False) is x else None


def _mean(variable: Variable | None, keeps: bool) -> Variable | None:
    """What the variable is a mean of, over all dimensions but the second, which are kept as ones or not."""
    op = maker(variable, "ReduceMean")
    read = None if op is None else op.input(0)
    if op is None or read is None or bool(op.attrs.get("keepdims", 1)) != keeps:
        return None
    rank = len(read.shape or ())
    return read if reduced_axes(op) == [axis for axis in range(rank) if axis != 1] else None


def _write(rows: _Rows) -> None:
    last, x = rows.last, rows.x
    program, made, shape = last.program, last.outputs[0], static(x.shape)
    assert made is not None and shape is not None
    steps = [(type_, v) for type_, v, idle in (("Mul", rows.scale, 1), ("Add", rows.bias, 0)) if not holds(v, idle)]
    name, attrs = last.name, {"axis": 2, "epsilon": epsilon_of(last)}
    remove(last, {x, *(weight for _, weight in steps)})
    ones = program.add_constant(f"{made.name}.ones", np.ones(shape[2:], numpy_dtype(x.dtype or "float32")))
    out = program.fresh_variable(f"{made.name}.tmp", made.dtype, shape) if steps else made
    program.add_operator("LayerNormalization", [x, ones], [out], attrs=attrs, name=name, like=last)
    for index, (type_, weight) in enumerate(steps):
        last_step, before = index + 1 == len(steps), out
        out = made if last_step else program.fresh_variable(f"{made.name}.tmp", made.dtype, shape)
        program.add_operator(type_, [before, _column(last, weight, shape)], [out], like=last)


def _column(like: Operator, weight: Variable, normalised: tuple[int, ...]) -> Variable:
    """A number for each row of what is normalised, with ones behind it."""
    shape = (normalised[1], *[1] * len(normalised[2:]))
    sizes = like.program.add_constant(f"{weight.name}.column", np.array(shape, np.int64))
    return computed(like, "Reshape", [weight, sizes], f"{weight.name}.tmp", shape)
