"""Ranks come to the same gradients while their programs are built, which need not be the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from amp_transpiler.errors import GradientError
from amp_transpiler.ir import context
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import BACKWARD, Variable
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.optimizer.groups import thawed
from amp_transpiler.optimizer.pairs import Names, ParamsGrads, made_at, warn_untrained
from amp_transpiler.passes.autodiff.backward import Wanted, new_gradient, reaches_parameters
from amp_transpiler.passes.autodiff.sparse_gradient import append_dense
from amp_transpiler.runtime.collective.current import several


def appended(
    losses: Sequence[Variable],
    wanted: Wanted,
    append: Callable[[Wanted], ParamsGrads],
    without: Callable[[], object],
    no_grad_set: Names | None,
) -> ParamsGrads:
    """What ``append`` gives, the gradients of ``losses``, on several ranks for each parameter that has one on any.

    A rank whose losses reach no parameter calls ``without``. One warning names the parameters without a gradient;
    GradientError where no rank has one.
    """
    engine, listed = several(), wanted.parameters
    if engine is None:
        pairs = append(wanted)
    else:
        reaches = reaches_parameters(losses, wanted)
        if not reaches:
            without()
        pairs = of_all_ranks(append(replace(wanted, named=frozenset())) if reaches else [], listed)
        _check_reached(losses[0], wanted, pairs)
    if engine is None or engine.rank == 0:
        warn_untrained(thawed(listed), pairs, no_grad_set)
    return pairs


def of_all_ranks(pairs: ParamsGrads, parameters: Sequence[Variable]) -> ParamsGrads:
    """The pairs, in the order of ``parameters``, and zeros for those that have a gradient on other ranks alone.

    Every rank calls it. A gradient that is sparse on some ranks and not, or missing, on others is one of the whole
    table.
    """
    engine = several()
    assert engine is not None
    said = engine.all_gather_object({parameter.name: grad.rows is not None for parameter, grad in pairs})
    named = {parameter.name: parameter for parameter in (*parameters, *(parameter for parameter, _ in pairs))}
    mine = dict(pairs)
    for name in dict.fromkeys(name for of_rank in said for name in of_rank):
        kinds = {of_rank.get(name) for of_rank in said}
        if name not in named:
            rank = next(number for number, of_rank in enumerate(said) if name in of_rank)
            raise GradientError(
                f"rank {rank} has a gradient for parameter '{name}', which the program of rank {engine.rank} does not "
                "train; create the same parameters on every rank"
            )
        parameter = named[name]
        if parameter not in mine:
            mine[parameter] = _zeros(parameter)
        elif len(kinds) > 1 and mine[parameter].rows is not None:
            with context.operator_role(BACKWARD):
                mine[parameter] = append_dense(mine[parameter], f"{mine[parameter].name}@DENSE")
    return [(parameter, mine[parameter]) for parameter in named.values() if parameter in mine]


def in_one_order(grads: Sequence[Variable]) -> list[Variable]:
    """The gradients in the order in which rank 0 makes them, the last one first.

    Every rank calls it. GradientError: ranks have gradients of other parameters, or of other types.
    """
    engine = several()
    assert engine is not None
    keys: dict[str, Variable] = {}
    for number, grad in enumerate(grads):
        key = f"gradient {number}" if grad.grad_of is None else f"parameter '{grad.grad_of.name}'"
        keys[key if key not in keys else f"{key}, gradient {number}"] = grad
    latest = sorted(keys, key=lambda key: made_at(keys[key]), reverse=True)
    said: list[list[list[Any]]] = engine.all_gather_object([[key, _kind(keys[key])] for key in latest])
    of_rank = [dict((key, kind) for key, kind in each) for each in said]
    for rank, kinds in enumerate(of_rank):
        other = next((key for key in {**of_rank[0], **kinds} if of_rank[0].get(key) != kinds.get(key)), None)
        if other is not None:
            first, second = (each.get(other, "none") for each in (of_rank[0], kinds))
            raise GradientError(
                f"ranks reduce other gradients: of {other} rank 0 has {first}, rank {rank} has {second}. Give "
                "[(parameter, gradient)] of every rank to amp.distributed.all_reduce, which adds zeros for the rest"
            )
    return [keys[key] for key in of_rank[0]]


def _kind(grad: Variable) -> str:
    shape = grad.shape if grad.rows is None or grad.grad_of is None else grad.grad_of.shape
    return f"{'rows of ' if grad.rows is not None else ''}{grad.dtype}{list(shape or ())}"


def _check_reached(loss: Variable, wanted: Wanted, pairs: ParamsGrads) -> None:
    """The errors of ``append_backward`` where they hold on every rank."""
    found = {parameter.name for parameter, _ in pairs}
    if not found:
        raise GradientError(
            f"loss '{loss.name}' of program '{loss.program.name}' depends on no parameter, on any rank. Build the "
            "loss from layers with trainable parameters, or pass parameter_list"
        )
    for parameter in wanted.parameters:
        if parameter.name in wanted.named and parameter.name not in found:
            raise GradientError(
                f"loss '{loss.name}' does not depend on parameter '{parameter.name}' of parameter_list, on any rank"
            )


def _zeros(parameter: Variable) -> Variable:
    """A gradient of zeros, whatever the parameter holds."""
    program: Graph = parameter.program
    less = program.fresh_variable(f"{parameter.name}@GRAD.less", "bool", parameter.shape)
    grad = new_gradient(parameter, f"{parameter.name}@GRAD")
    with context.operator_role(BACKWARD):
        program.add_operator("Less", [parameter, parameter], [less])
        program.add_operator("Cast", [less], [grad], attrs={"to": ONNX_TYPES[str(parameter.dtype)]})
    return grad
