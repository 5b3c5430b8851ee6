"""Data movement: shapes, pieces, indices. Their gradients are data movement too, or accumulate in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from amp_transpiler.errors import GradientError
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, any_of, same, same_or_zero
from amp_transpiler.ir.metadata import only_looks
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import channel_rule, gradient, no_gradient, own, range_rule, traits, traits_of
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS, HALF
from amp_transpiler.ops.channel_rows import exchanged, lies_in_rows, restored
from amp_transpiler.ops.common import (
    Grads,
    exchanges_matrices,
    given_attributes,
    integers,
    multiple,
    padded,
    padded_axis,
    shape_of,
    size_of,
    sliced,
    summed,
    times,
)
from amp_transpiler.ops.gpu_kernels import transposed_product

#: Integers whose range is small enough to say something.
_INTEGERS = {"bool": (0.0, 1.0)} | {
    name: (float(np.iinfo(name).min), float(np.iinfo(name).max)) for name in ("uint8", "int8", "uint16", "int16")
}


def _reshaped(e: Emitter, op: Operator, dy: Value) -> Grads:
    return [e.reshape(dy, shape_of(e, 0))]


_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
_SEEN_THROUGH = frozenset(own(f"{_type}Grad") for _type in (*_VIEWS, "Cast")) | {own("MulGrad")}
for _type in _VIEWS:
    gradient(_type, reads="dy0", native=True)(_reshaped)


@gradient("Transpose", reads="dy0", native=True)
def transpose(e: Emitter, op: Operator, dy: Value) -> Grads:
    rank = len(size_of(dy))
    perm = list(op.attrs.get("perm", list(range(rank))[::-1]))
    made = transposed_product(e, dy) if exchanges_matrices(perm) and _reads_alone(op) else None
    return [e.transpose(dy, [int(i) for i in np.argsort(perm)]) if made is None else made]


def _reads_alone(op: Operator) -> bool:
    """Whether nobody but ``op`` reads its input, or that before it was scaled, cast or seen in another shape."""
    read = op.inputs[-1]
    while read is not None and len([reader for reader, _ in read.readers if not only_looks(reader)]) == 1:
        made = read.producer
        if made is None or made.full_type not in _SEEN_THROUGH:
            return True
        read = made.inputs[-1]
    return False


@gradient("Cast", reads="dy0", native=True)
def cast(e: Emitter, op: Operator, dy: Value) -> Grads:
    """The gradient has the element type of the input: the lowering casts, and rounds where that is 16 bit. A multiple
    is one in 16 bit too, so that products take the number over; what was looked up in a smaller table is looked up in
    the table in 16 bit."""
    made, (base, factor) = op.outputs[0], multiple(e, dy)
    if not e.at.fused or made is None or made.dtype not in HALF or base.dtype in HALF:
        return [dy]
    if factor != 1:
        return [times(e, e.cast(base, made.dtype), factor)]
    maker = e.makers.get(dy.name)
    table = maker.inputs[0] if maker is not None and traits_of(maker.type).lookup else None
    if maker is None or table is None or math.prod(size_of(table)) >= math.prod(size_of(dy)):
        return [dy]
    return [e.op(maker.type, e.cast(table, made.dtype), *maker.inputs[1:], shape=dy.shape, **maker.attrs)]


@gradient("CastLike", reads="dy0", inputs=[0], native=True)
def cast_like(e: Emitter, op: Operator, dy: Value) -> Grads:
    return [dy, None]


# -- pieces -------------------------------------------------------------------------------------------
@gradient("Concat", reads="x* dy0", native=True)
def concat(e: Emitter, op: Operator, xs: list[Value], dy: Value) -> Grads:
    axis = int(op.attrs["axis"]) % len(size_of(dy))
    sizes = [size_of(x)[axis] for x in xs]
    if axis == 1 and lies_in_rows(e, dy):
        return [None if piece is None else restored(e, piece) for piece in _parts(e, exchanged(e, dy), 0, sizes)]
    return _parts(e, dy, axis, sizes)


def _parts(e: Emitter, dy: Value, axis: int, sizes: Sequence[int]) -> list[Value | None]:
    """Of the parts of these sizes along an axis those that are wanted."""
    wanted = [i for i in range(len(sizes)) if e.wants(i)]
    if len(sizes) > 1 and len(wanted) == len(sizes):
        shapes = [(*size_of(dy)[:axis], size, *size_of(dy)[axis + 1 :]) for size in sizes]
        pieces = e.Split(dy, e.ints(*sizes), axis=axis, outputs=len(sizes))
        return [Value(piece.name, piece.dtype, shape) for piece, shape in zip(pieces, shapes, strict=True)]
    starts = np.cumsum([0, *sizes])
    return [sliced(e, dy, axis, int(starts[i]), int(starts[i + 1])) if i in wanted else None for i in range(len(sizes))]


@channel_rule("Concat")
def concat_by_channel(e: Emitter, op: Operator, *xs: Value) -> Grads:
    """Of channels: one rows below the other's."""
    shape = shape_of(e, 0)
    if int(op.attrs["axis"]) % len(shape) != 1:
        return []
    turned = [exchanged(e, x) for x in xs]
    return [restored(e, e.op("Concat", *turned, axis=0, shape=(shape[1], shape[0], *shape[2:])))]


@gradient("Split", reads="x1 dy*", native=True)
def split(e: Emitter, op: Operator, sizes: Value | None, dys: list[Value | None]) -> Grads:
    shape = shape_of(e, 0)
    axis = int(op.attrs.get("axis", 0)) % len(shape)
    dtype = next(dy.dtype for dy in dys if dy is not None)
    if sizes is not None and e.known(op.inputs[0]) is None:
        return [_joined(e, axis, shape, sizes, dys, dtype)]
    lengths = integers(e, op, 0, "sizes of Split")
    if lengths is None:
        chunk = math.ceil(shape[axis] / len(dys))
        lengths = [max(0, min(chunk, shape[axis] - i * chunk)) for i in range(len(dys))]
    pieces = [
        dy if dy is not None else e.zeros([*shape[:axis], length, *shape[axis + 1 :]], dtype)
        for dy, length in zip(dys, lengths, strict=True)
    ]
    return [e.Concat(*pieces, axis=axis, shape=shape) if len(pieces) > 1 else pieces[0]]


def _joined(
    e: Emitter, axis: int, shape: Sequence[int], sizes: Value, dys: Sequence[Value | None], dtype: str
) -> Value:
    """Pieces of lengths that the run knows, zeros in the place of those that there are no gradients of."""
    pieces = list(dys)
    if None in pieces:
        empty = e.Split(e.zeros(shape, dtype), sizes, outputs=len(pieces), dtype=dtype, axis=axis)
        pieces = [zeros if dy is None else dy for dy, zeros in zip(pieces, empty, strict=True)]
    return e.Concat(*pieces, axis=axis, shape=shape)


@gradient("Slice", reads="x1 x2 x3 x4 dy0", native=True)
def slice_(
    e: Emitter, op: Operator, starts: Value, ends: Value, axes: Value | None, steps: Value | None, dy: Value
) -> Grads:
    shape = shape_of(e, 0)
    cut = any(e.hangs(n) and n != left for n, left in zip(shape, size_of(dy), strict=True))
    if cut or any(e.known(bound) is None for bound in op.inputs[:2]):  # there may be fewer than the bounds say
        return [_put_back(e, op, shape, starts, ends, dy)]
    begin, end = integers(e, op, 0, "starts of Slice") or [], integers(e, op, 1, "ends of Slice") or []
    along = integers(e, op, 2, "axes of Slice") or list(range(len(begin)))
    strides = integers(e, op, 3, "steps of Slice") or [1] * len(begin)
    if 0 in size_of(dy):
        return [e.zeros(shape, dy.dtype)]
    before, after = [0] * len(shape), [0] * len(shape)
    for start, stop, axis, step in zip(begin, end, along, strides, strict=True):
        axis %= len(shape)
        taken = range(*slice(start, stop, step).indices(shape[axis]))
        if step < 0:
            dy = turned_round(e, dy, axis)
            taken = taken[::-1]
        dy = _spread_out(e, dy, axis, abs(step))
        before[axis], after[axis] = taken[0], shape[axis] - 1 - taken[-1]
    return [padded(e, dy, before, after)]


#: Beyond the end of every axis, and in 32 bits, of which places have no more.
_BEYOND = 2**31 - 1


def _put_back(e: Emitter, op: Operator, shape: Sequence[int], starts: Value, ends: Value, dy: Value) -> Value:
    """A gradient between zeros, where the run knows which part of the tensor it is of."""
    along = integers(e, op, 2, "axes of Slice") or list(range(size_of(starts)[0]))
    if any(step != 1 for step in integers(e, op, 3, "steps of Slice") or ()):
        bounds = ", ".join(f"'{v.name}'" for v in op.inputs[:2] if v is not None)
        raise GradientError(
            f"'{op.label}' is of every n-th element of a part that the run finds ({bounds}). Make these constant, or "
            "take the operator off the training path"
        )
    axes = [axis % len(shape) for axis in along]
    sizes, none = e.ints(*(shape[axis] for axis in axes)), e.ints(0)

    def within(bound: Value, known: np.ndarray | None) -> Value:
        bound = e.cast(bound, "int64") if known is None else e.const(np.clip(known, -_BEYOND, _BEYOND), "int64")
        counted = e.Where(e.Less(bound, none), e.Add(bound, sizes), bound)
        return e.Max(e.Min(counted, sizes), none)

    before, end = (within(v, e.known(known)) for v, known in zip((starts, ends), op.inputs, strict=False))
    after = e.Sub(sizes, e.Max(end, before))
    return padded_in_run(e, dy, e.Concat(before, after, axis=0), axes, shape)


def padded_in_run(e: Emitter, value: Value, pads: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
    """Zeros around a value, as many as the run says; where that is less than none, what is there goes."""
    dtype = value.dtype
    value = e.f32(value) if dtype == "bfloat16" else value
    made = e.Pad(value, pads, None, e.ints(*axes), shape=shape)
    e.foreign.append(Value(made.name, e.tensor_type(made), made.shape))
    return e.cast(made, dtype)


def turned_round(e: Emitter, value: Value, axis: int) -> Value:
    """A value from its end to its beginning along an axis."""
    last = np.iinfo(np.int64).min + 1
    return e.Slice(value, e.ints(-1), e.ints(last), e.ints(axis), e.ints(-1), shape=value.shape)


def _spread_out(e: Emitter, value: Value, axis: int, step: int) -> Value:
    """``step - 1`` zeros between neighbours along ``axis``."""
    shape = size_of(value)
    count = shape[axis]
    if step == 1 or count == 1:
        return value
    apart = e.reshape(value, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
    filled = padded_axis(e, apart, axis + 1, 0, step - 1)
    joined = e.reshape(filled, [*shape[:axis], count * step, *shape[axis + 1 :]])
    return sliced(e, joined, axis, 0, count * step - step + 1)


# -- repeats ------------------------------------------------------------------------------------------
@gradient("Expand", reads="dy0", native=True)
def expand(e: Emitter, op: Operator, dy: Value) -> Grads:
    return [summed(e, dy, dy, 0)]


@gradient("Tile", reads="dy0", native=True)
def tile(e: Emitter, op: Operator, dy: Value) -> Grads:
    shape = shape_of(e, 0)
    repeats = [full // d if d else 1 for full, d in zip(size_of(dy), shape, strict=True)]
    apart = [size for pair in zip(repeats, shape, strict=True) for size in pair]
    axes = [2 * i for i, count in enumerate(repeats) if count != 1]
    if not axes:
        return [dy]
    return [e.reshape(e.ReduceSum(e.reshape(dy, apart), e.ints(*axes), keepdims=0), shape)]


@gradient("ReverseSequence", reads="x1 dy0", inputs=[0], native=True)
def reverse_sequence(e: Emitter, op: Operator, lengths: Value, dy: Value) -> Grads:
    axes = given_attributes(op, "batch_axis", "time_axis")
    return [e.ReverseSequence(dy, lengths, shape=dy.shape, **axes), None]


@gradient("Trilu", reads="x1 dy0", native=True)
def trilu(e: Emitter, op: Operator, diagonal: Value | None, dy: Value) -> Grads:
    return [e.Trilu(dy, diagonal, upper=op.attrs.get("upper", 1))]


@gradient("DepthToSpace", reads="dy0", native=True)
def depth_to_space(e: Emitter, op: Operator, dy: Value) -> Grads:
    n, c, h, w = shape_of(e, 0)
    block = int(op.attrs["blocksize"])
    depth = c // block**2
    apart = e.reshape(dy, [n, depth, h, block, w, block])
    depth_first = op.attrs.get("mode", "DCR") == "DCR"
    blocks = e.transpose(apart, [0, 3, 5, 1, 2, 4] if depth_first else [0, 1, 3, 5, 2, 4])
    return [e.reshape(blocks, [n, c, h, w])]


@gradient("SpaceToDepth", reads="dy0", native=True)
def space_to_depth(e: Emitter, op: Operator, dy: Value) -> Grads:
    n, c, h, w = shape_of(e, 0)
    block = int(op.attrs["blocksize"])
    apart = e.reshape(dy, [n, block, block, c, h // block, w // block])
    return [e.reshape(e.transpose(apart, [0, 3, 4, 1, 5, 2]), [n, c, h, w])]


@decomposition("SpaceToDepth")
def space_to_depth_by_mode(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """Opset 28 has a mode; before, depth comes first. With columns and rows first the order of channels is another."""
    block, depth = d.whole("blocksize", 1), d.size(x, 1)
    blocks = d.SpaceToDepth(x, blocksize=block)
    if op.attrs.get("mode", "DCR") == "DCR":
        return [blocks]
    if depth is None:
        raise d.error(f"the number of channels of '{x.name}' is not known")
    return [d.Gather(blocks, d.const(np.arange(block**2 * depth).reshape(-1, depth).T.ravel()), axis=1)]


_MOVES = ("Transpose", "Split", "Slice", "DepthToSpace", "SpaceToDepth")
_REPEATS = ("Expand", "Tile", "ReverseSequence")
traits(*_VIEWS, *_MOVES, *_REPEATS, "Trilu", moves=(0,), exact=True)
traits(*_VIEWS, view=True)
traits("Slice", part=True)
traits("Concat", moves=None, exact=True)
traits("CenterCropPad", "Cast", "CastLike", moves=(0,))
traits("CastLike", type_only=(1,))
traits("Cast", elementwise=True)
traits("Unique", exact=True, carries_large=True, selects=True)
traits(*(own(f"{_type}Grad") for _type in (*_VIEWS, *_MOVES, "Trilu", "Concat")), exact=True)


@gradient("OneHot", reads="x0 x1 dy0", inputs=[2], stops=[0, 1])
def one_hot(e: Emitter, op: Operator, indices: Value, depth: Value, dy: Value) -> Grads:
    """The sums of dy where the first of the two numbers stands, and where the second does."""
    on = e.OneHot(indices, depth, e.const([0.0, 1.0], dy.dtype), axis=op.attrs.get("axis", -1), shape=dy.shape)
    sums = (e.reduce_sum(e.Mul(dy, part)) for part in (e.Sub(e.like(1, on), on), on))
    return [None, None, e.Concat(*(e.reshape(total, (1,)) for total in sums), axis=0, shape=(2,))]


@gradient("Range", reads="dy0", inputs=[0, 2], stops=[1])
def range_(e: Emitter, op: Operator, dy: Value) -> Grads:
    """start + number * delta; how many there are has no slope."""
    steps = e.const(np.arange(size_of(dy)[0]), dy.dtype)
    return [e.reduce_sum(dy), None, e.reduce_sum(e.Mul(dy, steps))]


_FILLS = ("Shape", "Size", "ConstantOfShape", "EyeLike", "Constant")
traits(*_FILLS, "OneHot", "Range")
traits("Shape", "Size", shape_only=True)
traits("ConstantOfShape", settings=(0,))
traits("OneHot", settings=(2,))
traits("Range", settings=(0, 1, 2))
no_gradient(*_FILLS)

range_rule(*_VIEWS, *_MOVES, *_REPEATS)(same)
range_rule("Trilu", "CenterCropPad")(same_or_zero)
range_rule("Concat")(any_of)


@range_rule("Cast", "CastLike")
def _cast_range(op: Operator, ranges: Ranges) -> Interval | None:
    read = op.input(0)
    if read is None or read.dtype in FLOATS:
        return ranges.bound(read)
    return _INTEGERS.get(str(read.dtype))


@range_rule("ConstantOfShape")
def _fill_range(op: Operator, ranges: Ranges) -> Interval | None:
    value = float(as_array(op.attrs["value"]).reshape(-1)[0]) if "value" in op.attrs else 0.0
    return (value, value) if math.isfinite(value) else None
