"""Shapes of what onnxruntime's own operators (com.microsoft) make, which ONNX's inference does not know."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from amp_transpiler.ir.nodes import Operator, Shape

#: Output 0 has the shape of input 0.
_SAME_SHAPE = frozenset(
    """
    BiasDropout BiasGelu BiasSoftmax BitmaskBiasDropout BitmaskDropout DequantizeLinear FastGelu GatedRMSNorm Gelu
    GroupNorm MoE QLinearLeakyRelu QLinearSigmoid QLinearSoftmax QuantizeLinear QuickGelu RotaryEmbedding ScaledSiLU
    SimplifiedLayerNormalization SkipGroupNorm SkipLayerNormalization SkipSimplifiedLayerNormalization Trilu
    """.split()  # noqa: SIM905
)
#: Output 0 has the shape that these two inputs are broadcast to.
_BROADCAST = {"QLinearAdd": (0, 3), "QLinearMul": (0, 3)}
#: The output, besides the first, that has the shape of input 0: the sum that is normalised.
_SUMS = {"SkipLayerNormalization": 3, "SkipSimplifiedLayerNormalization": 3}


def contrib_shape(op: Operator, slot: int) -> Shape | None:
    """The shape of an output; None where no rule says it."""
    if slot:
        return _of(op, 0) if _SUMS.get(op.type) == slot else None
    if op.type in _SAME_SHAPE:
        return _of(op, 0)
    if op.type in _BROADCAST:
        first, last = (_of(op, each) for each in _BROADCAST[op.type])
        return None if first is None or last is None else _broadcast(first, last)
    rule = _RULES.get(op.type)
    return None if rule is None else rule(op)


def _of(op: Operator, slot: int) -> Shape | None:
    read = op.input(slot)
    return None if read is None else read.shape


def _broadcast(first: Shape, last: Shape) -> Shape:
    pairs = [pair[::-1] for pair in zip_longest(reversed(first), reversed(last), fillvalue=1)][::-1]
    return tuple(one if one == other or other == 1 else other if one == 1 else None for other, one in pairs)


def _product(op: Operator) -> Shape | None:
    """Of matrices that are transposed first; not of those whose batch lies between."""
    first, last = _of(op, 0), _of(op, 1)
    if first is None or last is None or min(len(first), len(last)) < 2:
        return None
    if op.attrs.get("transBatchA") or op.attrs.get("transBatchB"):
        return None
    rows = first[-1] if op.attrs.get("transA") else first[-2]
    columns = last[-2] if op.attrs.get("transB") else last[-1]
    return (*_broadcast(first[:-2], last[:-2]), rows, columns)


def _quantised_product(op: Operator) -> Shape | None:
    rows = _of(op, 0)
    return None if not rows else (*rows[:-1], int(op.attrs["N"]))


def _attention(op: Operator) -> Shape | None:
    """Of a query and a value with their heads side by side; not of those that are packed, or have an axis of heads."""
    query, value = _of(op, 0), _of(op, 2)
    return (*query[:2], value[2]) if query and value and len(query) == len(value) == 3 else None


def _grouped_attention(op: Operator) -> Shape | None:
    return None if op.input(1) is None else _of(op, 0)


_RULES: dict[str, Callable[[Operator], Shape | None]] = {
    "FusedMatMul": _product,
    "GroupQueryAttention": _grouped_attention,
    "MatMulNBits": _quantised_product,
    "MultiHeadAttention": _attention,
    "TransposeMatMul": _product,
}
