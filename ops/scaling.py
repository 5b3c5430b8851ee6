"""Loss scaling: the finite check with the unscale, the scale's state machine, and the gate of a step.

``CheckFiniteAndUnscale(scale, g1 … gn) -> (found_inf, u1 … un)`` widens every gradient to fp32,
multiplies it by ``1/scale`` and gives one verdict over all of them.

``UpdateLossScaling(found_inf, scale, good, bad[, x1 … xn]) -> (scale, good, bad[, x1 … xn])`` is
PaddlePaddle's state machine of 2020 and later, operator by operator.

``GateState(found_inf, old, new) -> value`` keeps ``old`` on a bad step; it stands behind state that the
forward pass writes (running statistics), while update operators gate what they write themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.opdef import body, own
from amp_transpiler.ir.program import Operator, Shape

CHECK, UPDATE_SCALE, GATE = "CheckFiniteAndUnscale", "UpdateLossScaling", "GateState"

Types = list[tuple[str | None, Shape | None] | None]
Gate = Callable[[Value, Value], Value]


def master_type(dtype: str | None) -> str:
    """The element type that gradients and state of a variable are computed in: fp32, or fp64 for fp64."""
    return "float64" if dtype == "float64" else "float32"


def finite_step(e: Emitter, found_inf: Value) -> Value:
    """A scalar that is true on a good step.

    Not ``Not(found_inf)``: the runtime fuses Not into the Where behind it by swapping its branches, and
    its Where turns −0.0 into +0.0 in the first branch, so that a bad step would change state.
    """
    flag = e.cast(e.reshape(found_inf, ()), "int32")
    return e.op("Equal", flag, e.const(0, "int32"), shape=())


def gate(e: Emitter, found_inf: Value | None) -> Gate:
    """``f(new, old)``: ``new`` on a good step, ``old`` bit for bit on a bad one; ``new`` where nothing is checked."""
    if found_inf is None:
        return lambda new, old: new
    good = finite_step(e, found_inf)
    return lambda new, old: e.op("Where", good, new, old, shape=old.shape)


def _check_types(op: Operator) -> Types:
    return [("bool", (1,)), *((master_type(g.dtype), g.shape) if g else None for g in op.inputs[1:])]


@body(own(CHECK), infer=_check_types)
def _check_finite_and_unscale(e: Emitter, op: Operator, scale: Value, *grads: Value) -> Sequence[Value]:
    """A sum is NaN or infinite where an element is, and times zero it is NaN: one reading pass for each gradient.

    The verdict is on the unscaled values, so a scale of 0 or NaN is found as well. Finite gradients
    whose sum leaves fp32 count as infinite: no step can be made of them.
    """
    one = e.cast(e.reshape(scale, ()), "float32")
    inverse = e.op("Div", e.like(1, one), one, shape=())
    unscaled: list[Value] = []
    zeros: list[Value] = []
    for grad in grads:
        wide = e.cast(grad, master_type(grad.dtype))
        unscaled.append(e.op("Mul", wide, e.cast(inverse, wide.dtype), shape=grad.shape))
        total = e.cast(e.reduce_sum(unscaled[-1]), "float32")
        zeros.append(e.op("Mul", total, e.like(0, total), shape=()))
    verdict = e.IsNaN(zeros[0] if len(zeros) == 1 else e.op("Sum", *zeros, shape=()), shape=())
    return [e.reshape(verdict, (1,)), *unscaled]


def _scaling_types(op: Operator) -> Types:
    return [None if v is None else (v.dtype, v.shape) for v in op.inputs[1:]]


@body(own(UPDATE_SCALE), infer=_scaling_types)
def _update_loss_scaling(e: Emitter, op: Operator, found_inf: Value, scale: Value, good: Value, bad: Value,
                         *grads: Value) -> Sequence[Value]:  # fmt: skip
    """Thresholds fire on equality; a decrease stops at 1; a growth that leaves the format does not happen."""
    found = e.reshape(found_inf, ())
    zeroed = [e.op("Where", found, e.like(0, x), x, shape=x.shape) for x in grads]
    if op.attrs["stop_update"]:
        return [scale, good, bad, *zeroed]
    finite = finite_step(e, found_inf)
    old = e.reshape(scale, ())
    zero, one = e.const(0, "int32"), e.const(1, "int32")
    good_steps = e.Add(e.reshape(good, ()), one, shape=())
    bad_steps = e.Add(e.reshape(bad, ()), one, shape=())
    grows = e.Equal(good_steps, e.const(op.attrs["incr_every_n_steps"], "int32"), shape=())
    shrinks = e.Equal(bad_steps, e.const(op.attrs["decr_every_n_nan_or_inf"], "int32"), shape=())

    larger = e.Mul(old, e.like(op.attrs["incr_ratio"], old), shape=())
    stays_finite = e.Equal(e.Mul(larger, e.like(0, old)), e.like(0, old))
    grown = e.Where(e.And(grows, stays_finite), larger, old, shape=())
    smaller = e.Mul(old, e.like(op.attrs["decr_ratio"], old), shape=())
    floored = e.Where(e.Less(smaller, e.like(1, old)), e.like(1, old), smaller, shape=())
    shrunk = e.Where(shrinks, floored, old, shape=())

    results = [
        e.Where(finite, grown, shrunk, shape=()),
        e.Where(finite, e.Where(grows, zero, good_steps), zero, shape=()),
        e.Where(finite, zero, e.Where(shrinks, zero, bad_steps), shape=()),
    ]
    return [e.reshape(new, was.shape or ()) for new, was in zip(results, (scale, good, bad), strict=True)] + zeroed


def _gate_types(op: Operator) -> Types:
    old = op.input(1)
    return [None if old is None else (old.dtype, old.shape)]


@body(own(GATE), infer=_gate_types)
def _gate_state(e: Emitter, op: Operator, found_inf: Value, old: Value, new: Value) -> Sequence[Value]:
    return [gate(e, found_inf)(e.cast(new, old.dtype), old)]


__all__ = ["CHECK", "GATE", "UPDATE_SCALE", "Gate", "finite_step", "gate", "master_type"]
