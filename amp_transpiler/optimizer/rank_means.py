"""Gradients reduced over ranks, appended to a program."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir import context
from amp_transpiler.ir.nodes import OWN, SCALING, Variable
from amp_transpiler.ops.training.all_reduce import ALL_REDUCE
from amp_transpiler.passes.autodiff.sparse_gradient import append_dense
from amp_transpiler.runtime.collective.current import current


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    engine = current()
    return engine is not None and engine.size > 1


def all_reduced(grads: Sequence[Variable], precision: str) -> list[Variable]:
    """The means of gradients over the ranks, of the gradients' types; those that are means already as they are.

    ``precision``: the element type in which they travel.
    """
    found = [grad if _is_reduced(grad) else _whole(grad) for grad in grads]
    sent = [grad for grad in found if not _is_reduced(grad)]
    if not sent:
        return found
    program = sent[0].program
    made = {}
    for grad in sent:
        new = program.add_variable(program.unique(f"{grad.name}@REDUCED"), grad.dtype, grad.shape)
        new.grad_of = grad.grad_of
        made[grad] = new
    with context.operator_role(SCALING):
        program.add_operator(ALL_REDUCE, sent, [*made.values()], attrs={"precision": precision}, domain=OWN)
    return [made.get(grad, grad) for grad in found]


def _is_reduced(grad: Variable) -> bool:
    op = grad.producer
    return op is not None and op.type == ALL_REDUCE and op.domain == OWN


def _whole(grad: Variable) -> Variable:
    return grad if grad.rows is None else append_dense(grad, f"{grad.name}@DENSE")
