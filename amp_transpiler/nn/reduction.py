"""Along axes: sums, means, extremes, norms, orders, running sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import ONNX_TYPES, element_type
from amp_transpiler.nn.building import (
    FLOATING,
    Builder,
    append_many,
    appending,
    as_type,
    axes_of,
    axis_of,
    constant,
    describe,
    fixed,
    prefixed,
    real,
    variable,
    whole,
)
from amp_transpiler.nn.calls import function, member
from amp_transpiler.option_checks import switch

Axis = int | Sequence[int] | None


def _reduce(put: Builder, type_: str, x: Variable, axis: Axis, keepdim: bool) -> Variable:
    variable(put.call, "x", x)
    inputs: list[Any] = [x]
    if axis is not None:
        inputs.append(np.array(axes_of(put.call, axis, x), np.int64))
    return put(type_, *inputs, keepdims=int(switch(f"{put.call}: keepdim", keepdim)))


class _Reduction(NamedTuple):
    name: str
    type: str
    text: str


def _reduction(
    kind: _Reduction,
    x: Variable,
    axis: Axis = None,
    keepdim: bool = False,
    dtype: Any = None,
    *,
    name: str | None = None,
) -> Variable:
    """{0.text} over ``axis`` (one or several); over everything, to a scalar of shape [], where it is None.

    ``keepdim``: keep the reduced dimensions, with size 1. ``dtype``: what ``x`` is cast to first.
    """
    return _reduce(appending(kind.name), kind.type, as_type(x, dtype), axis, keepdim)


_EXTREME = "(equal ones share the gradient; the CPU kernel may pass over NaN)"
mean, sum, max, min, prod, logsumexp = (
    member(_reduction, kind, kind.name, "nn.reduction")
    for kind in (
        _Reduction("mean", "ReduceMean", "Mean"),
        _Reduction("sum", "ReduceSum", "Sum"),
        _Reduction("max", "ReduceMax", f"Maximum {_EXTREME}"),
        _Reduction("min", "ReduceMin", f"Minimum {_EXTREME}"),
        _Reduction("prod", "ReduceProd", "Product"),
        _Reduction("logsumexp", "ReduceLogSumExp", "Logarithm of the sum of exp(x)"),
    )
)


@function("nn.reduction")
def var(
    x: Variable, axis: Axis = None, unbiased: bool = True, keepdim: bool = False, *, name: str | None = None
) -> Variable:
    """Variance over ``axis``, or over everything: the sum of squared deviations over N - 1, or N if not ``unbiased``.

    ``x``: float. One element has an unbiased variance of NaN where its number is not known before the run.
    """
    call = "var"
    put = appending(call)
    variable(call, "x", x, dtypes=FLOATING, min_rank=1)
    axes = axes_of(call, list(range(len(x.shape or ()))) if axis is None else axis, x)
    deviation = _deviation(put, x, axes)
    less = int(switch(f"{call}: unbiased", unbiased))
    count = _count(call, x, axes, less)
    if count is None:
        squares = put("Pow", deviation, constant(x, 2))
        mean = _reduce(put, "ReduceMean", squares, axes, keepdim)
        if not less:
            return mean
        # N / (N - 1) times the mean, without a number that 16 bit does not hold: one that is infinite adds nothing
        others = put("Cast", _counted(put, x, axes, 1), to=ONNX_TYPES[str(x.dtype)])
        return put("Add", mean, put("Div", mean, others))
    # The square of a deviation may leave 16 bit where the variance does not: so of shares, whose squares add up to it.
    digits, exponent = math.frexp(1 / math.sqrt(count))
    share = math.ldexp(math.floor(8 * digits) / 8, exponent)  # of three binary digits: every type holds it
    shares = put("Mul", deviation, constant(x, share))
    y = _reduce(put, "ReduceSumSquare", shares, axes, keepdim)
    rest = 1 / (count * share**2) - 1
    if not rest:
        return y
    # A factor near 1 would be rounded to 16 bit.
    return put("Add", y, put("Mul", y, constant(x, rest)))


def _deviation(put: Builder, x: Variable, axes: list[int]) -> Variable:
    """``x`` less its mean, which 16 bit rounds: so less the mean of what that leaves, too.

    No gradient goes through the means: that of a sum of squared deviations is 0 there.
    """
    for _ in range(2):
        mean = _reduce(put, "ReduceMean", x, axes, True)
        mean.stop_gradient = True
        x = put("Sub", x, mean)
    return x


def _count(call: str, x: Variable, axes: list[int], less: int) -> int | None:
    """By what a variance divides a sum: the elements, ``less`` one where it is unbiased; None where that is open."""
    sizes = [(x.shape or ())[axis] for axis in axes]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        return None
    if less and math.prod(known) < 2:
        raise ArgumentError(f"{call}: an unbiased variance needs 2 elements or more; pass unbiased=False")
    return math.prod(known) - less or None


def _counted(put: Builder, x: Variable, axes: list[int], less: int, keepdims: int = 0) -> Variable:
    """The same of open sizes, int64."""
    sizes = put("Gather", put("Shape", x), np.array(axes, np.int64))
    count = put("ReduceProd", sizes, keepdims=keepdims)
    return put("Sub", count, np.array(less, np.int64)) if less else count


@function("nn.reduction")
def std(
    x: Variable, axis: Axis = None, unbiased: bool = True, keepdim: bool = False, *, name: str | None = None
) -> Variable:
    """Square root of :func:`var`; of elements that are all alike it is 0, and so is its gradient.

    In 16-bit programs it is the length of the deviations over a number, and fits where the variance does not.
    """
    call = "std"
    put = appending(call)
    variable(call, "x", x, dtypes=FLOATING, min_rank=1)
    axes = axes_of(call, list(range(len(x.shape or ()))) if axis is None else axis, x)
    length = _reduce(put, "ReduceL2", _deviation(put, x, axes), axes, keepdim)
    less = int(switch(f"{call}: unbiased", unbiased))
    count = _count(call, x, axes, less)
    if less and count is not None:
        return put("Div", length, constant(x, math.sqrt(count)))
    ones = put("Expand", constant(x, 1), _counted(put, x, axes, less, 1))
    root = put("ReduceL2", ones, keepdims=0)
    return put("Div", length, root)


@function("nn.reduction")
def norm(
    x: Variable, p: float | str = 2, axis: Axis = None, keepdim: bool = False, *, name: str | None = None
) -> Variable:
    """``sum(|x|**p)**(1/p)`` over ``axis``, or over everything: a vector's ``p``-norm. ``x``: float.

    ``p``: 1 or more, "fro" for 2, infinity for the largest absolute value, -infinity for the smallest. In 16-bit
    programs 1 and 2 are computed in fp32, others relative to the largest absolute value, so that no power overflows.
    The gradient of a norm of zeros is 0.
    """
    call = "norm"
    kept, put = switch(f"{call}: keepdim", keepdim), appending(call)
    power = _power(call, 2 if p == "fro" else p)
    variable(call, "x", x, dtypes=FLOATING)
    if power in _NORMS:
        return _reduce(put, _NORMS[power], x, axis, kept)
    sizes = put("Abs", x)
    if math.isinf(power):
        return _reduce(put, "ReduceMax" if power > 0 else "ReduceMin", sizes, axis, kept)
    largest = _or_one(put, _reduce(put, "ReduceMax", sizes, axis, True))
    powers = put("Pow", put("Div", sizes, largest), constant(x, power))
    root = put("Pow", _reduce(put, "ReduceSum", powers, axis, True), constant(x, 1 / power))
    size = put("Mul", root, largest)
    shares = put("Div", sizes, _or_one(put, size))
    slope = put("Mul", put("Sign", x), put("Pow", shares, constant(x, power - 1)))
    slope.stop_gradient = True  # a norm is the sum of x times its own gradient
    y = _reduce(put, "ReduceSum", put("Mul", x, slope), axis, True)
    off = put("Mul", put("Sub", size, y), constant(x, 1 - 1 / power))  # a step of Newton's
    off.stop_gradient = True
    y = put("Add", y, off)
    return y if kept else _reduce(put, "ReduceSum", y, axis, False)


_NORMS = {1.0: "ReduceL1", 2.0: "ReduceL2"}


def _power(call: str, p: Any) -> float:
    power = real(call, "p", p)
    if not (power >= 1 or power == -math.inf):
        raise ArgumentError(f'{call}: p is {p!r}; expected 1 or more, "fro" or -inf')
    return power


@function()
def normalize(
    x: Variable, p: float | str = 2, axis: int = 1, epsilon: float = 1e-12, *, name: str | None = None
) -> Variable:
    """``x`` over its :func:`norm` along ``axis``, which counts as at least ``epsilon``; zeros stay zeros."""
    call = "normalize"
    at = axis_of(call, axis, variable(call, "x", x, dtypes=FLOATING))
    put = appending(call)
    with prefixed(put.prefix):
        size = norm(x, p, at, True)
    return put("Div", x, above_zero(put, size, real(call, "epsilon", epsilon)))


def above_zero(put: Builder, size: Variable, least: float) -> Variable:
    """``size``, which is not negative, as a divisor: at least ``least``, and 1 where it is 0, also where 16 bit
    cannot hold ``least``."""
    size = _or_one(put, size)
    return put("Max", size, constant(size, least))


def _or_one(put: Builder, size: Variable) -> Variable:
    """``size``, and 1 where it is 0."""
    positive = put("Greater", size, constant(size, 0))
    return put("Where", positive, size, constant(size, 1))


@function()
def cosine_similarity(
    x1: Variable, x2: Variable, axis: int = 1, eps: float = 1e-8, *, name: str | None = None
) -> Variable:
    """The sum of x1 * x2 along ``axis`` over the product of their norms, which counts as at least ``eps``."""
    call = "cosine_similarity"
    variable(call, "x1", x1, dtypes=FLOATING)
    variable(call, "x2", x2, dtypes=(str(x1.dtype),))
    at, put = axis_of(call, axis, x1), appending(call)
    first, second = (_reduce(put, "ReduceL2", x, at, True) for x in (x1, x2))
    second = _or_one(put, second)
    least = put("Div", constant(x1, real(call, "eps", eps)), second)
    first = put("Max", _or_one(put, first), least)
    # Each over its own norm: the product of two vectors may leave 16 bit where their cosine does not.
    units = [put("Div", *pair) for pair in ([x1, first], [x2, second])]
    return _reduce(put, "ReduceSum", put("Mul", *units), at, False)


# -- places of extremes and orders --------------------------------------------------------------------------------
def _extreme_place(call: str, type_: str, x: Variable, axis: int | None, keepdim: bool, dtype: Any) -> Variable:
    variable(call, "x", x)
    put = appending(call)
    if axis is None:
        if switch(f"{call}: keepdim", keepdim):
            raise ArgumentError(f"{call}: keepdim=True goes with an axis")
        x, axis = put("Reshape", x, np.array([-1], np.int64)), 0
    attrs = {"axis": axis_of(call, axis, x), "keepdims": int(switch(f"{call}: keepdim", keepdim))}
    y = put(type_, x, **attrs)
    kind = element_type(dtype)
    return y if kind == "int64" else put("Cast", y, to=ONNX_TYPES[kind])


@function("nn.reduction")
def argmax(
    x: Variable, axis: int | None = None, keepdim: bool = False, dtype: Any = "int64", *, name: str | None = None
) -> Variable:
    """The place of the first maximum along ``axis``; in ``x`` laid out flat where it is None."""
    return _extreme_place("argmax", "ArgMax", x, axis, keepdim, dtype)


@function("nn.reduction")
def argmin(
    x: Variable, axis: int | None = None, keepdim: bool = False, dtype: Any = "int64", *, name: str | None = None
) -> Variable:
    """The place of the first minimum along ``axis``; in ``x`` laid out flat where it is None."""
    return _extreme_place("argmin", "ArgMin", x, axis, keepdim, dtype)


def _ordered(call: str, x: Variable, k: int, axis: int, largest: bool, in_order: bool) -> list[Variable]:
    attrs = {"axis": axis, "largest": int(largest), "sorted": int(in_order)}
    return append_many(call, "TopK", [x, np.array([k], np.int64)], 2, attrs=attrs)


@function()
def topk(
    x: Variable, k: int, axis: int = -1, largest: bool = True, sorted: bool = True, *, name: str | None = None
) -> tuple[Variable, Variable]:
    """The ``k`` largest (or smallest) along ``axis``, and their int64 places there; ``sorted``: the first ones first.

    ``x``: float or integer. The gradient goes to the elements taken.
    """
    call = "topk"
    variable(call, "x", x, min_rank=1)
    at, k = axis_of(call, -1 if axis is None else axis, x), whole(call, "k", k)
    size = (x.shape or ())[at]
    if isinstance(size, int) and k > size:
        raise ArgumentError(f"{call}: k={k} is more than dimension {at} of {describe(x)} has")
    values, places = _ordered(call, x, k, at, switch(f"{call}: largest", largest), switch(f"{call}: sorted", sorted))
    return values, places


@function()
def sort(x: Variable, axis: int = -1, descending: bool = False, *, name: str | None = None) -> Variable:
    """``x`` in order along ``axis``, whose size is known."""
    at = axis_of("sort", axis, x)
    return _ordered("sort", x, fixed("sort", "x", x, at), at, switch("sort: descending", descending), True)[0]


@function()
def argsort(x: Variable, axis: int = -1, descending: bool = False, *, name: str | None = None) -> Variable:
    """The int64 places that put ``x`` in order along ``axis``, whose size is known."""
    at = axis_of("argsort", axis, x)
    return _ordered("argsort", x, fixed("argsort", "x", x, at), at, switch("argsort: descending", descending), True)[1]


@function()
def cumsum(x: Variable, axis: int | None = None, dtype: Any = None, *, name: str | None = None) -> Variable:
    """The sum of everything up to each element along ``axis``; of ``x`` laid out flat where it is None."""
    call = "cumsum"
    x = as_type(variable(call, "x", x), dtype)
    put = appending(call)
    if axis is None:
        x, axis = put("Reshape", x, np.array([-1], np.int64)), 0
    return put("CumSum", x, np.array(axis_of(call, axis, x), np.int64))


@function()
def cumprod(x: Variable, dim: int | None = None, dtype: Any = None, *, name: str | None = None) -> Variable:
    """The product of everything up to each element along ``dim``; of ``x`` laid out flat where it is None.

    The size of that dimension is known. Gradients are right beside zeros too. Products of neighbours are multiplied,
    then of twos, fours, …; each product is rounded, so that 16 bit loses more the more of them there are.
    """
    call = "cumprod"
    x = as_type(variable(call, "x", x), dtype)
    put = appending(call)
    if dim is None:
        x, dim = put("Reshape", x, np.array([-1], np.int64)), 0
    at = axis_of(call, dim, x, "dim")
    size, step, one = fixed(call, "x", x, at), 1, constant(x, 1)
    axes, front = np.array([at], np.int64), np.array([0], np.int64)
    while step < size:
        head = put("Slice", x, front, np.array([size - step], np.int64), axes)
        before = put("Pad", head, np.array([step, 0], np.int64), one, axes)
        x, step = put("Mul", x, before), step * 2
    return x
