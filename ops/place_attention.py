"""What stands for attention whose kernel fails on a place: products, and a softmax between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.ops.common import pieces, size_of
from amp_transpiler.ops.place_bodies import Asked, body


@body("com.microsoft::MultiHeadAttention")
def _multi_head_attention(e: Emitter, op: Asked, *inputs: Value | None) -> Sequence[Value] | None:
    """Of Q [B, S, heads * D], K and V [B, L, heads * D] or [B, heads, L, D]; without a past, giving no scores."""
    q, k, v, bias, mask, added = _slots(inputs, 6)
    if q is None or k is None or v is None or any(inputs[6:]) or len(op.results) > 1 or not _are_known(inputs):
        return None
    if len(size_of(q)) != 3:
        return None
    heads = int(op.attrs["num_heads"])
    if bias is not None:
        widths = [size_of(x)[-1] * (heads if len(size_of(x)) == 4 else 1) for x in (q, k, v)]
        shifts = pieces(e, bias, 0, widths)
        q, k, v = (
            x if len(size_of(x)) == 4 else e.Add(x, b, shape=x.shape) for x, b in zip((q, k, v), shifts, strict=True)
        )
    return _attended(e, op.attrs, [_heads(e, x, heads) for x in (q, k, v)], mask, added)


@body("com.microsoft::Attention")
def _attention(e: Emitter, op: Asked, *inputs: Value | None) -> Sequence[Value] | None:
    """Of X [B, S, D], whose product with packed weights has Q, K and V; without a past."""
    x, weights, bias, mask, past, added = _slots(inputs, 6)
    if x is None or weights is None or past is not None or any(inputs[6:]) or len(op.results) > 1:
        return None
    if not _are_known(inputs) or op.attrs.get("do_rotary"):
        return None
    heads, (batch, rows, _), width = int(op.attrs["num_heads"]), size_of(x), size_of(weights)[1]
    packed = e.MatMul(x, weights, shape=(batch, rows, width))
    packed = packed if bias is None else e.Add(packed, bias, shape=packed.shape)
    sizes = [int(size) for size in op.attrs.get("qkv_hidden_sizes") or [width // 3] * 3]
    parts = zip(pieces(e, packed, 2, sizes), sizes, strict=True)
    apart = [_heads(e, e.reshape(part, (batch, rows, size)), heads) for part, size in parts]
    return _attended(e, op.attrs, apart, mask, added)


def _slots(inputs: Sequence[Value | None], count: int) -> list[Value | None]:
    return [inputs[slot] if slot < len(inputs) else None for slot in range(count)]


def _are_known(inputs: Sequence[Value | None]) -> bool:
    return all(value is None or value.shape is not None for value in inputs)


def _heads(e: Emitter, x: Value, heads: int) -> Value:
    """[B, heads, L, D]."""
    if len(size_of(x)) == 4:
        return x
    batch, rows, width = size_of(x)
    apart = e.reshape(x, (batch, rows, heads, width // heads))
    return e.Transpose(apart, perm=[0, 2, 1, 3], shape=(batch, heads, rows, width // heads))


def _attended(
    e: Emitter, attrs: Mapping[str, Any], parts: Sequence[Value], mask: Value | None, added: Value | None
) -> Sequence[Value] | None:
    """Q, K and V of [B, heads, …, D] to [B, S, heads * D], with a mask [B, L] and what is added to the scores."""
    query, keys, values = parts
    (batch, heads, rows, width), count = size_of(query), size_of(keys)[2]
    if (mask is not None and len(size_of(mask)) != 2) or (attrs.get("unidirectional") and rows != count):
        return None
    scale = float(attrs.get("scale") or 1 / math.sqrt(width))
    turned = e.Transpose(keys, perm=[0, 1, 3, 2], shape=(batch, heads, width, count))
    scores = e.MatMul(e.Mul(query, e.like(scale, query)), turned, shape=(batch, heads, rows, count))
    if added is not None:
        scores = e.Add(scores, added, shape=scores.shape)
    if mask is not None:
        kept = e.Greater(e.reshape(mask, (batch, 1, 1, count)), e.const(0, mask.dtype))
        less = e.like(float(attrs.get("mask_filter_value", -10000.0)), scores)
        scores = e.Add(scores, e.Where(kept, e.like(0.0, scores), less, shape=kept.shape), shape=scores.shape)
    if attrs.get("unidirectional"):
        lowest = e.like(-LIMITS["float16"].largest, scores)  # far below any score, and a number in 16 bit too
        before = e.const(np.tril(np.ones((rows, count), bool)), "bool")
        scores = e.Where(before, scores, lowest, shape=scores.shape)
    weighed = e.MatMul(e.Softmax(scores, axis=-1, shape=scores.shape), values)
    width = size_of(values)[3]
    together = e.Transpose(weighed, perm=[0, 2, 1, 3], shape=(batch, rows, heads, width))
    return [e.reshape(together, (batch, rows, heads * width))]
