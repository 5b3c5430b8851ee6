"""Gradients reduced over ranks, appended to a program."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir import context
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import declare_outputs
from amp_transpiler.ir.metadata import ASKED, BY_RANKS, SYNCHRONIZED
from amp_transpiler.ir.nodes import OWN, SCALING, Variable
from amp_transpiler.ops.training.all_reduce import ALL_GATHER, ALL_REDUCE
from amp_transpiler.ops.training.sparse import MERGE
from amp_transpiler.passes.autodiff.sparse_gradient import append_merged
from amp_transpiler.runtime.collective.current import current


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    engine = current()
    return engine is not None and engine.size > 1


def all_reduced(grads: Sequence[Variable], precision: str) -> list[Variable]:
    """The means of gradients over the ranks, of the gradients' types; those that are means already as they are.

    ``precision``: the element type in which they travel.
    """
    for program in {grad.program for grad in grads}:
        _synchronize(program)
    own = [grad for grad in dict.fromkeys(grads) if not _is_reduced(grad)]
    made = {grad: _rows_of_all(grad, precision) for grad in own if grad.rows is not None}
    sent = {grad: _like(grad) for grad in own if grad.rows is None}
    if sent:
        with context.operator_role(SCALING):
            attrs = {"precision": precision}
            grads[0].program.add_operator(ALL_REDUCE, [*sent], [*sent.values()], attrs=attrs, domain=OWN)
    made |= sent
    return [made.get(grad, grad) for grad in grads]


def _synchronize(program: Graph) -> None:
    """Let the norms for which that was asked take their statistics over all ranks."""
    for op in program.operators:
        if op.metadata.get(SYNCHRONIZED) == ASKED:
            op.metadata[SYNCHRONIZED] = BY_RANKS
            program.touch()


def _like(grad: Variable) -> Variable:
    program = grad.program
    new = program.add_variable(program.unique(f"{grad.name}@REDUCED"), grad.dtype, grad.shape)
    new.grad_of = grad.grad_of
    return new


def _is_reduced(grad: Variable) -> bool:
    op = grad.producer
    return op is not None and op.domain == OWN and (op.type == ALL_REDUCE or (op.type == MERGE and "ranks" in op.attrs))


def _rows_of_all(grad: Variable, precision: str) -> Variable:
    """The mean of a sparse gradient: the rows of all ranks, merged."""
    engine, program = current(), grad.program
    assert engine is not None and grad.grad_of is not None
    rows, values = (program.add_variable(program.unique(f"{grad.name}@{what}"), None, None) for what in ("ROWS", "ALL"))
    attrs = {"ranks": engine.size, "precision": precision}
    with context.operator_role(SCALING):
        declare_outputs(program.add_operator(ALL_GATHER, [grad.rows, grad], [rows, values], attrs=attrs, domain=OWN))
        values.grad_of, values.rows = grad.grad_of, rows
        return append_merged(grad.grad_of, [values], f"{grad.name}@REDUCED", ranks=engine.size)
