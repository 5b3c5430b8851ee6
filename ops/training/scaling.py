"""Loss scaling: the finite check with the unscale, the scale's state machine, and the gate of a step.

``CheckFiniteAndUnscale(scale, g1 … gn) -> (found_inf, u1 … un)`` widens every gradient to fp32,
multiplies it by ``1/scale`` and gives one found_inf over all of them.

``UpdateLossScaling(found_inf, scale, good, bad[, x1 … xn]) -> (scale, good, bad[, x1 … xn])`` is
PaddlePaddle's state machine of 2020 and later, operator by operator. :data:`RULE` lists the attributes that
make other state machines of it.

``CountBadSteps(found_inf, scale, bad, in_a_row, loss_in_a_row, at_floor, loss1 … lossn) -> (in_a_row,
loss_in_a_row, at_floor)`` counts what an alarm looks at; it is in a program only where an alarm is on.

``GateState(found_inf, old, new) -> value`` keeps ``old`` on a bad step; it stands behind state that the
forward pass writes (running statistics), while update operators gate what they write themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Types
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ops.common import once, unwidened
from amp_transpiler.ops.row_sums import remember_rows
from amp_transpiler.ops.training.all_reduce import ALL_REDUCE
from amp_transpiler.ops.training.exchange import exchanged
from amp_transpiler.ops.training.few_rows import few_rows, unscaled_rows
from amp_transpiler.ops.training.remaining import without_remaining
from amp_transpiler.ops.training.rows import alone, joined, parts, rows_of

CHECK, UPDATE_SCALE, GATE = "CheckFiniteAndUnscale", "UpdateLossScaling", "GateState"
COUNT_BAD = "CountBadSteps"

#: Optional attributes of ``UpdateLossScaling`` with their defaults, which give PaddlePaddle's rule. ``floor`` and
#: ``ceiling`` (0: none) bound a decrease and a growth, or with ``clamp_always`` every step. ``finite_growth``: a growth
#: that leaves fp32 does not happen. ``at_least``: thresholds fire on ``>=`` instead of ``==``. ``accumulate``: the
#: count of bad steps outlives good steps, up to the next growth. ``hysteresis``: it also outlives a decrease, so that
#: every further bad step decreases. ``growth_delay``: good steps that do not count after a bad one.
RULE: dict[str, float | int | bool] = {
    "floor": 1.0,
    "ceiling": 0.0,
    "clamp_always": False,
    "finite_growth": True,
    "at_least": False,
    "accumulate": False,
    "hysteresis": False,
    "growth_delay": 0,
}

#: Elements of gradients that are worth the small operators which spare a pass over them. Of larger ones that lie in no
#: flat tensor a copy fits better into memory, where the product that made them has been.
_LARGE = range(2**17, 2**19)
#: Elements of gradients up to which those small operators cost more than what they spare.
_FEW = 2**18
#: Elements in a row from which on the kernel that adds a product is faster than two.
_LONG = 16

Gate = Callable[[Value, Value], Value]


def master_type(dtype: str | None) -> str:
    """The element type that gradients and state of a variable are computed in: fp32, or fp64 for fp64."""
    return "float64" if dtype == "float64" else "float32"


def finite_step(e: Emitter, found_inf: Value) -> Value:
    """A scalar that is true on a good step.

    Not ``Not(found_inf)``: the runtime fuses Not into the Where behind it by swapping its branches, and
    its Where turns −0.0 into +0.0 in the first branch, so that a bad step would change state.
    """
    key = f"not {found_inf.name}"
    if key not in e.shared:
        flag = e.cast(e.reshape(found_inf, ()), "int32")
        e.shared[key] = (e.op("Equal", flag, e.const(0, "int32"), shape=()),)
    return e.shared[key][0]


class Switch:
    """What a bad step does to an update; on a good one, and where nothing is checked, nothing.

    A state takes ``old * keep + value * share``. On a bad step ``keep`` is 1, ``value`` is 0 and ``share`` is -1: the
    product is -0.0, and adding that returns every number, -0.0 too. What is chosen on a good step is the second branch
    of each Where, since the runtime's turns -0.0 into +0.0 in the first.
    """

    def __init__(self, e: Emitter, found_inf: Value | None) -> None:
        self.e = e
        self.bad = None if found_inf is None else e.reshape(found_inf, ())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block a bad step is treated as any other."""
        bad, self.bad = self.bad, None
        try:
            yield
        finally:
            self.bad = bad

    def keep(self, scalar: Value) -> Value:
        """A factor of an old value."""
        return self._on_bad(1, scalar)

    def share(self, scalar: Value) -> Value:
        """The factor of what is added to an old value."""
        return self._on_bad(-1, scalar)

    def added(self, value: Value) -> Value:
        """A tensor that is added, times a share, to an old value."""
        return self._on_bad(0, value)

    def _on_bad(self, number: float, value: Value) -> Value:
        if self.bad is None:
            return value
        e, bad, key = self.e, self.bad, f"{number} on a bad step, else {value.name}"
        return once(e, key, lambda: e.Where(bad, e.like(number, value), value, shape=value.shape))


def add_product(e: Emitter, x: Value, y: Value, factor: Value) -> Value:
    """``x + y * factor``, the factor a scalar; the product is rounded before the sum. One kernel where there is one."""
    shape, one_kernel = x.shape, e.at.gated_add and x.dtype == "float32" and x.shape == y.shape
    if not one_kernel or not shape or 0 in shape or (shape[-1] < _LONG and shape[1:]):
        return e.Add(x, e.Mul(y, e.cast(factor, y.dtype), shape=y.shape), shape=shape)
    lead = (*shape[:-1], 1)
    rows = once(e, f"{factor.name} for rows {lead}", lambda: e.Expand(factor, e.ints(*lead), shape=lead))
    return e.op("GatedAdd", x, y, rows, domain="com.microsoft", dtype=x.dtype, shape=shape)


def blended(e: Emitter, switch: Switch, x: Value, keep: float, y: Value, share: Value) -> Value:
    """``x * keep + y * share``, x an accumulator and both factors scalars; x on a bad step, where y is 0.

    ``y`` is alike, or one zero: that makes 0.0 of -0.0 alone, which an accumulator is not, unless it was set to it.
    """
    kept = switch.keep(e.like(keep, x))
    if x.shape and y.shape == () and keep > 0.5:
        return e.Mul(x, kept)
    return add_product(e, e.Mul(x, kept), y, share)


def gate(e: Emitter, found_inf: Value | None) -> Gate:
    """``f(new, old)``: ``new`` on a good step, ``old`` bit for bit on a bad one; ``new`` where nothing is checked."""
    if found_inf is None:
        return lambda new, old: new
    good = finite_step(e, found_inf)
    return lambda new, old: e.op("Where", good, new, old, shape=old.shape)


def _check_types(op: Operator) -> Types:
    return [("bool", (1,)), *(None if g is None else (master_type(g.dtype), g.shape) for g in op.inputs[1:])]


@lowering_rule(
    own(CHECK),
    native=True,
    infer=_check_types,
    slots=Slots(inputs=("scale",), input_row=("gradient",), outputs=("found_inf",), output_row=("unscaled",)),
)
def _check_finite_and_unscale(e: Emitter, op: Operator, scale: Value, *grads: Value) -> Sequence[Value]:
    """A sum is NaN or infinite where an element is, and times zero it is NaN: one reading pass for each gradient.

    Found_inf is on the unscaled values, so a scale of 0 or NaN is found as well. Finite gradients
    whose sum leaves fp32 count as infinite: no step can be made of them.

    Of fp16 gradients in a flat tensor, and of large ones on CPU, the mean of the scaled ones is looked at, with the
    inverse scale beside it. The mean is finite where they are: their sum in fp32, inside the kernel, stays below 2**16
    times their number. An unscaled one is finite then unless the inverse is above 2**111, which counts as infinite.
    Updates take them as they were: in fp32 their squares are finite too, as those of scaled fp32 ones need not be.
    Those of a mixed program, fp16 ones that were widened, are looked at as they were before. Of a table of which few
    rows were looked up it is the sum of these: elsewhere the gradient is zero, and is not made.

    Where each rank looks at gradients of its own (``over_ranks``), found_inf is that of any.

    The largest tensor is looked at last: what stands last is computed first, each weight's gradient where the backward
    pass reaches it. Behind a tensor of vectors alone they would wait for the whole pass, with all that they read.
    """
    one = e.cast(e.reshape(scale, ()), "float32")
    # Not 1 / one: of that and a factor onnxruntime makes a quotient, which reads what another optimiser removed.
    inverse = e.op("Reciprocal", one, shape=())
    unscaled: list[Value | None] = [None] * len(grads)
    zeros: list[Value] = []
    one_rank = inverse
    for rows in sorted(rows_of(e, op, len(grads)), key=lambda rows: rows.size if rows.chunks == 1 else 0):
        given, inverse = without_remaining(e, [grads[number] for number in rows.numbers], one_rank)
        whole = joined(e, rows, given)
        raw = unwidened(e, whole) if math.prod(whole.shape or ()) > _FEW else whole
        wide = e.cast(whole, master_type(whole.dtype))
        new = e.op("Mul", wide, e.cast(inverse, wide.dtype), shape=wide.shape)
        large = e.at.host and math.prod(raw.shape or ()) in _LARGE
        found = few_rows(e, given[0], rows.chunks)
        few = None if found is None else unscaled_rows(e, given[0], found, inverse)
        if few is not None:
            total = e.cast(e.reduce_sum(few[1]), "float32")
        elif (rows.shapes or large) and raw.dtype == "float16":
            e.shared[before_unscaling(new)] = (raw, inverse)
            total = e.cast(e.op("ReduceMean", raw, keepdims=0, shape=()), "float32")
            largest = e.op("Mul", inverse, e.const(2.0**16, "float32"), shape=())
            zeros.append(e.op("Mul", largest, e.like(0, one), shape=()))
        else:
            total = e.cast(e.reduce_sum(new), "float32")
        zeros.append(e.op("Mul", total, e.like(0, total), shape=()))
        for number, was, part in zip(rows.numbers, given, parts(e, rows, new), strict=True):
            unscaled[number] = part if few is None else remember_rows(e, part, *few)
            if rows.shapes and before_unscaling(new) in e.shared:
                e.shared[alone(part)] = (was, inverse)
    found_inf = e.reshape(e.IsNaN(summed_up(e, zeros), shape=()), (1,))
    if op.attrs.get("over_ranks", 0):
        found_inf = e.cast(exchanged(e, ALL_REDUCE, [e.cast(found_inf, "int32")], op="max")[0], "bool")
    return [found_inf, *(value for value in unscaled if value is not None)]


def scaled(e: Emitter, gradient: Value) -> tuple[Value, Value | None]:
    """A gradient as it was before it was unscaled, with the factor that unscales it, where both are known: fewer bytes.

    Otherwise the gradient and None.
    """
    found = e.shared.get(before_unscaling(gradient))
    return (gradient, None) if found is None else (found[0], found[1])


def summed_up(e: Emitter, numbers: Sequence[Value]) -> Value:
    """The sum of scalars of one type."""
    return numbers[0] if len(numbers) == 1 else e.op("Sum", *numbers, shape=())


def unscaled(e: Emitter, raw: Value, inverse: Value) -> Value:
    """A gradient times the factor that unscales it."""
    new = e.Mul(raw, e.cast(inverse, raw.dtype), shape=raw.shape)
    e.shared[before_unscaling(new)] = (raw, inverse)
    return new


def rescaled(e: Emitter, gradient: Value, factor: Value) -> Value:
    """A gradient times a scalar."""
    raw, inverse = scaled(e, gradient)
    new = e.Mul(gradient, e.cast(factor, gradient.dtype), shape=gradient.shape)
    if inverse is not None:
        e.shared[before_unscaling(new)] = (raw, e.Mul(inverse, factor, shape=()))
    return new


def before_unscaling(gradient: Value) -> str:
    return f"before it was unscaled: {gradient.name}"


def _scaling_types(op: Operator) -> Types:
    return [None if v is None else (v.dtype, v.shape) for v in op.inputs[1:]]


@lowering_rule(
    own(UPDATE_SCALE),
    infer=_scaling_types,
    slots=Slots(("found_inf", "scale", "good", "bad"), ("gradient",), ("scale", "good", "bad"), ("zeroed",)),
)
def _update_loss_scaling(
    e: Emitter, op: Operator, found_inf: Value, scale: Value, good: Value, bad: Value, *grads: Value
) -> Sequence[Value]:
    """With the defaults of :data:`RULE`: thresholds fire on equality; a decrease stops at 1; a growth that leaves the
    format does not happen; a step of one kind clears the count of the other."""
    found = e.reshape(found_inf, ())
    zeroed = [e.op("Where", found, e.like(0, x), x, shape=x.shape) for x in grads]
    if op.attrs["stop_update"]:
        return [scale, good, bad, *zeroed]
    rule = {**RULE, **op.attrs}
    finite = finite_step(e, found_inf)
    old, old_bad = e.reshape(scale, ()), e.reshape(bad, ())
    zero, one = e.const(0, "int32"), e.const(1, "int32")
    good_steps = e.Add(e.reshape(good, ()), one, shape=())
    bad_steps = e.Add(old_bad, one, shape=())
    grows = _reached(e, rule, good_steps, "incr_every_n_steps")
    shrinks = _reached(e, rule, bad_steps, "decr_every_n_nan_or_inf")
    used_up = e.const(rule["decr_every_n_nan_or_inf"] - 1, "int32") if rule["hysteresis"] else zero
    kept_bad = e.Where(grows, zero, old_bad, shape=()) if rule["accumulate"] else zero
    restart = e.const(-int(rule["growth_delay"]), "int32")

    new_scale = e.Where(finite, _grown(e, rule, grows, old), _shrunk(e, rule, shrinks, old), shape=())
    if rule["clamp_always"]:
        new_scale = _at_most(e, _at_least(e, new_scale, rule["floor"]), rule["ceiling"])
    results = [
        new_scale,
        e.Where(finite, e.Where(grows, zero, good_steps), restart, shape=()),
        e.Where(finite, kept_bad, e.Where(shrinks, used_up, bad_steps), shape=()),
    ]
    return [e.reshape(new, was.shape or ()) for new, was in zip(results, (scale, good, bad), strict=True)] + zeroed


def _reached(e: Emitter, rule: dict[str, Any], count: Value, threshold: str) -> Value:
    return e.op("GreaterOrEqual" if rule["at_least"] else "Equal", count, e.const(rule[threshold], "int32"), shape=())


def _grown(e: Emitter, rule: dict[str, Any], grows: Value, old: Value) -> Value:
    larger = _at_most(e, e.Mul(old, e.like(rule["incr_ratio"], old), shape=()), rule["ceiling"])
    if rule["finite_growth"]:
        stays_finite = e.Equal(e.Mul(larger, e.like(0, old)), e.like(0, old))
        grows = e.And(grows, stays_finite)
    return e.Where(grows, larger, old, shape=())


def _shrunk(e: Emitter, rule: dict[str, Any], shrinks: Value, old: Value) -> Value:
    smaller = e.Mul(old, e.like(rule["decr_ratio"], old), shape=())
    return e.Where(shrinks, _at_least(e, smaller, rule["floor"]), old, shape=())


def _at_least(e: Emitter, value: Value, floor: float) -> Value:
    """``value``, or the floor (0: none) where it is below that."""
    return e.Where(e.Less(value, e.like(floor, value)), e.like(floor, value), value, shape=()) if floor else value


def _at_most(e: Emitter, value: Value, ceiling: float) -> Value:
    """``value``, or the ceiling (0: none) where it is above that."""
    return e.Where(e.Less(e.like(ceiling, value), value), e.like(ceiling, value), value, shape=()) if ceiling else value


@lowering_rule(
    own(COUNT_BAD),
    slots=Slots(
        inputs=("found_inf", "scale", "bad", "in_a_row", "loss_in_a_row", "at_floor"),
        input_row=("loss",),
        outputs=("in_a_row", "loss_in_a_row", "at_floor"),
    ),
)
def _count_bad_steps(
    e: Emitter,
    op: Operator,
    found_inf: Value,
    scale: Value | None,
    bad: Value | None,
    in_a_row: Value,
    loss_in_a_row: Value,
    at_floor: Value | None,
    *losses: Value,
) -> Sequence[Value | None]:
    """Lengths of the runs of steps that end now: of bad ones, of ones whose loss is not finite, of ones that are due to
    decrease a scale which is at its floor. Attributes: ``floor``, and of the rule ``decr_every_n_nan_or_inf`` and
    ``at_least``; used for the last of the three alone."""
    finite = finite_step(e, found_inf)

    def run(stops: Value, count: Value) -> Value:
        longer = e.Add(count, e.const(1, "int32"), shape=count.shape)
        return e.op("Where", stops, e.const(0, "int32"), longer, shape=count.shape)

    sums = [e.cast(e.reduce_sum(loss), "float32") for loss in losses]
    total = summed_up(e, sums)
    loss_is_finite = e.Equal(e.Mul(total, e.like(0, total), shape=()), e.like(0, total), shape=())
    counts: list[Value | None] = [run(finite, in_a_row), run(loss_is_finite, loss_in_a_row), None]
    if scale is not None and bad is not None and at_floor is not None:
        rule = {**RULE, **op.attrs}
        due = _reached(e, rule, e.Add(e.reshape(bad, ()), e.const(1, "int32"), shape=()), "decr_every_n_nan_or_inf")
        above = e.Less(e.like(rule["floor"], scale), e.reshape(scale, ()), shape=())
        counts[2] = run(e.Or(finite, above), at_floor)
        counts[2] = e.op("Where", e.Or(e.Or(finite, above), due), counts[2], at_floor, shape=at_floor.shape)
    return counts


@lowering_rule(own(GATE), slots=Slots(inputs=("found_inf", "state", "new"), outputs=("state",), gated=True))
def _gate_state(e: Emitter, op: Operator, found_inf: Value, old: Value, new: Value) -> Sequence[Value]:
    return [gate(e, found_inf)(e.cast(new, old.dtype), old)]
