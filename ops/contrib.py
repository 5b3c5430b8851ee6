"""Operators of onnxruntime's own domain that its optimisers write into saved models, decomposed.

Their definitions: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; where that is silent,
the CPU kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import SlotShapes, flops, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.lists import keep_fp32
from amp_transpiler.ops.attention import fixed_size, heads_apart, heads_together, positions_of, scale_of, weigh
from amp_transpiler.ops.common import Maybe, given_attributes
from amp_transpiler.ops.unit_norm import rms

_MS = f"{DOMAIN}::"


# -- products and convolutions with more in them ---------------------------------------------------------
@decomposition(_MS + "FusedMatMul", _MS + "TransposeMatMul")
def fused_matmul(d: Parts, op: Operator, a: Variable, b: Variable) -> list[Variable]:
    """alpha * A' B'. The factor goes to A first, so that a large product does not leave fp16."""
    a, b = _transposed(d, a, "A"), _transposed(d, b, "B")
    alpha = d.number("alpha", 1.0)
    return [d.MatMul(d.Mul(a, alpha) if alpha != 1 else a, b)]


def _transposed(d: Parts, x: Variable, which: str) -> Variable:
    rank = d.rank(x)
    perm = list(range(rank))
    if rank > 1 and d.whole(f"transBatch{which}", 0):
        perm = [*perm[1:-1], 0, perm[-1]]
    if rank > 1 and d.whole(f"trans{which}", 0):
        perm = [*perm[:-2], perm[-1], perm[-2]]
    return x if perm == list(range(rank)) else d.Transpose(x, perm=perm)


@decomposition(_MS + "FusedGemm")
def fused_gemm(d: Parts, op: Operator, a: Variable, b: Variable, c: Maybe = None) -> list[Variable]:
    kept = given_attributes(op, "alpha", "beta", "transA", "transB")
    numbers = given_attributes(op, "activation_alpha", "activation_beta", "activation_gamma")
    return [_activated(d, d.Gemm(a, b, c, **kept), list(map(float, numbers.values())))]


@decomposition(_MS + "FusedConv")
def fused_conv(d: Parts, op: Operator, x: Variable, w: Variable, b: Maybe = None, z: Maybe = None) -> list[Variable]:
    """activation(conv(X) + Z)."""
    kept = given_attributes(op, "auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y = d.Conv(x, w, b, **kept)
    return [_activated(d, y if z is None else d.Add(y, z), list(op.attrs.get("activation_params", [])))]


#: Attributes of the activations that onnxruntime fuses, in the order of their parameters.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "Softplus": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
}


def _activated(d: Parts, y: Variable, parameters: list[float]) -> Variable:
    name = str(d.op.attrs.get("activation", ""))
    if not name:
        return y
    if name == "Clip":
        result = d.Clip(y, *parameters)
    elif name in _ACTIVATIONS:
        attributes: dict[str, Any] = dict(zip(_ACTIVATIONS[name], parameters, strict=False))
        result = d.add(name, y, **attributes)
    else:
        raise d.error(f"its activation is '{name}'")
    return result


# -- activations -----------------------------------------------------------------------------------------
@decomposition(_MS + "Gelu", _MS + "BiasGelu")
def gelu(d: Parts, op: Operator, x: Variable, bias: Maybe = None) -> list[Variable]:
    return [d.Gelu(x if bias is None else d.Add(x, bias))]


@decomposition(_MS + "FastGelu")
def fast_gelu(d: Parts, op: Operator, x: Variable, bias: Maybe = None) -> list[Variable]:
    return [d.Gelu(x if bias is None else d.Add(x, bias), approximate="tanh")]


# -- normalisation ---------------------------------------------------------------------------------------
@decomposition(_MS + "SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(
    d: Parts, op: Operator, x: Variable, skip: Variable, scale: Variable, bias: Maybe = None
) -> list[Maybe]:
    total = _with_skip(d, x, skip, bias)
    normal, inverse = rms(d, total, [-1], d.number("epsilon", 1e-12))
    return [d.Mul(d.cast(normal, x.dtype), scale), None, inverse, total]


@decomposition(_MS + "SkipLayerNormalization")
def skip_layer_normalization(
    d: Parts, op: Operator, x: Variable, skip: Variable, scale: Variable, shift: Maybe = None, bias: Maybe = None
) -> list[Maybe]:
    """LayerNormalization of X + skip + bias; that sum is the last output."""
    total = _with_skip(d, x, skip, bias)
    wanted = 1 if op.output(1) is None and op.output(2) is None else 3
    found = d.LayerNormalization(total, scale, shift, epsilon=d.number("epsilon", 1e-12), outputs=wanted)
    return [*found, *[None] * (3 - wanted), total]


def _with_skip(d: Parts, x: Variable, skip: Variable, bias: Maybe) -> Variable:
    total = d.Add(x, skip)
    return total if bias is None else d.Add(total, bias)


@decomposition(_MS + "EmbedLayerNormalization")
def embed_layer_normalization(
    d: Parts,
    op: Operator,
    ids: Variable,
    segments: Maybe,
    words: Variable,
    places: Variable,
    segment_table: Maybe,
    scale: Variable,
    shift: Variable,
    mask: Maybe = None,
    positions: Maybe = None,
) -> list[Variable]:
    """LayerNormalization of the sum of word, position and segment embeddings; the lengths of the mask; the sum."""
    place = d.Gather(places, positions_of(d, ids, 1) if positions is None else positions)
    total = d.Add(d.Gather(words, ids), place)
    if segments is not None and segment_table is not None:
        total = d.Add(total, d.Gather(segment_table, segments))
    y = d.LayerNormalization(total, scale, shift, epsilon=d.number("epsilon", 1e-12))
    if op.output(1) is None:
        return [y, y, total]
    # How many places of each row the mask keeps; 0 without a mask.
    kept = d.Sub(ids, ids) if mask is None else d.cast(d.Equal(mask, d.const(1, mask.dtype)), "int32")
    return [y, d.ReduceSum(d.cast(kept, "int32"), [1], keepdims=0), total]


# -- attention -------------------------------------------------------------------------------------------
@decomposition(_MS + "Attention")
def attention(
    d: Parts,
    op: Operator,
    x: Variable,
    weights: Variable,
    bias: Maybe = None,
    mask: Maybe = None,
    past: Maybe = None,
    attention_bias: Maybe = None,
    past_length: Maybe = None,
) -> list[Variable]:
    """Q, K and V are one product of X [B, S, D] with packed weights."""
    if past is not None or past_length is not None or op.output(1) is not None or d.whole("do_rotary", 0):
        raise d.error("it keeps past keys and values, or turns by positions")
    heads = d.whole("num_heads", 0)
    packed = d.MatMul(x, weights)
    packed = packed if bias is None else d.Add(packed, bias)
    width = fixed_size(d, weights, 1, "width")
    sizes = [int(s) for s in op.attrs.get("qkv_hidden_sizes") or [width // 3] * 3]
    q, k, v = (heads_apart(d, part, heads) for part in d.Split(packed, sizes, axis=2, outputs=3))
    masks = [_additive(d, mask, k), _causal(d, q, k), attention_bias]
    return [heads_together(d, _attend(d, q, k, v, masks))]


@flops(_MS + "Attention")
def packed_attention_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """The product with the packed weights, the scores, and the weighted sums."""
    x, weights, y = inputs[0], inputs[1], outputs[0]
    assert x is not None and weights is not None and y is not None
    return 2 * x[0] * x[1] * math.prod(weights) + 4 * x[1] * math.prod(y)


@decomposition(_MS + "MultiHeadAttention")
def multi_head_attention(
    d: Parts,
    op: Operator,
    q: Variable,
    k: Maybe = None,
    v: Maybe = None,
    bias: Maybe = None,
    mask: Maybe = None,
    attention_bias: Maybe = None,
    *past: Maybe,
) -> list[Variable]:
    """Q [B, S, heads * D] with K and V alike or as [B, heads, L, D]; or Q, K, V packed in [B, S, heads, 3, D]."""
    if any(p is not None for p in past) or any(op.output(i) is not None for i in (1, 2, 3)):
        raise d.error("it keeps past keys and values, or gives its scores")
    heads = d.whole("num_heads", 0)
    if k is None or v is None:
        if d.rank(q) != 5:
            raise d.error("it gets keys and values in a form that is not known here")
        parts = d.Split(q, axis=3, num_outputs=3, outputs=3)
        values = [d.Transpose(d.Squeeze(part, [3]), perm=[0, 2, 1, 3]) for part in parts]
    else:
        biases: list[Maybe] = [None] * 3
        if bias is not None:
            widths = [d.size(q, -1), *(d.size(x, -1) if d.rank(x) == 3 else None for x in (k, v))]
            sizes = [width or heads * (d.size(x, -1) or 0) for width, x in zip(widths, (q, k, v), strict=True)]
            biases = list(d.Split(bias, sizes, axis=0, outputs=3))
        values = [_heads(d, x, b, heads) for x, b in zip((q, k, v), biases, strict=True)]
    masks = [_additive(d, mask, values[1]), _causal(d, values[0], values[1]), attention_bias]
    q, k, v = values
    return [heads_together(d, _attend(d, q, k, v, masks))]


def _heads(d: Parts, x: Variable, bias: Maybe, heads: int) -> Variable:
    if d.rank(x) == 4:
        return x
    return heads_apart(d, x if bias is None else d.Add(x, bias), heads)


def _attend(d: Parts, q: Variable, k: Variable, v: Variable, masks: list[Maybe]) -> Variable:
    scores = d.MatMul(d.Mul(q, scale_of(d, q)), d.Transpose(k, perm=[0, 1, 3, 2]))
    if all(mask is None for mask in masks):
        return weigh(d, scores, v, None)[0]
    with d.fp32(Kind.ATTENTION):  # several masks, down to the lowest number of float32, add up
        for mask in masks:
            scores = scores if mask is None else d.Add(scores, mask)
        probabilities = d.Softmax(scores, axis=-1)
    return d.MatMul(probabilities, v)


def _additive(d: Parts, mask: Maybe, k: Variable) -> Maybe:
    """``mask_filter_value`` where the mask is 0: the mask is [B, T], [B, S, T], or the lengths [B] of the sequences."""
    if mask is None:
        return None
    rank = d.rank(mask)
    if rank == 1:
        if mask.shape is None or k.shape is None or mask.shape[0] is None or mask.shape[0] != k.shape[0]:
            raise d.error("its mask holds start and end positions, or sizes that are not known")
        kept = d.Less(d.cast(positions_of(d, k, 2), "int32"), d.Unsqueeze(mask, [1, 2, 3]))
    elif rank in (2, 3):
        kept = d.Greater(d.Unsqueeze(mask, [1, 2] if rank == 2 else [1]), d.const(0, mask.dtype))
    else:
        raise d.error(f"its mask has {rank} axes")
    value = d.number("mask_filter_value", -10000.0)
    return d.Where(kept, d.const(0, k.dtype), d.const(value, k.dtype))


def _causal(d: Parts, q: Variable, k: Variable) -> Maybe:
    """The lowest number above the diagonal."""
    if not d.whole("unidirectional", 0):
        return None
    kept = d.GreaterOrEqual(d.Unsqueeze(positions_of(d, q, 2), [1]), positions_of(d, k, 2))
    return d.Where(kept, d.const(0, q.dtype), d.const(-LIMITS["float32"].largest, q.dtype))


traits(_MS + "BiasDropout", _MS + "BitmaskDropout", _MS + "BitmaskBiasDropout", random=True)
traits(_MS + "DequantizeLinear", settings=(1,))
traits(_MS + "QuantizeLinear", settings=(1,), quantises=True)
traits(_MS + "Pad", settings=(2,))
traits(_MS + "Range", settings=(0, 1, 2))
keep_fp32(_MS + "SkipLayerNormalization", inputs=(2, 3), outputs=(1, 2))
keep_fp32(_MS + "SkipSimplifiedLayerNormalization", inputs=(2,), outputs=(1, 2))
traits(_MS + "Gelu", _MS + "BiasGelu", _MS + "FastGelu", elementwise=True, carries_large=True)
traits(_MS + "BiasGelu", _MS + "FastGelu", _MS + "BiasSplitGelu", weights=(1,), biases=(1,))
traits(_MS + "BiasAdd", elementwise=True, adds=True, carries_large=True, weights=(1,), biases=(1,))
traits(_MS + "FusedMatMul", _MS + "TransposeMatMul", product=True, weights=(1,))
traits(_MS + "FusedConv", _MS + "FusedGemm", _MS + "NhwcConv", product=True, weights=(1, 2), biases=(2,))
traits(_MS + "MatMulNBits", product=True, biases=(5,), coarse="accuracy_level")
traits(_MS + "MatMulBnb4", product=True, settings=(2,))
traits(_MS + "MoE", weights=(2, 3, 4, 5, 6, 7), biases=(3, 5, 7))
traits(_MS + "QMoE", weights=(4, 7, 10), biases=(4, 7, 10))
traits(_MS + "VarlenCausalConvWithState", weights=(1, 3), biases=(3,))
traits(_MS + "GatedAdd", elementwise=True, adds=True, carries_large=True)
traits(_MS + "BiasSoftmax", bounded=(0.0, 1.0), ignores="low")
traits(_MS + "MRotaryEmbedding", settings=(2, 3))
traits(_MS + "GatedRMSNorm", weights=(1,))
traits(_MS + "GroupNorm", weights=(1, 2), biases=(2,))
traits(_MS + "SkipGroupNorm", weights=(1, 2, 4), biases=(2, 4))
traits(_MS + "RelativePositionBias", weights=(0,))
traits(_MS + "RemovePadding", _MS + "RestorePadding", moves=(0,), exact=True)
traits(_MS + "SparseAttention", settings=(9, 10))
traits(_MS + "PackedAttention", weights=(1, 2), biases=(2,))
traits(_MS + "PackedMultiHeadAttention", weights=(3,), biases=(3,))
traits(_MS + "Attention", weights=(1, 2), biases=(2,))
traits(_MS + "MultiHeadAttention", weights=(3,), biases=(3,))
traits(_MS + "DecoderMaskedMultiHeadAttention", weights=(10,), biases=(10,))
traits(_MS + "SkipLayerNormalization", weights=(2, 3, 4), biases=(3, 4))
traits(_MS + "SkipSimplifiedLayerNormalization", weights=(2, 3), biases=(3,))
traits(_MS + "EmbedLayerNormalization", weights=(2, 3, 4, 5, 6), biases=(6,))
traits(_MS + "GatherBlockQuantized", lookup=True, part=True)
