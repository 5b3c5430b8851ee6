"""Finite check, unscale and loss-scale update, appended to a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir import context
from amp_transpiler.ir.infer import one_element
from amp_transpiler.ir.nodes import OWN, SCALING, Operator, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.ops.training.scaling import CHECK, UPDATE_SCALE, master_type
from amp_transpiler.optimizer.state import owned_name
from amp_transpiler.option_checks import LARGEST_COUNT, is_finite, switch, whole
from amp_transpiler.passes.autodiff.sparse_gradient import replacement
from amp_transpiler.program import Program


@paddle_arguments("scaling")
def check_finite_and_unscale(grads: Sequence[Variable], scale: Variable) -> tuple[list[Variable], Variable]:
    """Divide gradients by the loss scale and find out whether all are finite.

    Args:
        grads: float variables of one program, any shapes.
        scale: fp32 variable with one element, the factor that the loss was multiplied with.

    Returns:
        (unscaled gradients, found_inf). The former are fp32 whatever the gradients' type (fp64 for fp64):
        ``g * (1 / scale)``, computed in fp32. ``found_inf`` is a bool variable of shape [1], true where any
        *unscaled* element is NaN or infinite, a scale of 0 or NaN included. Gradients whose sum is beyond
        fp32 (above 3.4e38) count as infinite.

    Raises:
        ArgumentTypeError: not a list of variables, or element types other than these.
        ArgumentError: an empty list, or a scale that is not one element.
    """
    program = _gradients("check_finite_and_unscale", grads)
    _one_element("scale", scale, "float32")
    unscaled = [replacement(grad, f"{grad.name}@UNSCALED", master_type(grad.dtype)) for grad in grads]
    found_inf = program.add_variable(owned_name("found_inf", program), "bool", (1,))
    with context.operator_role(SCALING):
        attrs = {"n": len(grads), **_whose(grads)}
        program.add_operator(CHECK, [scale, *grads], [found_inf, *unscaled], attrs=attrs, domain=OWN)
    return unscaled, found_inf


def extend_check(check: Operator, grads: Sequence[Variable]) -> list[Variable]:
    """Let a finite check that is there read more gradients: its found_inf is over all. Returns the unscaled ones."""
    _gradients("check_finite_and_unscale", grads)
    unscaled = [replacement(grad, f"{grad.name}@UNSCALED", master_type(grad.dtype)) for grad in grads]
    for grad, new in zip(grads, unscaled, strict=True):
        slot = len(check.inputs)
        check.set_input(slot, grad)
        check.set_output(slot, new)
    check.attrs["n"] = len(check.inputs) - 1
    for name, value in _whose(grads).items():
        check.attrs[name] = value
    return unscaled


def _whose(grads: Sequence[Variable]) -> dict[str, int]:
    """The attribute of a check of gradients of which each rank has others."""
    dealt = any(grad.grad_of is not None and grad.grad_of.dealt is not None for grad in grads)
    return {"over_ranks": 1} if dealt else {}


@paddle_arguments("scaling")
def update_loss_scaling(
    grads: Sequence[Variable],
    found_inf: Variable,
    prev_loss_scaling: Variable,
    num_good_steps: Variable,
    num_bad_steps: Variable,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int,
    incr_ratio: float,
    decr_ratio: float,
    stop_update: bool = False,
) -> tuple[list[Variable], Variable, Variable, Variable]:
    """PaddlePaddle's dynamic loss scaling::

        if found_inf: good = 0; bad += 1; if bad == decr_every_n_nan_or_inf: scale = max(scale * decr_ratio, 1); bad = 0
        else:         bad = 0; good += 1; if good == incr_every_n_steps: scale *= incr_ratio unless not finite; good = 0

    Args:
        grads: float variables; zero in the result where ``found_inf``. May be empty.
        found_inf: bool, one element. prev_loss_scaling: fp32, one element.
        num_good_steps, num_bad_steps: int32, one element.
        incr_every_n_steps, decr_every_n_nan_or_inf: thresholds >= 1, compared for equality.
        incr_ratio: >= 1. decr_ratio: in (0, 1].
        stop_update: leave the scale and the counters as they are.

    Returns:
        (grads, loss_scaling, num_good_steps, num_bad_steps), new variables. Scale and counters that are
        persistable take the new values when the step ends.

    Raises:
        ArgumentTypeError, ArgumentError: as above.
    """
    stays = switch("update_loss_scaling: stop_update", stop_update)
    attrs: dict[str, Any] = scaling_attributes(
        "update_loss_scaling", incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio
    )
    if not isinstance(grads, (list, tuple)) or grads:
        _gradients("update_loss_scaling", grads)
    state = [prev_loss_scaling, num_good_steps, num_bad_steps]
    _one_element("found_inf", found_inf, "bool")
    for name, variable, dtype in zip(
        ("prev_loss_scaling", "num_good_steps", "num_bad_steps"), state, ("float32", "int32", "int32"), strict=True
    ):
        _one_element(name, variable, dtype)
    return append_scale_update(grads, found_inf, state, {**attrs, "stop_update": stays})


def append_scale_update(
    grads: Sequence[Variable], found_inf: Variable, state: Sequence[Variable], attrs: dict[str, Any]
) -> tuple[list[Variable], Variable, Variable, Variable]:
    """``UpdateLossScaling`` over ``state`` (scale, good steps, bad steps), with all its attributes; see above."""
    program = found_inf.program
    new = [program.fresh_variable(f"{v.name}@NEW", v.dtype, v.shape) for v in state]
    zeroed = [replacement(grad, f"{grad.name}@ZEROED") for grad in grads]
    with context.operator_role(SCALING):
        program.add_operator(UPDATE_SCALE, [found_inf, *state, *grads], [*new, *zeroed], attrs=attrs, domain=OWN)
    for variable, value in zip(state, new, strict=True):
        if variable.persistable:
            program.set_update(variable, value)
    return zeroed, new[0], new[1], new[2]


def scaling_attributes(
    owner: str, incr_every_n_steps: Any, decr_every_n_nan_or_inf: Any, incr_ratio: Any, decr_ratio: Any
) -> dict[str, Any]:
    """The four numbers of dynamic loss scaling, checked; ArgumentError names the one that is out of range."""
    for name, value in (
        ("incr_every_n_steps", incr_every_n_steps),
        ("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf),
    ):
        whole(f"{owner}: {name}", value, 1, LARGEST_COUNT)
    for name, value in (("incr_ratio", incr_ratio), ("decr_ratio", decr_ratio)):
        if not is_finite(value):
            raise ArgumentError(f"{owner}: {name} is {value!r}; expected a number")
    if incr_ratio < 1:
        raise ArgumentError(f"{owner}: incr_ratio is {incr_ratio!r}; a scale grows by a factor of at least 1")
    if not 0 < decr_ratio <= 1:
        raise ArgumentError(f"{owner}: decr_ratio is {decr_ratio!r}; a scale shrinks by a factor in (0, 1]")
    return {
        "incr_every_n_steps": int(incr_every_n_steps),
        "decr_every_n_nan_or_inf": int(decr_every_n_nan_or_inf),
        "incr_ratio": float(incr_ratio),
        "decr_ratio": float(decr_ratio),
    }


def _gradients(owner: str, grads: Any) -> Program:
    if not isinstance(grads, (list, tuple)) or not all(isinstance(g, Variable) for g in grads):
        raise ArgumentTypeError(f"{owner}: grads is {grads!r}; expected a list of variables")
    if not grads:
        raise ArgumentError(f"{owner}: grads is empty; there is nothing to check")
    for grad in grads:
        if grad.dtype not in FLOATS:
            raise ArgumentTypeError(
                f"{owner}: gradient '{grad.name}' is {grad.dtype}; expected {', '.join(sorted(FLOATS))}"
            )
    program: Program = grads[0].program
    return program


def _one_element(name: str, variable: Any, dtype: str) -> None:
    if not isinstance(variable, Variable) or variable.dtype != dtype:
        raise ArgumentTypeError(f"{name} is {variable!r}; expected a variable of element type {dtype}")
    if not one_element(variable.shape):
        raise ArgumentError(f"{name} '{variable.name}' has shape {variable.shape}; expected one element")
