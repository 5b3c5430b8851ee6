"""Reductions. Formulas: the operators' specifications (https://onnx.ai/onnx/operators/)."""

from __future__ import annotations

import math

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, lowering_rule, no_gradient, own, traits
from amp_transpiler.ops.common import Grads, integers, shape_of


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
    count = math.prod(shape_of(e, 0)[i] for i in _axes(e, op, 0))
    wide = e.f32(_kept(e, op, 0, dy))
    # Rounded before it is expanded: the large tensor is written once, in its own type.
    share = e.cast(e.Mul(wide, e.like(1 / max(count, 1), wide), shape=wide.shape), dy.dtype)
    return [_expanded(e, share)]


def _extreme(e: Emitter, op: Operator, x: Value, axes: Value | None, y: Value, dy: Value) -> Grads:
    """ReduceMax and ReduceMin: equal extremes share the gradient."""
    mask = e.cast(e.Equal(x, _kept(e, op, 1, y)), x.dtype)
    ties = e.reduce_sum(mask, _axes(e, op, 1), keepdims=True)
    return [e.Mul(mask, e.Div(_kept(e, op, 1, dy), ties))]


gradient("ReduceMax", reads="x0 x1 y0 dy0")(_extreme)
gradient("ReduceMin", reads="x0 x1 y0 dy0")(_extreme)


@gradient("ReduceSumSquare", reads="x0 x1 dy0")
def reduce_sum_square(e: Emitter, op: Operator, x: Value, axes: Value | None, dy: Value) -> Grads:
    return [e.Mul(x, e.Mul(_kept(e, op, 1, dy), e.like(2, dy)))]


@gradient("ReduceL1", reads="x0 x1 dy0")
def reduce_l1(e: Emitter, op: Operator, x: Value, axes: Value | None, dy: Value) -> Grads:
    return [e.Mul(e.Sign(x), _kept(e, op, 1, dy))]


@gradient("ReduceL2", reads="x0 x1 y0 dy0")
def reduce_l2(e: Emitter, op: Operator, x: Value, axes: Value | None, y: Value, dy: Value) -> Grads:
    """x / |x|, and 0 where the norm is 0."""
    zero = e.like(0, y)
    ratio = e.Where(e.Equal(y, zero), zero, e.Div(dy, y))
    return [e.Mul(x, _kept(e, op, 1, ratio))]


@gradient("ReduceLogSum", reads="x0 x1 y0 dy0")
def reduce_log_sum(e: Emitter, op: Operator, x: Value, axes: Value | None, y: Value, dy: Value) -> Grads:
    return [_expanded(e, _kept(e, op, 1, e.Mul(dy, e.Exp(e.Neg(y)))))]


@gradient("ReduceLogSumExp", reads="x0 x1 y0 dy0")
def reduce_log_sum_exp(e: Emitter, op: Operator, x: Value, axes: Value | None, y: Value, dy: Value) -> Grads:
    return [e.Mul(_kept(e, op, 1, dy), e.Exp(e.Sub(x, _kept(e, op, 1, y))))]


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


def _in_fp32(e: Emitter, op: Operator, x: Value, *axes: Value | None) -> Grads:
    """These square, multiply or exponentiate inside: 300² is beyond fp16 although its root is not."""
    return [e.op(op.type, x, *axes, **{name: op.attrs[name] for name in op.attrs})]


for _type in ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd"):
    lowering_rule(_type)(_in_fp32)

traits("ReduceMax", "ReduceMin", own("ReduceSumGrad"), exact=True)
traits(
    "ArgMax",
    "ArgMin",
    "CumSum",
    "Hardmax",
    "NonZero",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMean",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
)

no_gradient("ArgMax", "ArgMin", "NonZero", "Hardmax")
