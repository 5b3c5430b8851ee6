"""Shapes of what onnxruntime's own operators (com.microsoft) make, which ONNX's inference does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import zip_longest

from amp_transpiler.ir.nodes import Operator, Shape
from amp_transpiler.ir.types import FLOATS

#: Output 0 has the shape of input 0.
_SAME_SHAPE = frozenset(
    """
    Affine BiasAdd BiasDropout BiasGelu BiasSoftmax BitmaskBiasDropout BitmaskDropout DequantizeLinear FastGelu
    GatedRMSNorm Gelu GroupNorm ImageScaler MoE ParametricSoftplus QLinearLeakyRelu QLinearSigmoid QLinearSoftmax
    QuantizeLinear QuickGelu RotaryEmbedding Scale ScaledSiLU ScaledTanh SimplifiedLayerNormalization SkipGroupNorm
    SkipLayerNormalization SkipSimplifiedLayerNormalization Trilu
    """.split()  # noqa: SIM905
)
#: Output 0 has the shape that these inputs are broadcast to.
_BROADCAST = {"QLinearAdd": (0, 3), "QLinearMul": (0, 3), "QLinearWhere": (0, 1, 4)}
#: The output, besides the first, that has the shape of input 0: the sum that is normalised. Those before it are the
#: statistics of each row.
_SUMS = {"SkipGroupNorm": 1, "SkipLayerNormalization": 3, "SkipSimplifiedLayerNormalization": 3}


def contrib_shape(op: Operator, slot: int) -> Shape | None:
    """The shape of an output; None where no rule says it."""
    if slot and op.type == "DynamicQuantizeLSTM":
        return _lstm_states(op)
    if slot:
        added, shape = _SUMS.get(op.type, 0), _of(op, 0)
        return shape if slot == added else (*shape[:-1], 1) if shape and slot < added else None
    if op.type in _SAME_SHAPE:
        return _of(op, 0)
    if op.type in _BROADCAST:
        shapes = [shape for each in _BROADCAST[op.type] if (shape := _of(op, each)) is not None]
        return reduce(_broadcast, shapes) if len(shapes) == len(_BROADCAST[op.type]) else None
    rule = _RULES.get(op.type)
    return None if rule is None else rule(op)


def asked_sizes(op: Operator) -> dict[str, int]:
    """Sizes that an operator asks of its inputs and that their shapes call by names: those of a cache of keys."""
    past, query = op.input(3), _of(op, 0)
    if op.type != "GroupQueryAttention" or past is None or past.dtype not in FLOATS or not past.shape or not query:
        return {}
    heads, groups = (op.attrs.get(name, 0) for name in ("num_heads", "kv_num_heads"))
    side_by_side = heads if op.input(1) is not None else heads + 2 * groups
    width = query[-1] // side_by_side if side_by_side and isinstance(query[-1], int) else 0
    sizes = (0, groups, 0, width)
    return {name: size for name, size in zip(past.shape, sizes, strict=False) if isinstance(name, str) and size > 0}


def _of(op: Operator, slot: int) -> Shape | None:
    read = op.input(slot)
    return None if read is None else read.shape


def _broadcast(first: Shape, last: Shape) -> Shape:
    pairs = [pair[::-1] for pair in zip_longest(reversed(first), reversed(last), fillvalue=1)][::-1]
    return tuple(one if one == other or other == 1 else other if one == 1 else None for other, one in pairs)


def _product(op: Operator) -> Shape | None:
    """Of matrices that are transposed first, those whose batch lies between as well."""
    first, last = (_with_batch_first(op, slot) for slot in (0, 3 if op.type == "QGemm" else 1))
    if first is None or last is None or min(len(first), len(last)) < 2:
        return None
    rows = first[-1] if op.attrs.get("transA") else first[-2]
    columns = last[-2] if op.attrs.get("transB") else last[-1]
    return (*_broadcast(first[:-2], last[:-2]), rows, columns)


def _with_batch_first(op: Operator, slot: int) -> Shape | None:
    shape = _of(op, slot)
    between = shape and op.attrs.get(f"transBatch{'BA'[slot == 0]}")
    return (*shape[1:-1], shape[0], shape[-1]) if shape and between else shape


def _convolution(op: Operator) -> Shape | None:
    image, filters = _of(op, 0), _of(op, 1)
    if image is None or filters is None:
        return None
    return (image[0], filters[0], *_windows(op, image[2:], filters[2:]))


def _convolution_of_last(op: Operator) -> Shape | None:
    """Of images whose channels come last, as those of the filters do."""
    image, filters = _of(op, 0), _of(op, 1)
    if image is None or filters is None:
        return None
    return (image[0], *_windows(op, image[1:-1], filters[1:-1]), filters[0])


def _half_as_wide(op: Operator) -> Shape | None:
    data = _of(op, 0)
    return None if not data else (*data[:-1], data[-1] // 2 if isinstance(data[-1], int) else None)


def _pool(op: Operator) -> Shape | None:
    """Of windows over an image, whose channels may come last."""
    image, kernel = _of(op, 0), op.attrs.get("kernel_shape")
    if image is None or op.attrs.get("channels_last"):
        return None if image is None or kernel else (image[0], *[1] * (len(image) - 2), image[-1])
    if kernel is None:
        return (*image[:2], *[1] * (len(image) - 2))
    return (*image[:2], *_windows(op, image[2:], kernel))


def _windows(op: Operator, sizes: Sequence[int | str | None], kernel: Sequence[int | str | None]) -> Shape:
    """How many windows there are along each axis."""
    axes = len(sizes)
    strides, dilations = (op.attrs.get(name) or [1] * axes for name in ("strides", "dilations"))
    pads, auto = op.attrs.get("pads") or [0] * (2 * axes), op.attrs.get("auto_pad", "NOTSET")
    found: list[int | str | None] = []
    for i, (size, width) in enumerate(zip(sizes, kernel, strict=True)):
        if not isinstance(size, int) or not isinstance(width, int):
            found.append(None)
        elif auto in ("SAME_UPPER", "SAME_LOWER"):
            found.append(-(-size // strides[i]))
        else:
            around = pads[i] + pads[i + axes] if auto == "NOTSET" else 0
            steps, more = divmod(size + around - dilations[i] * (width - 1) - 1, strides[i])
            partly = bool(more and op.attrs.get("ceil_mode")) and (steps + 1) * strides[i] < size + pads[i]
            found.append(steps + 1 + partly)
    return tuple(found)


def _joined(op: Operator) -> Shape | None:
    """Of tensors that each have a scale and a zero point beside them, behind those of the result."""
    shapes = [_of(op, slot) for slot in range(2, len(op.inputs), 3)]
    if not shapes or any(shape is None for shape in shapes):
        return None
    first, axis = shapes[0] or (), int(op.attrs["axis"]) % len(shapes[0] or (1,))
    along = [shape[axis] for shape in shapes if shape]
    known = [size for size in along if isinstance(size, int)]
    return (*first[:axis], sum(known) if len(known) == len(along) else None, *first[axis + 1 :])


def _lstm(op: Operator) -> Shape | None:
    """Of sequences [length, batch, size]; the states of the last step have no length."""
    states, data = _lstm_states(op), _of(op, 0)
    return None if states is None or not data else (data[0], *states)


def _lstm_states(op: Operator) -> Shape | None:
    data, directions = _of(op, 0), 2 if op.attrs.get("direction") == "bidirectional" else 1
    return (directions, data[1], int(op.attrs["hidden_size"])) if data and "hidden_size" in op.attrs else None


def _embedding(op: Operator) -> Shape | None:
    ids, table = _of(op, 0), _of(op, 2)
    return (*ids, table[1]) if ids is not None and table else None


def _packed_attention(op: Operator) -> Shape | None:
    """Of one matrix for queries, keys and values."""
    data, weights, widths = _of(op, 0), _of(op, 1), op.attrs.get("qkv_hidden_sizes")
    packed = weights[1] if weights else None
    if not data or not (widths or isinstance(packed, int)):
        return None
    return (*data[:2], int(widths[2]) if widths else int(packed or 0) // 3)


def _crop(op: Operator) -> Shape | None:
    """Of borders left, top, right and bottom, or of a height and a width."""
    data, border, size = _of(op, 0), op.attrs.get("border"), op.attrs.get("scale")
    if not data or not border:
        return None
    left = [whole - border[i] - border[i + 2] if isinstance(whole := data[3 - i], int) else None for i in (1, 0)]
    return (*data[:2], *(map(int, size) if size else left))


def _quantised_rows(op: Operator) -> Shape | None:
    """Of a table whose bytes hold several numbers, side by side along the last axis."""
    table, ids, data = _of(op, 0), _of(op, 1), op.input(0)
    if not table or ids is None or data is None:
        return None
    axis = int(op.attrs.get("gather_axis", 0)) % len(table)
    each = 8 // int(op.attrs.get("bits", 4)) if data.dtype == "uint8" else 1
    last = table[-1] * each if isinstance(table[-1], int) else None
    return (*table[:axis], *ids, *(*table[:-1], last)[axis + 1 :])


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
    "Attention": _packed_attention,
    "BiasSplitGelu": _half_as_wide,
    "Crop": _crop,
    "DynamicQuantizeLSTM": _lstm,
    "DynamicQuantizeMatMul": _product,
    "EmbedLayerNormalization": _embedding,
    "FusedConv": _convolution,
    "FusedGemm": _product,
    "FusedMatMul": _product,
    "GatherBlockQuantized": _quantised_rows,
    "GroupQueryAttention": _grouped_attention,
    "MatMulIntegerToFloat": _product,
    "MatMulNBits": _quantised_product,
    "MultiHeadAttention": _attention,
    "NhwcConv": _convolution_of_last,
    "QAttention": _packed_attention,
    "QEmbedLayerNormalization": _embedding,
    "QGemm": _product,
    "QLinearAveragePool": _pool,
    "QLinearConcat": _joined,
    "QLinearGlobalAveragePool": _pool,
    "TransposeMatMul": _product,
}
