"""Gradients of some of the parameters whose gradients are unscaled together, where updates are dealt out among ranks.

An update takes gradients as they were before, and the inverse scale among its factors. One that is for some of them
takes those of these as they were: then its step has the same bits as the step of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.flat import Rows
from amp_transpiler.ops.training.rows import alone, are_joined, joined
from amp_transpiler.ops.training.scaling import before_unscaling, scaled


def joined_gradients(e: Emitter, rows: Rows, grads: Sequence[Value]) -> Value:
    """One tensor for gradients of rows."""
    before = [e.shared.get(alone(grad)) for grad in grads]
    known = [pair for pair in before if pair is not None]
    several = len(known) < len(before) or len({inverse.name for _, inverse in known}) > 1
    if several or not rows.shapes or are_joined(e, grads):
        return joined(e, rows, grads)
    raw, inverse = joined(e, rows, [raw for raw, _ in known]), known[0][1]
    new = e.Mul(e.cast(raw, grads[0].dtype), e.cast(inverse, grads[0].dtype), shape=raw.shape)
    e.shared[before_unscaling(new)] = (raw, inverse)
    return new


def rescaled_part(e: Emitter, grad: Value, new: Value, whole: Value) -> None:
    """That a gradient which is a part of several became ``new``, a part of ``whole``, by ``scaling.rescaled``."""
    before, (_, inverse) = e.shared.get(alone(grad)), scaled(e, whole)
    if before is not None and inverse is not None:
        e.shared[alone(new)] = (before[0], inverse)
