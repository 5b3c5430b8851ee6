"""Sums of which every partial result is rounded, as kernels of some places compute them: what emulates them on CPU.

Orders of additions are those of ``lists/roundings.toml``. A rule here gets 16-bit values with fixed shapes, and emits
under emulation, where each operator's result is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.common import padded, scaled_by, size_of, sliced
from amp_transpiler.ops.conv import transposed_window
from amp_transpiler.ops.einsum import terms_of
from amp_transpiler.ops.pool import window_by_runtime, window_counts
from amp_transpiler.ops.window import Window, window_by

#: What is added up at one position, of the slices of some values there.
Term = Callable[..., Value]


class Summed(NamedTuple):
    """What a rule writes out: the order of additions, the operator's attributes, the shape of its result."""

    order: str
    attrs: Mapping[str, Any]
    shape: tuple[int, ...]


#: ``rule(e, summed, *inputs)``; None where it does not serve these operands.
SumRule = Callable[..., Value | None]

#: Positions up to which a sum is written out; longer ones are a Scan.
_FEW = 4
#: By order of additions: the lanes in which a kernel adds up beside each other.
LANES = {"lanes": 64, "128 lanes": 128, "256 lanes": 256}
_RULES: dict[str, SumRule] = {}


def rounded_sum(*types: str) -> Callable[[SumRule], SumRule]:
    """Register how the sums of operators are written out."""

    def register(rule: SumRule) -> SumRule:
        _RULES.update(dict.fromkeys(types, rule))
        return rule

    return register


def sum_rule(full_type: str) -> SumRule | None:
    """How the sum of an operator is written out; None where nobody has said it."""
    return _RULES.get(full_type)


# -- orders ---------------------------------------------------------------------------------------------
def in_turn(e: Emitter, values: Sequence[Value], term: Term, shape: Sequence[int]) -> Value:
    """The sum of ``term(slice of each value)``, of this shape, over the first axis, each added to those before it."""
    if size_of(values[0])[0] <= _FEW:
        return _written_out(e, values, term)
    start = e.zeros(shape, values[0].dtype)
    slices = [Value("", v.dtype, size_of(v)[1:]) for v in values]
    body, _ = e.graph("sum", [start, *slices], lambda total, *at: [e.Add(total, term(*at), shape=shape)])
    return e.op("Scan", start, *values, dtype=values[0].dtype, shape=shape, body=body, num_scan_inputs=len(values))


def _written_out(e: Emitter, values: Sequence[Value], term: Term) -> Value:
    count = size_of(values[0])[0]
    at = [[e.Gather(v, e.const(k, "int64"), axis=0, shape=size_of(v)[1:]) for v in values] for k in range(count)]
    total = term(*at[0])
    for slices in at[1:]:
        total = e.Add(total, term(*slices), shape=total.shape)
    return total


def in_fours(e: Emitter, values: Sequence[Value], term: Term, shape: Sequence[int]) -> Value:
    """Sums of four, in turn, added in turn; there are four times as many as are added last."""
    split = [e.reshape(v, (size_of(v)[0] // 4, 4, *size_of(v)[1:])) for v in values]
    return in_turn(e, split, lambda *four: _written_out(e, four, term), shape)


def in_lanes(e: Emitter, rows: Value, order: str = "lanes") -> Value:
    """[count, n] added up along the first axis: lanes in turn, then by halves. [n]."""
    count, width = size_of(rows)
    lanes = min(count, LANES[order])
    rounds = -(-count // lanes)
    if rounds * lanes > count:
        rows = padded(e, rows, [0, 0], [rounds * lanes - count, 0])
    total = in_turn(e, [e.reshape(rows, (rounds, lanes, width))], lambda lane: lane, (lanes, width))
    while lanes > 1:
        kept = (lanes + 1) // 2
        upper = sliced(e, total, 0, kept, lanes)
        if lanes % 2:
            upper = padded(e, upper, [0, 0], [1, 0])
        total, lanes = e.Add(sliced(e, total, 0, 0, kept), upper, shape=(kept, width)), kept
    return e.reshape(total, (width,))


def _in_128_lanes(e: Emitter, values: Sequence[Value], term: Term, shape: Sequence[int]) -> Value:
    """The sum of a pool's windows."""
    rows = e.reshape(values[0], (size_of(values[0])[0], math.prod(shape)))
    return e.reshape(in_lanes(e, rows, "128 lanes"), shape)


_ORDERS = {"in turn": in_turn, "fours": in_fours, "128 lanes": _in_128_lanes}


# -- products -------------------------------------------------------------------------------------------
@rounded_sum("MatMul")
def _matmul(e: Emitter, op: Summed, a: Value, b: Value) -> Value | None:
    if min(len(size_of(a)), len(size_of(b))) < 2:
        return None
    (*batch_a, m, count), (*batch_b, _, n) = size_of(a), size_of(b)
    left = e.reshape(_first(e, a, len(batch_a) + 1), (count, *batch_a, m, 1))
    right = e.reshape(_first(e, b, len(batch_b)), (count, *batch_b, 1, n))
    return _ORDERS[op.order](e, [left, right], lambda x, y: e.Mul(x, y, shape=op.shape), op.shape)


def _first(e: Emitter, value: Value, axis: int) -> Value:
    """The value with this axis first."""
    return e.transpose(value, [axis, *(i for i in range(len(size_of(value))) if i != axis)])


@rounded_sum("Gemm")
def _gemm(e: Emitter, op: Summed, a: Value, b: Value, c: Value | None = None) -> Value | None:
    shape = op.shape
    alpha, beta = float(op.attrs.get("alpha") or 1.0), float(1.0 if op.attrs.get("beta") is None else op.attrs["beta"])
    left = a if op.attrs.get("transA") else e.transpose(a, [1, 0])
    right = e.transpose(b, [1, 0]) if op.attrs.get("transB") else b
    count = size_of(left)[0]
    values = [e.reshape(left, (count, shape[0], 1)), e.reshape(right, (count, 1, shape[1]))]
    total = scaled_by(e, _ORDERS[op.order](e, values, lambda x, y: e.Mul(x, y, shape=shape), shape), alpha)
    return total if c is None else e.Add(total, scaled_by(e, c, beta), shape=shape)


@rounded_sum("Einsum")
def _einsum(e: Emitter, op: Summed, *values: Value) -> Value | None:
    """Sums go through their labels in the order of letters, the last one fastest."""
    terms, result, sizes = terms_of(op.attrs, [size_of(v) for v in values])
    if 0 in sizes.values():
        return None
    summed = sorted(sizes.keys() - set(result))
    laid = [_laid_out(e, v, term, summed, result, sizes) for v, term in zip(values, terms, strict=True)]

    def product(*factors: Value) -> Value:
        made = factors[0]
        for factor in factors[1:]:
            made = e.Mul(made, factor, shape=np.broadcast_shapes(size_of(made), size_of(factor)))
        return made

    return in_turn(e, laid, product, op.shape)


def _laid_out(
    e: Emitter, value: Value, term: str, summed: Sequence[str], result: str, sizes: Mapping[str, int]
) -> Value:
    """An operand with what is summed on the first axis, and an axis for each label of the result."""
    if len(set(term)) < len(term):  # the diagonal
        once, count = "".join(dict.fromkeys(term)), math.prod(size_of(value))
        at = np.einsum(f"{term}->{once}", np.arange(count).reshape(size_of(value)))
        value, term = e.Gather(e.reshape(value, (count,)), e.const(at), axis=0, shape=at.shape), once
    own, every = dict(zip(term, size_of(value), strict=True)), [*summed, *result]
    turned = e.transpose(value, [term.index(label) for label in every if label in own])
    kept, whole = [own.get(label, 1) for label in result], [sizes[label] for label in summed]
    apart = e.reshape(turned, [*(own.get(label, 1) for label in summed), *kept])
    if size_of(apart) != (*whole, *kept):
        apart = e.Expand(apart, e.ints(*whole, *kept), shape=(*whole, *kept))
    return e.reshape(apart, (math.prod(whole), *kept))


@rounded_sum("Conv")
def _conv(e: Emitter, op: Summed, x: Value, w: Value, bias: Value | None = None) -> Value | None:
    window = window_by(op.attrs, size_of(w)[2:], size_of(x)[2:], op.shape[2:])
    group, (outputs, channels) = int(op.attrs.get("group") or 1), size_of(w)[:2]
    taps = len(window.taps)
    split = e.reshape(w, (group, outputs // group, channels, taps))
    weights = e.reshape(e.transpose(split, [3, 2, 0, 1]), (taps * channels, 1, group, outputs // group, 1))
    return _with_bias(e, _correlation(e, op.order, x, weights, window), bias, op.shape)


@rounded_sum("ConvTranspose")
def _conv_transpose(e: Emitter, op: Summed, x: Value, w: Value, bias: Value | None = None) -> Value | None:
    """The correlation of X, with zeros between strides, and the kernel turned around."""
    shape = op.shape
    slid = transposed_window(op.attrs, x, w, Value("", x.dtype, shape))
    apart = spread(e, x, slid.strides)
    begin = tuple(n - 1 - b for n, b in zip(slid.extent, slid.begin, strict=True))
    if min(begin) < 0:
        return None
    window = Window(slid.kernel, (1,) * slid.rank, slid.dilations, begin, size_of(apart)[2:], shape[2:])
    group, (channels, outputs) = int(op.attrs.get("group") or 1), size_of(w)[:2]
    taps = len(window.taps)
    split = e.reshape(w, (group, channels // group, outputs, taps))
    turned = e.Gather(e.transpose(split, [3, 1, 0, 2]), e.ints(*range(taps - 1, -1, -1)), axis=0)
    weights = e.reshape(turned, (taps * channels // group, 1, group, outputs, 1))
    return _with_bias(e, _correlation(e, op.order, apart, weights, window), bias, shape)


def spread(e: Emitter, x: Value, strides: Sequence[int]) -> Value:
    """X with zeros between its elements, so that neighbours are as far apart as strides say."""
    for axis, stride in enumerate(strides, 2):
        if stride > 1:
            size = size_of(x)
            columns = e.reshape(x, (*size[: axis + 1], 1, *size[axis + 1 :]))
            zeros = [0] * len(size_of(columns))
            wide = padded(e, columns, zeros, [*zeros[: axis + 1], stride - 1, *zeros[axis + 2 :]])
            x = e.reshape(wide, (*size[:axis], size[axis] * stride, *size[axis + 1 :]))
    return x


def _correlation(e: Emitter, order: str, x: Value, weights: Value, window: Window) -> Value:
    """[N, group, O, positions] of X and the weights of each position of the kernel and channel of a group."""
    batch, (count, _, group, outputs, _) = size_of(x)[0], size_of(weights)
    channels, positions = count // len(window.taps), math.prod(window.target)
    around = window.pad(e, x, 2)
    read = [e.reshape(window.read(e, around, t, 2), (1, batch, group, channels, positions)) for t in window.taps]
    whole = read[0] if len(read) == 1 else e.Concat(*read, axis=0, shape=(len(read), *size_of(read[0])[1:]))
    values = e.reshape(e.transpose(whole, [0, 3, 1, 2, 4]), (count, batch, group, 1, positions))
    shape = (batch, group, outputs, positions)
    return _ORDERS[order](e, [values, weights], lambda a, b: e.Mul(a, b, shape=shape), shape)


def _with_bias(e: Emitter, total: Value, bias: Value | None, shape: tuple[int, ...]) -> Value:
    total = e.reshape(total, shape)
    if bias is None:
        return total
    return e.Add(total, e.reshape(bias, (shape[1], *[1] * (len(shape) - 2))), shape=shape)


# -- sums of one operand ---------------------------------------------------------------------------------
def _rounded_once(type_: str, e: Emitter, x: Value) -> Value:
    return e.cast(e.op(type_, e.cast(x, "float32"), shape=x.shape), x.dtype)


_BEFORE: Mapping[str, Callable[[Emitter, Value], Value]] = {
    "ReduceL1": lambda e, x: e.Abs(x),
    "ReduceL2": lambda e, x: e.Mul(x, x),
    "ReduceLogSumExp": partial(_rounded_once, "Exp"),
    "ReduceSumSquare": lambda e, x: e.Mul(x, x),
}
_AFTER: Mapping[str, Callable[[Emitter, Value, int], Value]] = {
    "ReduceL2": lambda e, x, count: e.Sqrt(x),
    "ReduceLogSum": lambda e, x, count: _rounded_once("Log", e, x),
    "ReduceLogSumExp": lambda e, x, count: _rounded_once("Log", e, x),
    "ReduceMean": lambda e, x, count: e.Div(x, e.like(count, x)),
}


def reduced_axes(e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None]) -> list[int] | None:
    """The axes over which a reduction goes; None where they are not known."""
    x, given = (*inputs, None)[:2]
    if x is None or x.shape is None or (given is not None and given.name not in e.initializers):
        return None
    named = [] if given is None else e.content(given).tolist()
    whole = [] if attrs.get("noop_with_empty_axes") else [*range(len(x.shape))]
    return sorted(axis % len(x.shape) for axis in named) or whole


def reduced_shape(e: Emitter, attrs: Mapping[str, Any], inputs: Sequence[Value | None]) -> tuple[int, ...] | None:
    """The shape of what a reduction makes; None where it is not known."""
    axes, x = reduced_axes(e, attrs, inputs), inputs[0]
    if axes is None or x is None:
        return None
    sizes = [1 if axis in axes else size for axis, size in enumerate(size_of(x))]
    return tuple(n for axis, n in enumerate(sizes) if attrs.get("keepdims", 1) or axis not in axes)


def _reduced(type_: str) -> None:
    @rounded_sum(type_)
    def reduce(e: Emitter, op: Summed, x: Value, over: Value | None = None) -> Value | None:
        axes = reduced_axes(e, op.attrs, [x, over])
        if axes is None:
            return None
        rank = len(size_of(x))
        count = math.prod(size_of(x)[axis] for axis in axes)
        kept = [axis for axis in range(rank) if axis not in axes]
        x = _BEFORE[type_](e, x) if type_ in _BEFORE else x
        rows = e.reshape(e.transpose(x, [*axes, *kept]), (count, math.prod(op.shape)))
        total = in_lanes(e, rows, op.order) if axes else x
        total = e.reshape(total, op.shape)
        return _AFTER[type_](e, total, count) if type_ in _AFTER else total


for _type in ("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"):
    _reduced(_type)


@rounded_sum("CumSum")
def _cumulative(e: Emitter, op: Summed, x: Value, at: Value) -> Value | None:
    """Each sum begins with its first summand, also of those that go to the end of the axis."""
    shape = op.shape
    if at.name not in e.initializers or not math.prod(shape):
        return None
    axis = int(e.content(at).item()) % len(shape)
    turned = [axis, *(i for i in range(len(shape)) if i != axis)]
    count, last = shape[axis], int(bool(op.attrs.get("exclusive")))
    rows = e.reshape(e.transpose(x, turned), (count, math.prod(shape) // count))
    width, zero = size_of(rows)[1], e.like(0, rows)
    if op.attrs.get("reverse"):
        begins = e.const(np.arange(count)[:, None] + last)

        def summand(row: Value, at: Value) -> Value:
            return e.Where(e.GreaterOrEqual(at, begins, shape=(count, 1)), row, zero, shape=(count, width))

        sums = in_turn(e, [rows, e.ints(*range(count))], summand, (count, width))
    else:
        start, row = (e.zeros((width,), x.dtype), Value("", x.dtype, (width,)))
        body, _ = e.graph("sum", [start, row], lambda total, at: [e.Add(total, at, shape=(width,))] * 2)
        kept = padded(e, rows, [1, 0], [0, 0]) if last else rows
        _, made = e.op("Scan", start, kept, outputs=2, dtype=x.dtype, body=body, num_scan_inputs=1)
        sums = e.Slice(made, e.ints(0), e.ints(count), e.ints(0), shape=(count, width))
    back = e.reshape(sums, [shape[i] for i in turned])
    return e.transpose(back, [turned.index(i) for i in range(len(shape))])


@rounded_sum("GlobalAveragePool")
def _global_average(e: Emitter, op: Summed, x: Value) -> Value | None:
    batch, channels, *spatial = size_of(x)
    rows = e.transpose(e.reshape(x, (batch, channels, math.prod(spatial))), [2, 0, 1])
    total = _ORDERS[op.order](e, [rows], lambda row: row, (batch, channels))
    return e.reshape(e.Div(total, e.like(math.prod(spatial), total)), op.shape)


@rounded_sum("AveragePool")
def _average(e: Emitter, op: Summed, x: Value) -> Value | None:
    shape = op.shape
    window = window_by_runtime(op.attrs, size_of(x)[2:], shape[2:])
    if window is None or window.target != shape[2:]:
        return None
    around = window.pad(e, x, 2)
    read = [e.reshape(window.read(e, around, tap, 2), (1, *shape)) for tap in window.taps]
    whole = read[0] if len(read) == 1 else e.Concat(*read, axis=0, shape=(len(read), *shape))
    total = _ORDERS[op.order](e, [whole], lambda row: row, shape)
    return e.Div(total, e.const(window_counts(op.attrs, window), total.dtype), shape=shape)
