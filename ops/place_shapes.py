"""Bodies for places that lack kernels (see :mod:`.place_bodies`): what cuts, spreads and passes through."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ops.common import padded_axis, size_of, sliced
from amp_transpiler.ops.place_bodies import Asked, body, integers_in

#: Times a number of fp32, and less what that is more than the number: the upper half of its digits.
_HALVES = 2.0**12 + 1


@body("Dropout")
def _dropout(
    e: Emitter, op: Asked, x: Value, ratio: Value | None = None, mode: Value | None = None
) -> list[Value] | None:
    """As it is evaluated, which drops nothing; in training it has a rule of its own."""
    if (mode is not None and integers_in(e, mode) != [0]) or (len(op.results) > 1 and x.shape is None):
        return None
    return [x, *(e.Expand(e.const(True), e.ints(*size_of(x)), shape=x.shape) for _ in op.results[1:])]


@body("CenterCropPad")
def _center_crop_pad(e: Emitter, op: Asked, x: Value, wanted: Value) -> Sequence[Value] | None:
    sizes = integers_in(e, wanted)
    if x.shape is None or sizes is None:
        return None
    for axis, size in zip(op.attrs.get("axes") or range(len(x.shape)), sizes, strict=True):
        at = int(axis) % len(size_of(x))
        more = size - size_of(x)[at]
        x = sliced(e, x, at, -more // 2, -more // 2 + size) if more < 0 else x
        x = padded_axis(e, x, at, more // 2, more - more // 2) if more > 0 else x
    return [x]


@body("SpaceToDepth")
def _space_to_depth(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    if x.shape is None:
        return None
    n, c, h, w = x.shape
    block = int(op.attrs["blocksize"])
    apart = e.reshape(x, (n, c, h // block, block, w // block, block))
    return [e.reshape(e.transpose(apart, [0, 3, 5, 1, 2, 4]), (n, c * block**2, h // block, w // block))]


@body("Mod")
def _mod(e: Emitter, op: Asked, x: Value, by: Value) -> Sequence[Value] | None:
    """What is left has the sign of x by fmod, and of what divides it without, which integers alone can be."""
    if x.dtype in FLOATS and op.attrs.get("fmod", 0):
        return [e.cast(_rest(e, e.f32(x), e.f32(by)), x.dtype)]
    if x.dtype not in ("int32", "uint32"):
        return None
    left = e.Sub(x, e.Mul(e.Div(x, by), by))
    if x.dtype == "uint32" or op.attrs.get("fmod", 0):
        return [left]
    zero = e.const(0, "int32")
    apart = e.Xor(e.Less(left, zero), e.Less(by, zero))
    return [e.Where(e.And(apart, e.Not(e.Equal(left, zero))), e.Add(left, by), left)]


def _rest(e: Emitter, x: Value, by: Value) -> Value:
    """What is left of x, in fp32: exact for quotients below 4,096, for the divisor is taken in two halves of its
    digits, whose multiples are exact."""
    size, whole = e.Abs(x), e.Abs(by)
    spread = e.Mul(whole, e.like(_HALVES, whole))
    high = e.Sub(spread, e.Sub(spread, whole))
    times = e.Floor(e.Div(size, whole))
    rest = e.Sub(e.Sub(size, e.Mul(times, high)), e.Mul(times, e.Sub(whole, high)))
    rest = e.Where(e.Less(rest, e.like(0, rest)), e.Add(rest, whole), rest)
    rest = e.Where(e.GreaterOrEqual(rest, whole), e.Sub(rest, whole), rest)
    rest = e.Where(e.Less(size, whole), size, rest)
    return e.Where(e.Less(x, e.like(0, x)), e.Neg(rest), rest)
