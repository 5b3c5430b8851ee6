"""Bodies for places that lack kernels (see :mod:`.place_bodies`): what moves elements, makes indices or takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import padded, pieces, size_of
from amp_transpiler.ops.place_bodies import Asked, Body, body, in_32_bits, integers_in

#: What integers are divided by into two numbers that fp32 holds.
_LIMB = 4096


# -- movement --------------------------------------------------------------------------------------------
def _by_way_of(type_: str, way: str) -> Body:
    """Truth values as numbers of another type, which hold them exactly."""

    def moved(e: Emitter, op: Asked, *inputs: Value | None) -> Sequence[Value] | None:
        if op.results[0].dtype != "bool":
            return None
        condition = 1 if type_ == "Where" else 0
        numbers = [
            e.cast(v, way) if v is not None and v.dtype == "bool" and i >= condition else v
            for i, v in enumerate(inputs)
        ]
        made = e.op(type_, *numbers, outputs=len(op.results), dtype=way, **op.attrs)
        return [e.cast(value, "bool") for value in made]

    return moved


for _type in ("Concat", "Identity", "Pad", "ReduceMax", "ReduceMin", "Reshape", "Squeeze", "Transpose", "Where"):
    body(_type)(_by_way_of(_type, "int32"))


@body("Split")
def _split(e: Emitter, op: Asked, x: Value, *sizes: Value | None) -> Sequence[Value] | None:
    """Into more pieces than one kernel makes: into runs of them, and these again."""
    truths = op.results[0].dtype == "bool"
    if not truths and len(op.results) <= (e.at.most_pieces or len(op.results)):
        return None
    if any(piece.shape is None for piece in op.results):
        return _by_way_of("Split", "int32")(e, op, x, *sizes) if truths else None
    axis = int(op.attrs.get("axis", 0))
    made = pieces(e, e.cast(x, "int32") if truths else x, axis, [size_of(piece)[axis] for piece in op.results])
    return [e.cast(piece, "bool") for piece in made] if truths else made


@body("Slice")
def _slice(e: Emitter, op: Asked, x: Value, *where: Value | None) -> Sequence[Value] | None:
    """Those at known places are gathered."""
    if x.dtype == "bool":
        return _by_way_of("Slice", "float32")(e, op, x, *where)
    said = [integers_in(e, v) for v in where if v is not None]
    if x.shape is None or any(numbers is None for numbers in said):
        return None
    starts, ends, axes, steps = (integers_in(e, v) for v in (*where, None, None)[:4])
    assert starts is not None and ends is not None
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = size_of(x)[axis]
        last = None if step < 0 and end < -size else end
        first = max(start, -size) if step < 0 else start  # the first element, where numpy takes none
        kept = np.arange(size)[first:last:step]
        if kept.size < size or step < 0:
            x = gathered(e, x, axis, kept)
    return [x]


def _shifted(e: Emitter, x: Value, axis: int, step: int) -> Value:
    """X with so many zeros before it along an axis, and as many elements less at the end."""
    before = [step if i == axis else 0 for i in range(len(size_of(x)))]
    kept = gathered(e, x, axis, np.arange(size_of(x)[axis] - step))
    return padded(e, kept, before, [0] * len(before))


def gathered(e: Emitter, x: Value, axis: int, places: np.ndarray[Any, Any]) -> Value:
    """X at these places of an axis."""
    axis %= len(size_of(x))
    shape = (*size_of(x)[:axis], len(places), *size_of(x)[axis + 1 :])
    return e.Gather(x, e.const(places, "int32"), axis=axis, shape=shape)


@body("Tile")
def _tile(e: Emitter, op: Asked, x: Value, repeats: Value) -> Sequence[Value] | None:
    """Of integers and truth values: they are gathered, over and over."""
    times_each = integers_in(e, repeats)
    if x.shape is None or times_each is None:
        return None
    for axis, times in enumerate(times_each):
        if times != 1:
            x = gathered(e, x, axis, np.tile(np.arange(size_of(x)[axis]), times))
    return [x]


@body("CumSum")
def _cumulative(e: Emitter, op: Asked, x: Value, along: Value) -> Sequence[Value] | None:
    """Of integers: each sum takes what stands so far before it that it has not, twice as far in each round."""
    at = integers_in(e, along)
    if x.shape is None or at is None or x.dtype not in ("int32", "uint32"):
        return None
    axis = at[0] % len(x.shape)
    size = x.shape[axis]
    turned = np.arange(size)[::-1]
    if op.attrs.get("reverse", 0):
        x = gathered(e, x, axis, turned)
    if op.attrs.get("exclusive", 0) and size:
        x = _shifted(e, x, axis, 1)
    for power in range(max(size - 1, 0).bit_length()):
        x = e.Add(x, _shifted(e, x, axis, 2**power), shape=x.shape)
    return [gathered(e, x, axis, turned) if op.attrs.get("reverse", 0) else x]


# -- indices ---------------------------------------------------------------------------------------------
@body("OneHot")
def _one_hot(e: Emitter, op: Asked, indices: Value, depth: Value, values: Value) -> Sequence[Value] | None:
    """Each index, beside the numbers of all classes. Negative ones count from the end."""
    count = integers_in(e, depth)
    if count is None or indices.shape is None or indices.dtype not in ("int32", "float32"):
        return None
    rank = len(indices.shape) + 1
    axis = int(op.attrs.get("axis", -1)) % rank
    column = e.reshape(indices, (*indices.shape[:axis], 1, *indices.shape[axis:]))
    classes = np.arange(count[0]).reshape([-1 if i == axis else 1 for i in range(rank)])
    held = e.Equal(column, e.const(classes, indices.dtype))
    below = e.Equal(column, e.const(classes - count[0], indices.dtype))
    off, on = (e.Gather(values, e.const(i, "int32"), axis=0) for i in (0, 1))
    return [e.Where(e.Or(held, below), on, off)]


@body("TopK")
def _top_k(e: Emitter, op: Asked, x: Value, k: Value) -> Sequence[Value] | None:
    """Of integers, which fp32 does not hold: by what is left after a division, and then, of equal ones the first
    staying the first, by the quotient."""
    count = integers_in(e, k)
    if count is None or x.shape is None or x.dtype != "int32":
        return None
    axis, in_order = int(op.attrs.get("axis", -1)) % len(x.shape), {**op.attrs, "sorted": 1}
    chosen = tuple(count[0] if i == axis else size for i, size in enumerate(x.shape))

    def placed(key: Value, of: Sequence[int]) -> Value:
        found = e.op("TopK", key, e.ints(of[axis]), outputs=2, **in_order)[1]
        numbers = e.const(np.arange(size_of(x)[axis]), "int32")
        return e.Gather(numbers, Value(found.name, "int64", tuple(of)), axis=0, shape=of)

    quotient = e.Div(x, e.const(_LIMB, "int32"))
    rest = e.Sub(x, e.Mul(quotient, e.const(_LIMB, "int32")))
    by_rest = placed(e.cast(rest, "float32"), x.shape)
    key = e.cast(e.GatherElements(quotient, by_rest, axis=axis, shape=x.shape), "float32")
    place = e.GatherElements(by_rest, placed(key, chosen), axis=axis, shape=chosen)
    return [e.GatherElements(x, place, axis=axis, shape=chosen), place]


@body("Hardmax")
def _hardmax(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    """1 at the first of the largest along an axis, else 0."""
    if x.shape is None:
        return None
    axis = int(op.attrs.get("axis", -1)) % len(x.shape)
    places = np.arange(x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(x.shape))])
    first = e.op("ArgMax", x, axis=axis, keepdims=1, dtype="int64")
    return [e.cast(e.Equal(e.const(places, "int64"), first), x.dtype)]


@body("EyeLike")
def _eye_like(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
    if x.shape is None:
        return None
    rows, columns = x.shape
    return [e.const(np.eye(rows, columns, int(op.attrs.get("k", 0))), op.results[0].dtype)]


@body("GatherElements")
def _gather_elements(e: Emitter, op: Asked, x: Value, indices: Value) -> Sequence[Value] | None:
    """Elements of the flattened tensor."""
    narrow = in_32_bits(e, indices)
    if x.shape is None or narrow is None or narrow.shape is None:
        return None
    axis, size = int(op.attrs.get("axis", 0)) % len(x.shape), x.shape[int(op.attrs.get("axis", 0))]
    place = np.zeros([1] * len(x.shape), np.int64)
    for other, count in enumerate(narrow.shape):
        if other != axis:
            steps = np.arange(count) * math.prod(x.shape[other + 1 :])
            place = place + steps.reshape([-1 if i == other else 1 for i in range(len(x.shape))])
    positive = e.Where(e.Less(narrow, e.const(0, "int32")), e.Add(narrow, e.const(size, "int32")), narrow)
    along = e.Mul(positive, e.const(math.prod(x.shape[axis + 1 :]), "int32"))
    flat = e.reshape(x, (math.prod(x.shape),))
    return [e.Gather(flat, e.Add(along, e.const(place, "int32"), shape=narrow.shape), axis=0, shape=narrow.shape)]


@body("GatherND")
def _gather_nd(e: Emitter, op: Asked, x: Value, wide: Value) -> Sequence[Value] | None:
    """Rows of the tensor in which the axes that indices go into are one."""
    indices, alike = in_32_bits(e, wide), int(op.attrs.get("batch_dims", 0))
    if x.shape is None or indices is None or indices.shape is None:
        return None
    if alike:  # the places of a batch are written before those in it
        lead = indices.shape[:alike]
        numbers = np.moveaxis(np.indices(lead), 0, -1).reshape(*lead, *[1] * (len(indices.shape) - 1 - alike), alike)
        *tuples, width = indices.shape
        own = e.const(np.broadcast_to(numbers, (*tuples, alike)), "int32")
        indices = e.op("Concat", own, indices, axis=-1, shape=(*tuples, alike + width))
    rows, width, place = _as_rows(e, x, indices)
    found = e.Gather(e.reshape(x, (rows, width)), place, axis=0)
    return [e.reshape(found, (*size_of(indices)[:-1], *x.shape[size_of(indices)[-1] :]))]


@body("ScatterND")
def _scatter_nd(e: Emitter, op: Asked, x: Value, wide: Value, updates: Value) -> Sequence[Value] | None:
    """The same the other way round: each element of a row has the row's index."""
    indices = in_32_bits(e, wide)
    if x.shape is None or indices is None or indices.shape is None:
        return None
    rows, width, place = _as_rows(e, x, indices)
    count = math.prod(indices.shape[:-1])
    at = e.reshape(place, (count, 1))
    if width != 1:
        at = e.Expand(at, e.ints(count, width), shape=(count, width))
    changes = e.reshape(updates, (count, width))
    made = e.ScatterElements(e.reshape(x, (rows, width)), at, changes, axis=0, **op.attrs)
    return [e.reshape(made, x.shape)]


def _as_rows(e: Emitter, x: Value, indices: Value) -> tuple[int, int, Value]:
    """The rows of a tensor, their width, and which row each of the tuples of indices names."""
    assert x.shape is not None and indices.shape is not None
    depth = indices.shape[-1]
    sizes, count = x.shape[:depth], math.prod(indices.shape[:-1])
    rows, width = math.prod(sizes), math.prod(x.shape[depth:])
    if depth == 1:
        return rows, width, e.reshape(indices, (count,))
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(depth)]
    tuples = e.reshape(indices, (count, depth))
    positive = e.Where(e.Less(tuples, e.const(0, "int32")), e.Add(tuples, e.const(sizes, "int32")), tuples)
    place = e.ReduceSum(e.Mul(positive, e.const(strides, "int32")), e.ints(1), keepdims=0, shape=(count,))
    return rows, width, place


@body("ReverseSequence")
def _reverse_sequence(e: Emitter, op: Asked, x: Value, wide: Value) -> Sequence[Value] | None:
    lengths, batch, time = in_32_bits(e, wide), int(op.attrs.get("batch_axis", 1)), int(op.attrs.get("time_axis", 0))
    if x.shape is None or lengths is None:
        return None
    along = [[-1 if axis == own else 1 for axis in range(len(x.shape))] for own in (batch, time)]
    length = e.reshape(lengths, [x.shape[batch] if n < 0 else n for n in along[0]])
    place = e.const(np.arange(x.shape[time]).reshape(along[1]), "int32")
    turned = e.Sub(e.Sub(length, e.const(1, "int32")), place)
    taken = e.Expand(e.Where(e.Less(place, length), turned, place), e.ints(*x.shape), shape=x.shape)
    return [e.GatherElements(x, taken, axis=time, shape=x.shape)]


@body("Trilu")
def _triangle(e: Emitter, op: Asked, x: Value, k: Value | None = None) -> Sequence[Value] | None:
    number = [0] if k is None else integers_in(e, k)
    if x.shape is None or number is None:
        return None
    every = np.ones(x.shape[-2:], bool)
    kept = np.triu(every, number[0]) if op.attrs.get("upper", 1) else np.tril(every, number[0])
    if x.dtype == "bool":
        return [e.And(x, e.const(kept), shape=x.shape)]
    return [e.Where(e.const(kept), x, e.like(0, x), shape=x.shape)]
