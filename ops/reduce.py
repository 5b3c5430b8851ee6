"""Reductions. Formulas: the operators' specifications (https://onnx.ai/onnx/operators/)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.intervals import INF, Interval, RangeRule, Ranges, magnitude, same, same_or_zero, terms
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, lowering_rule, no_gradient, own, range_rule, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.ops.common import Grads, comparable, integers, shape_of


def _axes(e: Emitter, op: Operator, slot: int) -> list[int]:
    """The reduced axes, from 0; ``slot`` is the one of the axes in the gradient operator."""
    rank = len(shape_of(e, 0))
    axes = integers(e, op, slot, "axes of a reduction")
    if not axes:
        return [] if op.attrs.get("noop_with_empty_axes", 0) else list(range(rank))
    return sorted(axis % rank for axis in axes)


def _kept(e: Emitter, op: Operator, slot: int, value: Value) -> Value:
    """``value``, of the shape of the result, with every reduced axis kept as 1."""
    axes = _axes(e, op, slot)
    return e.reshape(value, [1 if i in axes else d for i, d in enumerate(shape_of(e, 0))])


def _expanded(e: Emitter, value: Value) -> Value:
    shape = shape_of(e, 0)
    return value if value.shape == shape else e.Expand(value, e.ints(*shape), shape=shape)


@gradient("ReduceSum", reads="x1 dy0", native=True)
def reduce_sum(e: Emitter, op: Operator, axes: Value | None, dy: Value) -> Grads:
    return [_expanded(e, _kept(e, op, 0, dy))]


@gradient("ReduceMean", reads="x1 dy0", native=True)
def reduce_mean(e: Emitter, op: Operator, axes: Value | None, dy: Value) -> Grads:
    count = max(math.prod(shape_of(e, 0)[i] for i in _axes(e, op, 0)), 1)
    kept = _kept(e, op, 0, dy)
    # Rounded before it is expanded: the large tensor is written once, in its own type.
    if dy.dtype in HALF and not e.hangs(count) and _holds(dy.dtype, count):
        return [_expanded(e, e.Div(kept, e.like(count, kept), shape=kept.shape))]
    wide = e.f32(kept)
    return [_expanded(e, e.cast(e.Mul(wide, e.like(1 / count, wide), shape=wide.shape), dy.dtype))]


def _holds(dtype: str, count: int) -> bool:
    """Whether a type has this number."""
    with np.errstate(over="ignore"):
        return float(np.array(count, numpy_dtype(dtype))) == count


def _extreme(e: Emitter, op: Operator, x: Value, axes: Value | None, y: Value, dy: Value) -> Grads:
    """ReduceMax and ReduceMin: equal extremes share the gradient."""
    reduced = _axes(e, op, 1)
    mask = e.Equal(comparable(e, x), comparable(e, _kept(e, op, 1, y)))
    dy = _kept(e, op, 1, dy)
    if reduced:
        ties = e.f32(e.ReduceSum(e.cast(mask, x.dtype), e.ints(*reduced), keepdims=1, shape=dy.shape))
        dy = e.cast(e.Div(e.cast(dy, ties.dtype), ties), x.dtype)
    return [e.Where(mask, dy, e.like(0, x))]


gradient("ReduceMax", reads="x0 x1 y0 dy0", native=True)(_extreme)
gradient("ReduceMin", reads="x0 x1 y0 dy0", native=True)(_extreme)


@gradient("ReduceSumSquare", reads="x0 x1 dy0", native=True)
def reduce_sum_square(e: Emitter, op: Operator, x: Value, axes: Value | None, dy: Value) -> Grads:
    return [e.Mul(x, e.Mul(_kept(e, op, 1, dy), e.like(2, dy)))]


@gradient("ReduceL1", reads="x0 x1 dy0", native=True)
def reduce_l1(e: Emitter, op: Operator, x: Value, axes: Value | None, dy: Value) -> Grads:
    return [e.Mul(e.Sign(x), _kept(e, op, 1, dy))]


@gradient("ReduceL2", reads="x0 x1 y0 dy0", native=True)
def reduce_l2(e: Emitter, op: Operator, x: Value, axes: Value | None, y: Value, dy: Value) -> Grads:
    """x / |x|, and 0 where the norm is 0. In 16 bit dy / |x| may not fit where x / |x| does."""
    zero, plain = e.like(0, y), comparable(e, y)
    nothing = e.Equal(plain, e.like(0, plain))
    if x.dtype in HALF:
        share = e.Where(nothing, zero, dy)
        return [e.Mul(e.Div(x, _kept(e, op, 1, e.Where(nothing, e.like(1, y), y))), _kept(e, op, 1, share))]
    return [e.Mul(x, _kept(e, op, 1, e.Where(nothing, zero, e.Div(dy, y))))]


@gradient("ReduceLogSum", reads="x0 x1 y0 dy0", native=True)
def reduce_log_sum(e: Emitter, op: Operator, x: Value, axes: Value | None, y: Value, dy: Value) -> Grads:
    share = e.Mul(e.f32(dy), e.Exp(e.Neg(e.f32(y))))
    return [_expanded(e, _kept(e, op, 1, e.cast(share, dy.dtype)))]


@gradient("ReduceLogSumExp", reads="x0 x1 y0 dy0", native=True)
def reduce_log_sum_exp(e: Emitter, op: Operator, x: Value, axes: Value | None, y: Value, dy: Value) -> Grads:
    """dy softmax(x); over several axes other than the last ones dy exp(x - y), off by as much as y was rounded."""
    over, shape = _axes(e, op, 1), shape_of(e, 0)
    if len(over) == 1:
        slope = e.Softmax(x, axis=over[0], shape=shape)
    elif over and over == list(range(len(shape) - len(over), len(shape))):
        rows = (*shape[: -len(over)], math.prod(shape[-len(over) :]))
        slope = e.reshape(e.Softmax(e.reshape(x, rows), axis=-1, shape=rows), shape)
    else:
        slope = e.Exp(e.Sub(x, _kept(e, op, 1, y)))
    return [e.Mul(_kept(e, op, 1, dy), slope)]


@gradient("ReduceProd", reads="x0 x1 dy0")
def reduce_prod(e: Emitter, op: Operator, x: Value, axes: Value | None, dy: Value) -> Grads:
    """The product of the other elements, also where elements are 0."""
    zero, one = e.like(0, x), e.like(1, x)
    reduced = e.ints(*_axes(e, op, 1))
    is_zero = e.Equal(x, zero)
    others = e.Where(is_zero, one, x)
    product = e.ReduceProd(others, reduced, keepdims=1, noop_with_empty_axes=1)
    zeros = e.reduce_sum(e.cast(is_zero, x.dtype), _axes(e, op, 1), keepdims=True)
    of_zero = e.Where(e.Equal(zeros, one), product, zero)
    of_other = e.Where(e.Equal(zeros, zero), e.Div(product, others), zero)
    return [e.Mul(_kept(e, op, 1, dy), e.Where(is_zero, of_zero, of_other))]


@gradient("CumSum", reads="x1 dy0")
def cum_sum(e: Emitter, op: Operator, axis: Value, dy: Value) -> Grads:
    reverse = int(not op.attrs.get("reverse", 0))
    return [e.CumSum(dy, axis, reverse=reverse, exclusive=op.attrs.get("exclusive", 0))]


@lowering_rule("ReduceLogSum", "ReduceLogSumExp", "ReduceProd", native=True)
def _in_fp32(e: Emitter, op: Operator, x: Value, *axes: Value | None) -> Grads:
    """These multiply or exponentiate inside, and nobody says in which type."""
    x, dtype = x if e.emulates else e.f32(x), x.dtype
    return [e.cast(e.op(op.type, x, *axes, outputs=None, **op.attrs), dtype)]


@lowering_rule("ReduceL1", "ReduceL2", "ReduceSumSquare", native=True)
def _wide_inside(e: Emitter, op: Operator, x: Value, *axes: Value | None) -> Grads:
    """CUDA's kernels square and add up in fp32 (300² is beyond fp16 although its root is not), and take no bfloat16."""
    x, dtype = comparable(e, x), x.dtype
    return [e.cast(e.op(op.type, x, *axes, outputs=None, **op.attrs), dtype)]


for _how, _types in {
    "sum": ("ReduceSum", "ReduceL1"),
    "mean": ("ReduceMean",),
    "max": ("ReduceMax",),
    "min": ("ReduceMin",),
    "squares": ("ReduceSumSquare",),
    "norm": ("ReduceL2",),
    "product": ("ReduceProd",),
    "log-sum": ("ReduceLogSum", "ReduceLogSumExp"),
}.items():
    traits(*_types, over="axes", reduces=_how)
traits("CumSum", over="axis", reduces="sum")
traits("CumProd", over="axis", reduces="product")
traits("ArgMax", over="axis", reduces="index", ignores="low", ranks=0)
traits("ArgMin", over="axis", reduces="index", ignores="high", ranks=0)
traits("ReduceMax", "ReduceLogSumExp", ignores="low")
traits("ReduceMin", ignores="high")
traits("ReduceSum", "ReduceL1", "ReduceMean", "ReduceMax", "ReduceMin", "CumSum", carries_large=True)
traits("ReduceSumSquare", "ReduceL2", "ReduceProd", "CumProd", "ReduceLogSumExp", carries_large=True)
traits("ReduceProd", "CumProd", overflows=Kind.MULTIPLIES)
traits("ReduceL2", overflows_inside=Kind.SQUARES_INSIDE)
traits("ReduceMax", "ReduceMin", own("ReduceSumGrad"), exact=True)
traits("NonZero", selects=True)
no_gradient("ArgMax", "ArgMin", "NonZero")

range_rule("ReduceMax", "ReduceMin", "ReduceMean")(same)


@range_rule("ReduceSum")
def _sum_range(op: Operator, ranges: Ranges) -> Interval | None:
    found, many = ranges.bound(op.input(0)), terms(op)
    return None if found is None or many is None else (found[0] * many, found[1] * many)


def last_less_each(op: Operator, ranges: Ranges) -> bool:
    """Whether an operator of two inputs has the last of running sums of nothing above 0, along their axis, and all of
    them: in the decays of a state (Mamba 2) the latter are taken off the former."""
    last, sums = (ranges.source(v) for v in op.inputs[:2])
    running, cut = (None if v is None else v.producer for v in (sums, last))
    if running is None or cut is None or running.full_type != "CumSum" or cut.full_type != "Slice":
        return False
    bound, axis = ranges.bound(running.input(0)), ranges.content(running.input(1))
    start, along = (ranges.content(cut.input(slot)) for slot in (1, 3))
    if bound is None or bound[1] > 0 or running.attrs.get("reverse", 0) or ranges.source(cut.input(0)) is not sums:
        return False
    numbers = [None if data is None else as_array(data).reshape(-1).tolist() for data in (axis, start, along)]
    shape = sums.shape if sums is not None else None
    if shape is None or any(number is None or len(number) != 1 for number in numbers):
        return False
    (at,), (begin,), (over,) = numbers  # type: ignore[misc]
    one = last is not None and last.shape is not None and last.shape[over % len(shape)] == 1
    return one and begin == -1 and at % len(shape) == over % len(shape)


@range_rule("CumSum")
def _cum_sum_range(op: Operator, ranges: Ranges) -> Interval | None:
    found, x = same_or_zero(op, ranges), op.input(0)
    shape = None if x is None else static(x.shape)
    if found is None or shape is None:
        return None
    longest = max(shape, default=1)
    return found[0] * longest, found[1] * longest


def _size_range(size: Callable[[float, int], float]) -> RangeRule:
    def rule(op: Operator, ranges: Ranges) -> Interval | None:
        found, many = ranges.bound(op.input(0)), terms(op)
        return (0.0, INF) if found is None or many is None else (0.0, size(magnitude(found)[1], many))

    return rule


range_rule("ReduceL1")(_size_range(lambda largest, many: largest * many))
range_rule("ReduceL2")(_size_range(lambda largest, many: largest * math.sqrt(many)))
range_rule("ReduceSumSquare")(_size_range(lambda largest, many: largest**2 * many))
