"""Attention, decomposed: scaled products, masks, Softmax, grouped heads.

Definition: https://onnx.ai/onnx/operators/ (Attention); the forms of onnxruntime's own operators are brought to it in
``ops/contrib.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import SlotShapes, flops, traits
from amp_transpiler.ops.common import Maybe

#: Added to a masked score: exp of it is 0, and fp16 and bf16 hold it beside any score.
MASKED = -30000.0


def heads_apart(d: Parts, x: Variable, heads: int) -> Variable:
    """[B, S, heads * D] as [B, heads, S, D]."""
    width = d.size(x, 2)
    apart = d.Reshape(x, [0, 0, heads, -1 if width is None else width // heads])
    return d.Transpose(apart, perm=[0, 2, 1, 3])


def heads_together(d: Parts, x: Variable) -> Variable:
    """[B, heads, S, D] as [B, S, heads * D]."""
    heads, size = d.size(x, 1), d.size(x, 3)
    width = -1 if heads is None or size is None else heads * size
    return d.Reshape(d.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, width])


def fixed_size(d: Parts, x: Variable, axis: int, what: str) -> int:
    """The size of X along an axis, which is ``what`` of it; an error where it is not known."""
    size = d.size(x, axis)
    if size is None:
        raise d.open_size(f"the {what} of '{x.name}'")
    return size


@decomposition("Attention")
def attention(
    d: Parts,
    op: Operator,
    q: Variable,
    k: Variable,
    v: Variable,
    mask: Maybe = None,
    past_key: Maybe = None,
    past_value: Maybe = None,
    nonpad: Maybe = None,
) -> list[Maybe]:
    """Q [B, heads, S, D] (or [B, S, heads * D]), K and V with as many heads or a divisor of them."""
    flat = d.rank(q) == 3
    if flat:
        q = heads_apart(d, q, d.whole("q_num_heads", 0))
        k, v = (heads_apart(d, x, d.whole("kv_num_heads", 0)) for x in (k, v))
    if past_key is not None and past_value is not None:
        k, v = d.Concat(past_key, k, axis=2), d.Concat(past_value, v, axis=2)
    seen = [scores(d, q, k)]
    seen.append(capped(d, seen[0]))
    found = shown = seen[1]
    allowed = _window(d, q, k, past_key, nonpad)
    if mask is not None and mask.dtype == "bool":
        allowed = _both(d, _padded(d, mask, k), allowed)
    elif mask is not None:
        mask = d.cast(_padded(d, mask, k), found.dtype)
        shown = d.Add(found, mask) if op.output(3) is not None else found
        found = d.Add(found, d.Clip(mask, MASKED))
    result, probabilities, blind = weigh(d, found, v, allowed)
    wanted = None
    if op.output(3) is not None:
        if allowed is not None:
            shown = d.Where(allowed, shown, d.const(-np.inf, shown.dtype))
        if blind is not None:
            probabilities = d.Where(blind, d.const(0, probabilities.dtype), probabilities)
        wanted = [*seen, shown, probabilities][d.whole("qk_matmul_output_mode", 0)]
    return [heads_together(d, result) if flat else result, k, v, wanted]


def scale_of(d: Parts, q: Variable) -> float:
    """The factor of the scores: as it is given, else 1 / sqrt(head size); an error where that is not known."""
    size = d.size(q, -1)
    if "scale" in d.op.attrs and d.number("scale", 0.0):
        return d.number("scale", 0.0)
    if size is None:
        raise d.error(f"the head size of '{q.name}' is not fixed, and no scale is given")
    return 1 / math.sqrt(size)


def scores(d: Parts, q: Variable, k: Variable) -> Variable:
    """scale * Q K'. The factor goes to Q first: the product of large heads would leave fp16."""
    scale = scale_of(d, q)
    q = d.Mul(q, scale) if scale != 1 else q
    return d.MatMul(q, d.Transpose(grouped(d, q, k), perm=[0, 1, 3, 2]))


def capped(d: Parts, scores: Variable) -> Variable:
    """Scores that stay below ``softcap``, where there is one."""
    softcap = d.number("softcap", 0.0)
    return d.Mul(d.Tanh(d.Div(scores, softcap)), softcap) if softcap else scores


def grouped(d: Parts, q: Variable, k: Variable) -> Variable:
    """K or V, [B, heads, T, size], with each head repeated for the query heads that share it."""
    heads, shared = d.size(q, 1), d.size(k, 1)
    if heads == shared:
        return k
    if not heads or not shared or heads % shared:
        raise d.error(f"{heads} query heads cannot share {shared} key heads")
    wide = d.Expand(d.Unsqueeze(k, [2]), [1, 1, heads // shared, 1, 1])
    return d.Reshape(wide, [0, heads, -1, fixed_size(d, k, 3, "head size")])


def weigh(d: Parts, scores: Variable, v: Variable, allowed: Maybe) -> tuple[Variable, Variable, Maybe]:
    """softmax(scores) V, the softmax, and which of its rows have no allowed place: their result is 0.

    ``allowed`` (bool) masks, as numbers of its own size: neither scores nor their gradient need a selection.
    Scores and probabilities are stored as the lists say: Softmax computes in fp32 inside, and the scores are the result
    of a product, rounded already.
    """
    blind = None
    if allowed is not None:
        scores = d.Add(scores, d.Where(allowed, d.const(0, scores.dtype), d.const(MASKED, scores.dtype)))
        most = d.ReduceMax(d.cast(allowed, "float32"), d.const(np.array([-1])), keepdims=1)
        blind = d.Less(most, d.const(1, "float32"))
    probabilities = d.Softmax(scores, axis=-1)
    result = d.MatMul(probabilities, grouped(d, scores, v))
    if blind is not None:
        result = d.Where(blind, d.const(0, result.dtype), result)
    return result, probabilities, blind


def _both(d: Parts, one: Variable, other: Maybe) -> Variable:
    return one if other is None else d.And(one, other)


def _padded(d: Parts, mask: Variable, k: Variable) -> Variable:
    """A mask that is shorter than the keys masks the rest."""
    have, want = d.size(mask, -1), d.size(k, 2)
    if have is None or want is None or have == want or have == 1:
        return mask
    end = [0] * (2 * d.rank(mask) - 1) + [want - have]
    if mask.dtype == "bool":
        return d.cast(d.Pad(d.cast(mask, "float32"), end, 0.0), "bool")
    return d.Pad(mask, end, d.const(MASKED, mask.dtype))


def _window(d: Parts, q: Variable, k: Variable, past: Maybe, nonpad: Maybe) -> Maybe:
    """Which of the keys each query may look at by position; None where all.

    A query stands behind the past, or at the end of the ``nonpad`` [B] keys that are valid.
    """
    left, right = d.whole("left_window_size", -1), d.whole("right_window_size", -1)
    causal = bool(d.whole("is_causal", 0))
    allowed = None
    column = positions_of(d, k, 2)
    if nonpad is not None:
        nonpad = d.Reshape(nonpad, [-1, 1, 1, 1])
        allowed = d.Less(column, nonpad)
    if not causal and left < 0 and right < 0:
        return allowed
    row = d.Unsqueeze(positions_of(d, q, 2), [1])
    if past is not None:
        row = d.Add(row, length(d, past))
    elif nonpad is not None:
        row = d.Add(row, d.Sub(nonpad, length(d, q)))
    if causal or right >= 0:
        last = row if causal or right == 0 else d.Add(row, d.const(right, "int64"))
        allowed = _both(d, d.GreaterOrEqual(last, column), allowed)
    if left >= 0:
        allowed = _both(d, d.GreaterOrEqual(column, d.Sub(row, d.const(left, "int64"))), allowed)
    return allowed


def length(d: Parts, x: Variable) -> Variable:
    """The size of axis 2 (int64)."""
    size = d.size(x, 2)
    return d.Shape(x, start=2, end=3) if size is None else d.const(np.array([size]))


def positions_of(d: Parts, x: Variable, axis: int) -> Variable:
    """0, 1, 2, … along an axis (int64)."""
    size = d.size(x, axis)
    if size is not None:
        return d.const(np.arange(size))
    end = d.Squeeze(d.Shape(x, start=axis, end=axis + 1), [0])
    return d.Range(d.const(0, "int64"), end, d.const(1, "int64"))


traits("Attention")


@flops("Attention", f"{DOMAIN}::MultiHeadAttention")
def attention_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """The scores, and the weighted sums of V: each element of Q and of the result meets every position of K."""
    q, y = inputs[0], outputs[0]
    k = inputs[1] if len(inputs) > 1 else None
    past = inputs[4] if len(inputs) > 4 and not attrs.get("num_heads") else None
    assert q is not None and y is not None
    if k is None:  # Q, K and V packed: [batch, positions, heads, 3, size]
        return 2 * q[1] * (math.prod(q) // 3 + math.prod(y))
    return 2 * (k[-2] + (past[-2] if past is not None else 0)) * (math.prod(q) + math.prod(y))
