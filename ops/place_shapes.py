"""Bodies for places that lack kernels (see :mod:`.place_bodies`): what cuts, spreads and passes through."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import padded_axis, size_of, sliced
from amp_transpiler.ops.place_bodies import Asked, body, integers_in


@body("Dropout")
def _dropout(
    e: Emitter, op: Asked, x: Value, ratio: Value | None = None, mode: Value | None = None
) -> list[Value] | None:
    """As it is evaluated, which drops nothing; in training it has a rule of its own."""
    if (mode is not None and integers_in(e, mode) != [0]) or len(op.results) > 1:
        return None
    return [x]


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
    """Of integers: what is left has the sign of x by fmod, and of what divides it without."""
    if x.dtype not in ("int32", "uint32"):
        return None
    left = e.Sub(x, e.Mul(e.Div(x, by), by))
    if x.dtype == "uint32" or op.attrs.get("fmod", 0):
        return [left]
    zero = e.const(0, "int32")
    apart = e.Xor(e.Less(left, zero), e.Less(by, zero))
    return [e.Where(e.And(apart, e.Not(e.Equal(left, zero))), e.Add(left, by), left)]
