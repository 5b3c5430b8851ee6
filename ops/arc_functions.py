"""Angles, arcs and hyperbolic functions. Formulas of gradients: the operators' specifications
(https://onnx.ai/onnx/operators/).

CUDA has kernels of Sin and Cos alone. What stands for the others there is within some roundings of fp32 (of float64,
where the input is that) over the whole range of its argument: what cancels near a zero or leaves the format on the way
is avoided. Identities: https://dlmf.nist.gov/4.23 and https://dlmf.nist.gov/4.37.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, lowering_rule, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.lists import TARGET_OPSET, PlaceTraits, has_kernel
from amp_transpiler.ops.common import Grads, pointwise

pointwise(
    "x0 dy0",
    Sin=lambda e, x, dy: e.Mul(dy, e.Cos(x)),
    Cos=lambda e, x, dy: e.Neg(e.Mul(dy, e.Sin(x))),
    Asin=lambda e, x, dy: e.Div(dy, _arc(e, x)),
    Acos=lambda e, x, dy: e.Neg(e.Div(dy, _arc(e, x))),
    Sinh=lambda e, x, dy: _times_cosh(e, dy, x),
    # sinh as tanh * cosh: the difference of two exponentials cancels near 0.
    Cosh=lambda e, x, dy: _times_cosh(e, e.Mul(dy, e.Tanh(x)), x),
)
pointwise(
    "y0 dy0",
    # dy (y² + 1), without the square alone: it leaves fp16 from 256 on.
    Tan=lambda e, y, dy: e.Add(e.Mul(e.Mul(dy, y), y), dy),
)


def _arc(e: Emitter, x: Value) -> Value:
    """The square root of 1 - x²."""
    one = e.like(1, x)
    return e.Sqrt(e.Mul(e.Sub(one, x), e.Add(one, x)))


def _square_and_one(e: Emitter, x: Value) -> tuple[Value | None, Value]:
    """m and s with 1 + x² = m² s; where x² fits the type, m is 1, and None."""
    one = e.like(1, x)
    if x.dtype not in HALF:
        return None, e.Add(e.Mul(x, x), one)
    m = e.Max(e.Abs(x), one)
    shares = [e.Div(v, m) for v in (x, one)]
    return m, e.Add(*(e.Mul(share, share) for share in shares))


@gradient("Atan", reads="x0 dy0", native=True)
def atan_gradient(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    m, s = _square_and_one(e, x)
    return [e.Div(dy if m is None else e.Div(e.Div(dy, m), m), s)]


def _times_cosh(e: Emitter, dy: Value, x: Value) -> Value:
    """dy cosh(x), of which CUDA has no kernel. In 16 bit exp(x) may not fit where half of it does."""
    half = e.like(0.5, x)
    if x.dtype not in HALF:
        return e.Mul(dy, e.Mul(e.Add(e.Exp(x), e.Exp(e.Neg(x))), half))
    return _times_both(e, e.Mul(dy, half), x)


def _times_both(e: Emitter, factor: Value, x: Value) -> Value:
    """The factor times exp(x) + exp(-x), by the root of exp(x): it fits where exp(x) does not and half of it does."""
    root = e.Exp(e.Mul(x, e.like(0.5, x)))
    return e.Add(e.Mul(e.Mul(factor, root), root), e.Div(e.Div(factor, root), root))


@gradient("Asinh", reads="x0 dy0", native=True)
def asinh_gradient(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    m, s = _square_and_one(e, x)
    return [e.Div(dy if m is None else e.Div(dy, m), e.Sqrt(s))]


@gradient("Acosh", reads="x0 dy0", native=True)
def acosh_gradient(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    one = e.like(1, x)
    return [e.Div(e.Div(dy, e.Sqrt(e.Sub(x, one))), e.Sqrt(e.Add(x, one)))]


@gradient("Atanh", reads="x0 dy0", native=True)
def atanh_gradient(e: Emitter, op: Operator, x: Value, dy: Value) -> Grads:
    one = e.like(1, x)
    return [e.Div(e.Div(dy, e.Sub(one, x)), e.Add(one, x))]


_ANGLES = ("Sin", "Cos", "Tan")
_ARCS = ("Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh")
traits(*_ANGLES, *_ARCS, "Sinh", "Cosh", elementwise=True)
traits("Sinh", "Cosh", carries_large=True, overflows=Kind.HYPERBOLIC)
traits(*_ANGLES, periodic=True)
traits("Sin", "Cos", bounded=(-1.0, 1.0))
traits("Asin", "Atan", bounded=(-math.pi / 2, math.pi / 2))
traits("Acos", bounded=(0.0, math.pi))
traits("Asinh", shortens=True)
traits("Asin", "Acos", "Atanh", poles=(-1.0, 1.0))
traits("Acosh", poles=(1.0,))


# -- where a place has no kernel --------------------------------------------------------------------------------
#: ``function(e, x) -> y``, of an fp32 or float64 tensor.
_Function = Callable[[Emitter, Value], Value]


def _has_kernel(type_: str, at: PlaceTraits) -> bool:
    return not at.provider or has_kernel(at.provider, type_, "float32", TARGET_OPSET)


def _without_kernel(type_: str) -> Callable[[_Function], _Function]:
    """Register what stands for an operator on places that have no kernel of it."""

    def register(function: _Function) -> _Function:
        def write(e: Emitter, op: Operator, x: Value) -> list[Value]:
            return [function(e, x)]

        write.__name__ = function.__name__
        lowering_rule(type_, kernels=partial(_has_kernel, type_), itself=True)(write)
        return function

    return register


@_without_kernel("Tan")
def tan(e: Emitter, x: Value) -> Value:
    return e.Div(e.Sin(x), e.Cos(x))


@_without_kernel("Cosh")
def cosh(e: Emitter, x: Value) -> Value:
    return _times_both(e, e.like(0.5, x), x)


@_without_kernel("Sinh")
def sinh(e: Emitter, x: Value) -> Value:
    """tanh * cosh: the difference of two exponentials cancels near 0."""
    return e.Mul(e.Tanh(x), cosh(e, x))


@_without_kernel("Atan")
def atan(e: Emitter, x: Value) -> Value:
    """Of numbers above 1 the complement of their reciprocal's; of others one step of Newton's from a rough angle."""
    one, size = e.like(1, x), e.Abs(x)
    beyond = e.Greater(size, one)
    inner = e.Where(beyond, e.Div(one, size), size)
    slope = e.Sub(e.like(math.pi / 4 + _BENT, x), e.Mul(inner, e.like(_BENT, x)))
    angle = e.Mul(inner, slope)
    for _ in range(2 if x.dtype == "float64" else 1):
        sine, cosine = e.Sin(angle), e.Cos(angle)
        across = e.Sub(e.Mul(inner, cosine), sine)
        angle = e.Add(angle, e.Div(across, e.Add(cosine, e.Mul(inner, sine))))
    return e.Mul(e.Sign(x), e.Where(beyond, e.Sub(e.like(math.pi / 2, x), angle), angle))


#: x (pi/4 + c (1 - x)) is within 0.0038 of atan x on [0, 1] with this c, so that the step errs by a third of its cube.
_BENT = 0.273


@_without_kernel("Asin")
def asin(e: Emitter, x: Value) -> Value:
    return atan(e, e.Div(x, _arc(e, x)))


@_without_kernel("Acos")
def acos(e: Emitter, x: Value) -> Value:
    """Twice the arc of the half angle's tangent."""
    one = e.like(1, x)
    return e.Mul(e.like(2, x), atan(e, e.Sqrt(e.Div(e.Sub(one, x), e.Add(one, x)))))


@_without_kernel("Asinh")
def asinh(e: Emitter, x: Value) -> Value:
    """sign(x) log(1 + |x| + x² / (1 + sqrt(1 + x²))), the last without the square, which leaves the format."""
    one, size = e.like(1, x), e.Abs(x)
    inverse = e.Div(one, size)
    more = e.Div(size, e.Add(inverse, e.Sqrt(e.Add(e.Mul(inverse, inverse), one))))
    return e.Mul(e.Sign(x), _log_of_more(e, e.Add(size, more), size, 2.0))


@_without_kernel("Acosh")
def acosh(e: Emitter, x: Value) -> Value:
    """log(1 + (x - 1) + sqrt((x - 1) (x + 1)))."""
    one = e.like(1, x)
    above = e.Sub(x, one)
    return _log_of_more(e, e.Add(above, e.Mul(e.Sqrt(above), e.Sqrt(e.Add(x, one)))), x, 2.0)


@_without_kernel("Atanh")
def atanh(e: Emitter, x: Value) -> Value:
    """Half of sign(x) log(1 + 2 |x| / (1 - |x|))."""
    size = e.Abs(x)
    more = e.Div(e.Mul(size, e.like(2, x)), e.Sub(e.like(1, x), size))
    return e.Mul(e.Mul(e.Sign(x), e.like(0.5, x)), _log_of_more(e, more, more, 1.0))


def _log_of_more(e: Emitter, more: Value, large: Value, factor: float) -> Value:
    """log(1 + more), with what 1 + more rounds away; log(factor large) where 1 more makes no difference to it."""
    one, none = e.like(1, more), float(2 / np.finfo(numpy_dtype(more.dtype)).eps)
    beyond, whole = e.Greater(large, e.like(none, large)), e.Add(more, one)
    rest = e.Div(e.Sub(more, e.Sub(whole, one)), whole)
    return e.Add(e.Log(e.Where(beyond, large, whole)), e.Where(beyond, e.like(math.log(factor), more), rest))
