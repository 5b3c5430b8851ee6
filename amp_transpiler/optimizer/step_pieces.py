"""Pieces of a training step that a decorated optimizer puts together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.context import operator_role
from amp_transpiler.ir.nodes import SCALING, Variable
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.ops.training.scaling import master_type
from amp_transpiler.optimizer.pairs import ParamsGrads
from amp_transpiler.optimizer.update_rule import UpdateRule
from amp_transpiler.passes.autodiff.backward import listed_parameters
from amp_transpiler.passes.view.reached import reached
from amp_transpiler.program import Program

#: One loss or several.
Losses = Variable | Sequence[Variable]


def checked_losses(loss: Any) -> list[Variable]:
    """One loss or several, all of one program; errors for anything else."""
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    if not losses:
        raise ArgumentError("there is no loss in the list of losses")
    for each in losses:
        if not isinstance(each, Variable):
            raise ArgumentTypeError(f"loss must be a Variable, not {type(each).__name__}")
        if each.program is not losses[0].program:
            raise ArgumentError(f"losses '{losses[0].name}' and '{each.name}' belong to different programs")
    return losses


def wide_loss(loss: Variable) -> Variable:
    """The loss in fp32."""
    return _cast(loss, "float32")


def wide_gradient(grad: Variable) -> Variable:
    """The gradient in fp32 (fp64 for fp64)."""
    with operator_role(SCALING):
        wide = _cast(grad, master_type(grad.dtype))
    wide.grad_of, wide.rows = grad.grad_of, grad.rows
    return wide


def _cast(value: Variable, dtype: str) -> Variable:
    if value.dtype == dtype:
        return value
    wide = value.program.fresh_variable(f"{value.name}.cast_fp32", dtype, value.shape)
    value.program.add_operator("Cast", [value], [wide], attrs={"to": ONNX_TYPES[dtype]})
    return wide


def summed(losses: Sequence[Variable]) -> Variable:
    """The loss, or the sum of several in fp32."""
    if len(losses) == 1:
        return losses[0]
    program, wide = losses[0].program, [wide_loss(loss) for loss in losses]
    shape = max((loss.shape or () for loss in wide), key=len)  # each is of shape [] or [1]
    total = program.fresh_variable(f"{losses[0].name}@SUM", "float32", shape)
    program.add_operator("Sum", wide, [total])
    return total


def made_of(sources: Collection[Variable]) -> set[Variable]:
    """The variables, and all that is computed from them."""
    return set(reached(sources, lambda source: (v for op, _ in source.readers for v in op.outputs)))


def _owners(optimizers: Sequence[UpdateRule], program: Program) -> dict[Variable, UpdateRule]:
    """The optimizer of each parameter that is in a list of one. ArgumentError: a parameter of two optimizers."""
    owner: dict[Variable, UpdateRule] = {}
    for optimizer in optimizers:
        for parameter in listed_parameters(program, optimizer.parameter_list or (), type(optimizer).__name__):
            if owner.setdefault(parameter, optimizer) is not optimizer:
                raise ArgumentError(
                    f"parameter '{parameter.name}' is in the parameter_list of two optimizers, "
                    f"{type(owner[parameter]).__name__} and {type(optimizer).__name__}; give it to one of them"
                )
    return owner


def shares(
    optimizers: Sequence[UpdateRule], program: Program, params_grads: ParamsGrads
) -> list[tuple[UpdateRule, ParamsGrads]]:
    """The pairs of each optimizer. ArgumentError: a parameter of two optimizers, or of none."""
    owner = _owners(optimizers, program)
    rest = next((optimizer for optimizer in optimizers if optimizer.parameter_list is None), None)
    found_shares: dict[UpdateRule, ParamsGrads] = {optimizer: [] for optimizer in optimizers}
    for parameter, grad in params_grads:
        found = owner.get(parameter, rest)
        if found is None:
            raise ArgumentError(
                f"parameter '{parameter.name}' is in the parameter_list of no optimizer; add it "
                "to one, or leave its gradient out"
            )
        found_shares[found].append((parameter, grad))
    return [(optimizer, pairs) for optimizer, pairs in found_shares.items() if pairs]


def check_none_idle(optimizers: Sequence[UpdateRule], program: Program, params_grads: ParamsGrads) -> None:
    """ArgumentError: an optimizer for none of these parameters."""
    busy = {optimizer for optimizer, _ in shares(optimizers, program, params_grads)}
    idle = next((optimizer for optimizer in optimizers if optimizer not in busy), None)
    if idle is not None:
        raise ArgumentError(
            f"{type(idle).__name__} has no parameter with a gradient in this step; leave it out, "
            "or give it a parameter_list that the loss depends on"
        )


def listed(optimizers: Sequence[UpdateRule], program: Program) -> list[Variable] | None:
    """The parameters that the optimizers are for; None for all."""
    if any(optimizer.parameter_list is None for optimizer in optimizers):
        return None
    return list(_owners(optimizers, program))
