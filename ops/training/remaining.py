"""The factor that an engine leaves of 16-bit means over ranks, to be multiplied with later.

An engine that adds in 16 bit makes addends smaller by a power of two first, so that no sum overflows; divided by that,
and by the number of ranks, is a factor above 1 where the number is no power of two. It is a run-time scalar: a program
is the same on every engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import once

#: Name of the run-time scalar, before that of what ranks compute.
REMAINING = "remaining "


def remaining(e: Emitter, reduced: Value, op: str) -> Value:
    """A mean (or sum, ``op``) over ranks that travelled in 16 bit, times the factor that the engine has left.

    That of an engine for memory is 1. The check of the gradients takes the factor into the inverse scale.
    """
    factor, wide = e.scalar(f"{REMAINING}{op}"), e.cast(reduced, "float64" if reduced.dtype == "float64" else "float32")
    whole = e.cast(e.Mul(wide, e.cast(factor, wide.dtype), shape=wide.shape), reduced.dtype)
    e.shared[_left(whole)] = (reduced, factor)
    return whole


def without_remaining(e: Emitter, grads: Sequence[Value], inverse: Value) -> tuple[list[Value], Value]:
    """Gradients and their inverse scale; where all have the same factor left, it goes into that."""
    found = [known for grad in grads if (known := e.shared.get(_left(grad))) is not None]
    if len(found) < len(grads) or len({factor.name for _, factor in found}) != 1:
        return [*grads], inverse
    factor = found[0][1]
    key = f"{inverse.name} times {factor.name}"
    return [reduced for reduced, _ in found], once(e, key, lambda: e.op("Mul", inverse, factor, shape=()))


def _left(gradient: Value) -> str:
    return f"as an engine left it: {gradient.name}"
