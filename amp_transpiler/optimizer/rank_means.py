"""Gradients reduced over ranks, appended to a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GradientError
from amp_transpiler.ir import context
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import declare_outputs
from amp_transpiler.ir.nodes import OWN, SCALING, Operator, Variable
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.ops.training.all_reduce import ALL_GATHER, ALL_REDUCE
from amp_transpiler.ops.training.dealt_tables import SEND
from amp_transpiler.ops.training.sparse import MERGE
from amp_transpiler.optimizer.rank_agreement import in_one_order, of_all_ranks
from amp_transpiler.optimizer.step_pieces import made_of
from amp_transpiler.option_checks import shown
from amp_transpiler.passes.autodiff.sparse_gradient import append_merged, replacement
from amp_transpiler.passes.view.synchronized import synchronize
from amp_transpiler.runtime.collective.current import several


def all_reduced(grads: Sequence[Variable], precision: str | None, op: str = "mean") -> list[Variable]:
    """The means of gradients over the ranks, of the gradients' types; those that are means already, or are made of
    some, as they are.

    ``precision``: the element type in which they travel; None: what the optimizer says to which they go.
    """
    program = grads[0].program
    synchronize(program)
    if precision is not None:
        _settle(program, precision)
    done = reduced_gradients(program) if op == "mean" else set()
    own = in_one_order([grad for grad in dict.fromkeys(grads) if grad not in done])
    attrs = ({} if precision is None else {"precision": precision}) | ({} if op == "mean" else {"op": op})
    sent = {grad: replacement(grad, f"{grad.name}@REDUCED") for grad in own if grad.rows is None}
    whole = next((grad for grad in sent if grad.grad_of is not None and grad.grad_of.dealt is not None), None)
    if whole is not None:
        raise GradientError(
            f"the gradient '{whole.name}' is one of a whole table, whose rows are dealt out among the ranks; each "
            "rank's program must look rows of it up, and have gradients of them"
        )
    if sent:
        with context.operator_role(SCALING):
            program.add_operator(ALL_REDUCE, [*sent], [*sent.values()], attrs=attrs, domain=OWN)
    # Tables last, the first one last of all: the order is that in which gradients are made on one rank.
    made = sent | {grad: _rows_of_all(grad, attrs) for grad in reversed(own) if grad.rows is not None}
    return [made.get(grad, grad) for grad in grads]


def holds_variables(items: Sequence[Any]) -> bool:
    """Whether a list is one of variables, or of pairs of them."""
    return any(isinstance(item[0] if isinstance(item, tuple) and item else item, Variable) for item in items)


def reduced_by_hand(items: Sequence[Any], op: str, precision: str | None) -> list[Any]:
    """What ``amp.distributed.all_reduce`` makes of variables, None, or pairs of a parameter and its gradient or None.

    ArgumentTypeError: anything else among them.
    """
    pairs = all(isinstance(item, tuple) for item in items)
    flat = [v for item in items for v in (item if isinstance(item, tuple) else (item,)) if v is not None]
    wrong = next((v for v in flat if not isinstance(v, Variable)), None)
    if wrong is not None or any(isinstance(item, tuple) != pairs or (pairs and len(item) != 2) for item in items):
        raise ArgumentTypeError(
            f"all_reduce takes variables of a program, or [(parameter, gradient)]; it was given {shown(items)}"
        )
    if several() is None:
        return list(items)
    program = flat[0].program
    with unchanged_on_error(program):
        if not pairs:
            given = [v for v in items if v is not None]
            made = dict(zip(given, _reduced(given, op, precision), strict=True))
            return [None if v is None else made[v] for v in items]
        there = of_all_ranks([pair for pair in items if pair[1] is not None], program.parameters)
        means = _reduced([grad for _, grad in there], op, precision) if there else []
        found = {parameter: mean for (parameter, _), mean in zip(there, means, strict=True)}
        return [(p, found.pop(p, None)) for p, _ in items] + list(found.items())


def _reduced(values: Sequence[Variable], op: str, precision: str | None) -> list[Variable]:
    """Reduced gradients, and what is none one by one."""
    grads = made_of([v for v in values[0].program.variables if v.grad_of is not None])
    own = [v for v in values if v in grads]
    made = dict(zip(own, all_reduced(own, precision, op), strict=True)) if own else {}
    return [made[v] if v in made else _value_reduced(v, op, precision) for v in values]


def _value_reduced(value: Variable, op: str, precision: str | None) -> Variable:
    attrs = {"precision": precision or value.dtype} | ({} if op == "mean" else {"op": op})
    new = replacement(value, f"{value.name}@REDUCED")
    value.program.add_operator(ALL_REDUCE, [value], [new], attrs=attrs, domain=OWN)
    return new


def reduced_gradients(program: Graph) -> set[Variable]:
    """The gradients that are means over ranks, and all that is made of them."""
    return made_of([v for op in program.operators if _reduces(op) for v in op.outputs if v is not None])


def _reduces(op: Operator) -> bool:
    """Whether an operator gives gradients of all ranks, dense or merged from rows."""
    ranks = op.type == ALL_REDUCE or (op.type == MERGE and "ranks" in op.attrs)
    return op.domain == OWN and ranks and op.role == SCALING and op.attrs.get("op", "mean") == "mean"


def _settle(program: Graph, precision: str) -> None:
    """Say in which type gradients travel whose reduction left that open."""
    for op in program.operators:
        if op.domain == OWN and op.type in (ALL_REDUCE, ALL_GATHER, SEND) and "precision" not in op.attrs:
            op.attrs["precision"] = precision
            program.touch()


def _rows_of_all(grad: Variable, attrs: Mapping[str, str]) -> Variable:
    """The mean of a sparse gradient: the rows of all ranks, or those that lie on this one, merged."""
    engine, program, table = several(), grad.program, grad.grad_of
    assert engine is not None and table is not None and table.shape is not None
    rows, values = (program.fresh_variable(f"{grad.name}@{what}", None, None) for what in ("ROWS", "ALL"))
    if "op" in attrs:
        raise ArgumentError(f"all_reduce: '{grad.name}' is a sparse gradient, of which there is a mean alone")
    type_, more = (ALL_GATHER, {}) if table.dealt is None else (SEND, {"size": table.shape[0]})
    more |= {"ranks": engine.size, **attrs}
    with context.operator_role(SCALING):
        declare_outputs(program.add_operator(type_, [grad.rows, grad], [rows, values], attrs=more, domain=OWN))
        values.grad_of, values.rows = table, rows
        return append_merged(table, [values], f"{grad.name}@REDUCED", ranks=engine.size)
