"""What stands for an operator where a place has no kernel of it: other operators that it has, bit for bit where it can.

A body gets the operator's attributes, inputs and results, all with the element types that their tensors have there, and
shapes where these are fixed. It gives the results, or None where it does not know how (a shape is missing). What it
emits may be without a kernel as well, and then has a body of its own. Where 64-bit integers are held as 32-bit ones an
operator whose ONNX schema wants the former may get the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.window import Window, window_by

#: ``body(e, attributes, inputs, results) -> results``
Body = Callable[[Emitter, Mapping[str, Any], Sequence[Value | None], Sequence[Value]], Sequence[Value] | None]

_BODIES: dict[str, Body] = {}
_INDICES = np.int32


def body(*types: str) -> Callable[[Body], Body]:
    """Register what stands for operators of ai.onnx."""

    def register(function: Body) -> Body:
        _BODIES.update(dict.fromkeys(types, function))
        return function

    return register


def body_of(full_type: str) -> Body | None:
    """What stands for an operator; None where nothing does."""
    return _BODIES.get(full_type)


def _given(inputs: Sequence[Value | None]) -> list[Value]:
    return [v for v in inputs if v is not None]


def _constant(e: Emitter, value: Value | None) -> np.ndarray | None:
    """The content of a constant; None of what is computed."""
    found = None if value is None else e.initializers.get(value.name)
    return None if found is None else onnx.numpy_helper.to_array(found)


def _integers(e: Emitter, value: Value | None) -> list[int] | None:
    found = _constant(e, value)
    return None if found is None else [int(number) for number in found.reshape(-1)]


# -- numbers ---------------------------------------------------------------------------------------------
@body("Sum")
def _sum(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    return [_added(e, inputs)]


def _added(e: Emitter, inputs: Sequence[Value | None]) -> Value:
    total, *others = _given(inputs)
    for other in others:
        total = e.Add(total, other)
    return total


@body("Mean")
def _mean(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    total = _added(e, inputs)
    return [e.Div(total, e.like(len(_given(inputs)), total))]


def _extreme(compare: str) -> Body:
    """Of two numbers the first where it does not compare so to the second: NaN of either stays."""

    def choose(e: Emitter, a: Value, b: Value) -> Value:
        if a.name in e.initializers:
            a, b = b, a
        kept = a
        if a.dtype in FLOATS and b.name not in e.initializers:
            kept = e.Where(e.Equal(b, b), a, b)
        return e.Where(e.op(compare, a, b), b, kept)

    def extreme(
        e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
    ) -> Sequence[Value]:
        found, *others = _given(inputs)
        for other in others:
            found = choose(e, found, other)
        return [found]

    return extreme


body("Max")(_extreme("Less"))
body("Min")(_extreme("Greater"))


@body("Clip")
def _clip(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    x, low, high = (*inputs, None, None)[:3]
    assert x is not None
    x = x if low is None else e.Max(x, low)
    return [x if high is None else e.Min(x, high)]


@body("IsNaN")
def _is_nan(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    """What neither equals itself nor lies on either side of zero. Compilers of shaders may take one of the comparisons
    for the negation of its opposite, and then find NaN where it does not; two kinds of them are asked."""
    (x,) = _given(inputs)
    zero = e.like(0, x)
    sided = e.Not(e.And(e.Not(e.LessOrEqual(x, zero)), e.Not(e.Greater(x, zero))))
    return [e.Not(e.And(e.Equal(x, x), sided))]


@body("IsInf")
def _is_inf(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    (x,) = _given(inputs)
    found = [
        e.Equal(x, e.like(sign * math.inf, x))
        for sign, name in ((1, "detect_positive"), (-1, "detect_negative"))
        if attrs.get(name, 1)
    ]
    return [found[0] if len(found) == 1 else e.Or(*found)]


@body("LogSoftmax")
def _log_softmax(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    """x - max - log(sum(exp(x - max))), in fp32."""
    (x,) = _given(inputs)
    axes, wide = e.ints(attrs.get("axis", -1)), e.f32(x)
    apart = e.Sub(wide, e.ReduceMax(wide, axes, keepdims=1))
    return [e.cast(e.Sub(apart, e.Log(e.ReduceSum(e.Exp(apart), axes, keepdims=1))), x.dtype)]


@body("ReduceLogSumExp")
def _log_sum_exp(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    """max + log(sum(exp(x - max))), in fp32; where the largest is infinite, it is the result by itself."""
    x, *axes = _given(inputs)
    wide, keep = e.f32(x), {"noop_with_empty_axes": attrs.get("noop_with_empty_axes", 0)}
    largest = e.ReduceMax(wide, *axes, keepdims=1, **keep)
    most = e.Where(e.Less(e.Abs(largest), e.like(math.inf, largest)), largest, e.like(0, largest))
    found = e.Add(e.Log(e.ReduceSum(e.Exp(e.Sub(wide, most)), *axes, keepdims=1, **keep)), most)
    if not attrs.get("keepdims", 1):
        found = e.Squeeze(found, *axes)
    return [e.cast(found, x.dtype)]


@body("Neg")
def _neg(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    (x,) = _given(inputs)
    return [e.Sub(e.like(0, x), x)]


@body("Abs")
def _abs(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    (x,) = _given(inputs)
    zero = e.like(0, x)
    return [e.Where(e.Less(x, zero), e.Sub(zero, x), x)]


@body("Sign")
def _sign(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    """Zero and NaN stay as they are."""
    (x,) = _given(inputs)
    zero = e.like(0, x)
    below = x if x.dtype.startswith("uint") else e.Where(e.Less(x, zero), e.like(-1, x), x)
    return [e.Where(e.Greater(x, zero), e.like(1, x), below)]


# -- truth -----------------------------------------------------------------------------------------------
@body("Or")
def _or(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    a, b = _given(inputs)
    return [e.Not(e.And(e.Not(a), e.Not(b)))]


@body("Equal")
def _equal(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value] | None:
    a, b = _given(inputs)
    return None if a.dtype != "bool" else [e.Equal(e.cast(a, "int32"), e.cast(b, "int32"))]


@body("Xor")
def _xor(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value]:
    return [e.Not(e.Equal(*_given(inputs)))]


# -- movement --------------------------------------------------------------------------------------------
def _by_way_of(type_: str, way: str) -> Body:
    """Truth values as numbers of another type, which hold them exactly."""

    def moved(
        e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
    ) -> Sequence[Value] | None:
        if results[0].dtype != "bool":
            return None
        condition = 1 if type_ == "Where" else 0
        numbers = [
            e.cast(v, way) if v is not None and v.dtype == "bool" and i >= condition else v
            for i, v in enumerate(inputs)
        ]
        made = e.op(type_, *numbers, outputs=len(results), dtype=way, **attrs)
        return [e.cast(value, "bool") for value in made]

    return moved


for _type in ("Concat", "Identity", "Pad", "Reshape", "Split", "Squeeze", "Transpose", "Where"):
    body(_type)(_by_way_of(_type, "int32"))
body("GatherElements")(_by_way_of("GatherElements", "float32"))


@body("Slice")
def _slice(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value] | None:
    """Of integers: those at known places are gathered."""
    x, *where = inputs
    assert x is not None
    if x.dtype == "bool":
        return _by_way_of("Slice", "float32")(e, attrs, inputs, results)
    starts, ends, axes, steps = (_integers(e, v) for v in (*where, None, None, None, None)[:4])
    if x.shape is None or starts is None or ends is None:
        return None
    axes = list(range(len(starts))) if axes is None else axes
    for at, (start, end, axis) in enumerate(zip(starts, ends, axes, strict=True)):
        size = size_of(x)[axis]
        kept = np.arange(size, dtype=_INDICES)[start : None if end < -size else end : 1 if steps is None else steps[at]]
        if kept.size < size or (steps is not None and steps[at] < 0):
            x = _gathered(e, x, axis, kept)
    return [x]


def _gathered(e: Emitter, x: Value, axis: int, places: np.ndarray[Any, Any]) -> Value:
    """X at these places of an axis."""
    axis %= len(size_of(x))
    shape = (*size_of(x)[:axis], len(places), *size_of(x)[axis + 1 :])
    return e.Gather(x, e.const(places), axis=axis, shape=shape)


@body("Tile")
def _tile(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value] | None:
    """Of integers and truth values: they are gathered, over and over."""
    x, repeats = inputs[0], _integers(e, inputs[1])
    if x is None or x.shape is None or repeats is None:
        return None
    for axis, times in enumerate(repeats):
        if times != 1:
            x = _gathered(e, x, axis, np.tile(np.arange(size_of(x)[axis], dtype=_INDICES), times))
    return [x]


# -- indices ---------------------------------------------------------------------------------------------
@body("OneHot")
def _one_hot(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value] | None:
    """Each index, beside the numbers of all classes. Negative ones count from the end."""
    indices, depth, values = _given(inputs)
    count = _integers(e, depth)
    if count is None or indices.shape is None or indices.dtype not in ("int32", "float32"):
        return None
    rank = len(indices.shape) + 1
    axis = int(attrs.get("axis", -1)) % rank
    column = e.reshape(indices, (*indices.shape[:axis], 1, *indices.shape[axis:]))
    classes = np.arange(count[0]).reshape([-1 if i == axis else 1 for i in range(rank)])
    held = e.Equal(column, e.const(classes, indices.dtype))
    below = e.Equal(column, e.const(classes - count[0], indices.dtype))
    off, on = (e.Gather(values, e.const(np.array(i, _INDICES)), axis=0) for i in (0, 1))
    return [e.Where(e.Or(held, below), on, off)]


@body("GatherND")
def _gather_nd(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value] | None:
    """Rows of the tensor in which the axes that indices go into are one."""
    x, indices = _given(inputs)
    if attrs.get("batch_dims", 0) or x.shape is None or indices.shape is None or indices.dtype != "int32":
        return None
    rows, width, place = _as_rows(e, x, indices)
    found = e.Gather(e.reshape(x, (rows, width)), place, axis=0)
    return [e.reshape(found, (*indices.shape[:-1], *x.shape[indices.shape[-1] :]))]


@body("ScatterND")
def _scatter_nd(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value] | None:
    """The same the other way round: each element of a row has the row's index."""
    x, indices, updates = _given(inputs)
    if x.shape is None or indices.shape is None or indices.dtype != "int32":
        return None
    rows, width, place = _as_rows(e, x, indices)
    count = math.prod(indices.shape[:-1])
    at = e.reshape(place, (count, 1))
    if width != 1:
        at = e.Expand(at, e.ints(count, width), shape=(count, width))
    given = e.reshape(updates, (count, width))
    made = e.ScatterElements(e.reshape(x, (rows, width)), at, given, axis=0, **attrs)
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


@body("MaxPool")
def _max_pool(
    e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None], results: Sequence[Value]
) -> Sequence[Value] | None:
    """The second result, where each window's first maximum lies in the flattened input, is found by comparing: from the
    last position of the kernel to the first, each that holds the maximum has its index written over the others."""
    (x,) = _given(inputs)
    dilated = set(attrs.get("dilations", [1])) != {1} and attrs.get("auto_pad", "NOTSET").startswith("SAME")
    if x.shape is None or attrs.get("storage_order", 0) or dilated:  # onnxruntime pads less than ONNX then
        return None
    y = e.op("MaxPool", x, shape=results[0].shape, **attrs)
    if len(results) == 1 or y.shape is None:
        return None
    window = window_by(attrs, attrs["kernel_shape"], x.shape[2:], y.shape[2:])
    around = _surrounded(e, window, x)
    found: Value | None = None
    for tap in reversed(window.taps):
        place = e.const(_places(window, tap), "int32")
        held = e.Equal(window.read(e, around, tap, 2), y)
        found = e.Where(held, place, e.const(0, "int32") if found is None else found)
    assert found is not None
    first = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * window.rank) * math.prod(window.source)
    return [y, e.Add(found, e.const(first, "int32"), shape=y.shape)]


def _surrounded(e: Emitter, window: Window, x: Value) -> Value:
    """X as far as windows read, with less than any number around it."""
    assert x.shape is not None
    if not any(window.pads):
        return x
    before, after = [0, 0, *window.begin], [0, 0, *window.end]
    shape = [n + b + a for n, b, a in zip(x.shape, before, after, strict=True)]
    return e.op("Pad", x, e.ints(*before, *after), e.like(-math.inf, x), shape=shape)


def _places(window: Window, tap: Sequence[int]) -> np.ndarray[Any, Any]:
    """The flat position inside a channel that each window reads at a position of the kernel."""
    flat = np.zeros([1] * window.rank, np.int64)
    for axis in range(window.rank):
        at = np.arange(window.target[axis]) * window.strides[axis] + tap[axis] * window.dilations[axis]
        at = np.clip(at - window.begin[axis], 0, window.source[axis] - 1) * math.prod(window.source[axis + 1 :])
        flat = flat + at.reshape([-1 if i == axis else 1 for i in range(window.rank)])
    return flat[None, None]
