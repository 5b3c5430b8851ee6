"""What stands for an operator where a place has no kernel of it: other operators that it has, bit for bit where it can.

A body gets the operator's attributes, results and inputs, all with the element types that their tensors have there, and
shapes where these are fixed. It gives the results, or None where it does not know how (a shape is missing). What it
emits may be without a kernel as well, and then has a body of its own. Where 64-bit integers are held as 32-bit ones an
operator whose ONNX schema wants the former may get the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import FLOATS, HALF
from amp_transpiler.ops.common import scaled_by, size_of
from amp_transpiler.ops.einsum import terms_of, unrepeated
from amp_transpiler.ops.elementwise import limited


class Asked(NamedTuple):
    """What a body stands for: the operator's attributes, and its results."""

    attrs: Mapping[str, Any]
    results: Sequence[Value]


#: ``body(e, asked, *inputs) -> results``
Body = Callable[..., Sequence[Value] | None]

#: ``function(e, attributes, x) -> y``
_Function = Callable[[Emitter, Mapping[str, Any], Value], Value]

_BODIES: dict[str, Body] = {}


def body(*types: str) -> Callable[[Body], Body]:
    """Register what stands for operators of ai.onnx."""

    def register(function: Body) -> Body:
        _BODIES.update(dict.fromkeys(types, function))
        return function

    return register


def body_of(full_type: str) -> Body | None:
    """What stands for an operator; None where nothing does."""
    return _BODIES.get(full_type)


def constant(e: Emitter, value: Value | None) -> np.ndarray | None:
    """The content of a constant; None of what is computed."""
    found = None if value is None else e.initializers.get(value.name)
    return None if found is None else onnx.numpy_helper.to_array(found)


def integers_in(e: Emitter, value: Value | None) -> list[int] | None:
    found = constant(e, value)
    return None if found is None else [int(number) for number in found.reshape(-1)]


def in_32_bits(e: Emitter, indices: Value) -> Value | None:
    """Indices that a kernel computes with; None of others that are computed."""
    found = constant(e, indices)
    if indices.dtype == "int32" or found is None:
        return indices if indices.dtype == "int32" else None
    return e.const(found, "int32")


# -- numbers ---------------------------------------------------------------------------------------------
@body("Sum")
def _sum(e: Emitter, op: Asked, *values: Value) -> Sequence[Value]:
    return [_added(e, values)]


def _added(e: Emitter, values: Sequence[Value]) -> Value:
    total, *others = values
    for other in others:
        total = e.Add(total, other)
    return total


@body("Mean")
def _mean(e: Emitter, op: Asked, *values: Value) -> Sequence[Value]:
    total = _added(e, values)
    return [e.Div(total, e.like(len(values), total))]


def _extreme(compare: str) -> Body:
    """Of two numbers the first where it does not compare so to the second: NaN of either stays."""

    def choose(e: Emitter, a: Value, b: Value) -> Value:
        if a.name in e.initializers:
            a, b = b, a
        kept = a
        if a.dtype in FLOATS and b.name not in e.initializers:
            kept = e.Where(e.Equal(b, b), a, b)
        return e.Where(e.op(compare, a, b), b, kept)

    def extreme(e: Emitter, op: Asked, found: Value, *others: Value) -> Sequence[Value]:
        for other in others:
            found = choose(e, found, other)
        return [found]

    return extreme


body("Max")(_extreme("Less"))
body("Min")(_extreme("Greater"))


@body("Clip")
def _clip(e: Emitter, op: Asked, x: Value, low: Value | None = None, high: Value | None = None) -> Sequence[Value]:
    return [limited(e, x, low, high)]


@body("IsNaN")
def _is_nan(e: Emitter, op: Asked, x: Value) -> Sequence[Value]:
    """What neither equals itself nor lies on either side of zero. Compilers of shaders may take one of the comparisons
    for the negation of its opposite, and then find NaN where it does not; two kinds of them are asked."""
    zero = e.like(0, x)
    sided = e.Not(e.And(e.Not(e.LessOrEqual(x, zero)), e.Not(e.Greater(x, zero))))
    return [e.Not(e.And(e.Equal(x, x), sided))]


@body("IsInf")
def _is_inf(e: Emitter, op: Asked, x: Value) -> Sequence[Value]:
    found = [
        e.Equal(x, e.like(sign * math.inf, x))
        for sign, name in ((1, "detect_positive"), (-1, "detect_negative"))
        if op.attrs.get(name, 1)
    ]
    return [found[0] if len(found) == 1 else e.Or(*found) if found else e.Less(x, x)]


@body("LogSoftmax")
def _log_softmax(e: Emitter, op: Asked, x: Value) -> Sequence[Value]:
    """x - max - log(sum(exp(x - max))), in fp32."""
    axes, wide = e.ints(op.attrs.get("axis", -1)), e.f32(x)
    apart = e.Sub(wide, e.ReduceMax(wide, axes, keepdims=1))
    return [e.cast(e.Sub(apart, e.Log(e.ReduceSum(e.Exp(apart), axes, keepdims=1))), x.dtype)]


@body("ReduceLogSumExp")
def _log_sum_exp(e: Emitter, op: Asked, x: Value, *axes: Value) -> Sequence[Value]:
    """max + log(sum(exp(x - max))), in fp32; where the largest is infinite, it is the result by itself."""
    wide, keep = e.f32(x), {"noop_with_empty_axes": op.attrs.get("noop_with_empty_axes", 0)}
    largest = e.ReduceMax(wide, *axes, keepdims=1, **keep)
    most = e.Where(e.Less(e.Abs(largest), e.like(math.inf, largest)), largest, e.like(0, largest))
    found = e.Add(e.Log(e.ReduceSum(e.Exp(e.Sub(wide, most)), *axes, keepdims=1, **keep)), most)
    if not op.attrs.get("keepdims", 1) and (axes or not keep["noop_with_empty_axes"]):
        found = e.Squeeze(found, *axes)
    return [e.cast(found, x.dtype)]


@body("Neg")
def _neg(e: Emitter, op: Asked, x: Value) -> Sequence[Value]:
    return [e.Sub(e.like(0, x), x)]


@body("Abs")
def _abs(e: Emitter, op: Asked, x: Value) -> Sequence[Value]:
    zero = e.like(0, x)
    return [e.Where(e.Less(x, zero), e.Sub(zero, x), x)]


@body("Pow")
def _pow(e: Emitter, op: Asked, x: Value, power: Value) -> Sequence[Value] | None:
    """With a column as wide as the rows beside it."""
    widths = [v.shape[-1] for v in (x, power) if v.shape]
    if len(widths) < 2 or widths[0] == widths[1]:
        return None
    wide = [
        e.Expand(v, e.ints(max(widths)), shape=(*v.shape[:-1], max(widths))) if v.shape and v.shape[-1] == 1 else v
        for v in (x, power)
    ]
    return [e.Pow(*wide)]


#: What a reduction makes of one number.
_OF_ONE: Mapping[str, Callable[[Emitter, Value], Value]] = {
    "ReduceL1": lambda e, x: e.Abs(x),
    "ReduceL2": lambda e, x: e.Abs(x),
    "ReduceLogSum": lambda e, x: e.Log(x),
    "ReduceSumSquare": lambda e, x: e.Mul(x, x),
}


def _of_one(type_: str) -> Body:
    def reduced(e: Emitter, op: Asked, x: Value, *axes: Value | None) -> Sequence[Value] | None:
        none = not axes or axes[0] is None or integers_in(e, axes[0]) == []
        return [_OF_ONE[type_](e, x)] if none and op.attrs.get("noop_with_empty_axes", 0) else None

    return reduced


for _type in _OF_ONE:
    body(_type)(_of_one(_type))


@body("PRelu")
def _p_relu(e: Emitter, op: Asked, x: Value, slope: Value) -> Sequence[Value]:
    return [e.Where(e.Less(x, e.like(0, x)), e.Mul(x, slope), x)]


@body("Sign")
def _sign(e: Emitter, op: Asked, x: Value) -> Sequence[Value]:
    """Zero and NaN stay as they are."""
    zero = e.like(0, x)
    below = x if x.dtype.startswith("uint") else e.Where(e.Less(x, zero), e.like(-1, x), x)
    return [e.Where(e.Greater(x, zero), e.like(1, x), below)]


def _apart(type_: str) -> Body:
    def write(e: Emitter, op: Asked, x: Value) -> Sequence[Value] | None:
        """Of what is negated twice: no optimiser of onnxruntime takes it for the result of a convolution."""
        return [e.op(type_, e.Neg(e.Neg(x)), **op.attrs)] if x.dtype in FLOATS else None

    return write


for _type in ("Elu", "Gelu", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Tanh"):
    body(_type)(_apart(_type))


# -- functions of one number, in fp32 -------------------------------------------------------------------------
def _function(*types: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        def write(e: Emitter, op: Asked, x: Value) -> Sequence[Value]:
            return [e.cast(function(e, op.attrs, e.f32(x)), x.dtype)]

        body(*types)(write)
        return function

    return register


@_function("HardSwish")
def _hard_swish(e: Emitter, attrs: Mapping[str, Any], x: Value) -> Value:
    return e.Mul(x, e.HardSigmoid(x, alpha=1 / 6, beta=0.5))


@_function("Celu")
def _celu(e: Emitter, attrs: Mapping[str, Any], x: Value) -> Value:
    alpha = e.like(attrs.get("alpha", 1.0), x)
    low = e.Mul(alpha, e.Sub(e.Exp(e.Div(x, alpha)), e.like(1, x)))
    return e.Where(e.Greater(x, e.like(0, x)), x, low)


@_function("Selu")
def _selu(e: Emitter, attrs: Mapping[str, Any], x: Value) -> Value:
    gamma = attrs.get("gamma", 1.0507009873554805)
    return e.Mul(e.like(gamma, x), e.Elu(x, alpha=float(attrs.get("alpha", 1.6732632423543772))))


@_function("Mish")
def _mish(e: Emitter, attrs: Mapping[str, Any], x: Value) -> Value:
    return e.Mul(x, e.Tanh(e.Softplus(x)))


@_function("Softsign")
def _softsign(e: Emitter, attrs: Mapping[str, Any], x: Value) -> Value:
    return e.Div(x, e.Add(e.Abs(x), e.like(1, x)))


@body("ThresholdedRelu")
def _thresholded_relu(e: Emitter, op: Asked, x: Value) -> Sequence[Value]:
    return [e.Where(e.Greater(x, e.like(op.attrs.get("alpha", 1.0), x)), x, e.like(0, x))]


@_function("Shrink")
def _shrink(e: Emitter, attrs: Mapping[str, Any], x: Value) -> Value:
    reach, bias = float(attrs.get("lambd", 0.5)), e.like(attrs.get("bias", 0.0), x)
    low = e.Where(e.Less(x, e.like(-reach, x)), e.Add(x, bias), e.like(0, x))
    return e.Where(e.Greater(x, e.like(reach, x)), e.Sub(x, bias), low)


@_function("Round")
def _round(e: Emitter, attrs: Mapping[str, Any], x: Value) -> Value:
    """To the even one of two that are as near: fp32 numbers from 2^23 on have no fractions, and adding rounds so."""
    whole = e.like(1.5 * 2**23, x)
    near = e.Sub(e.Add(x, whole), whole)
    return e.Where(e.Less(e.Abs(x), e.like(2**22, x)), near, x)


@body("Resize")
def _resize(e: Emitter, op: Asked, x: Value, *settings: Value | None) -> Sequence[Value] | None:
    """In fp32, as on CPU; integers have no form, and what is fp32 already has no other."""
    if x is None or x.dtype not in HALF:
        return None
    return [e.cast(e.Resize(e.f32(x), *settings, **op.attrs), x.dtype)]


# -- products --------------------------------------------------------------------------------------------
@body("Gemm")
def _gemm(e: Emitter, op: Asked, a: Value, b: Value, *added: Value) -> Sequence[Value] | None:
    """The product, and what is added by itself; of integers with a fraction for factor, all but the product in fp32."""
    if a.dtype not in (*FLOATS, "int32", "uint32"):
        return None
    alpha, beta = float(op.attrs.get("alpha", 1.0)), float(op.attrs.get("beta", 1.0))
    turned = {name: op.attrs.get(name, 0) for name in ("transA", "transB")}
    if a.dtype in FLOATS or (alpha.is_integer() and beta.is_integer()):
        product = e.op("Gemm", a, b, alpha=alpha, **turned)
        return [e.Add(product, scaled_by(e, c, beta)) for c in added] or [product]
    parts = [(e.op("Gemm", a, b, **turned), alpha), *((c, beta) for c in added)]
    return [e.cast(_added(e, [e.Mul(e.cast(v, "float32"), e.const(f, "float32")) for v, f in parts]), a.dtype)]


@body("MatMul")
def _matmul(e: Emitter, op: Asked, a: Value, b: Value) -> Sequence[Value] | None:
    """Vectors as rows and columns of a matrix; a sum of nothing is zero; of integers the products are added up."""
    shape = op.results[0].shape
    if a.dtype in FLOATS and a.shape is None and len(b.shape or ()) == 1:
        return [e.Squeeze(e.MatMul(a, e.reshape(b, (*size_of(b), 1))), e.ints(-1))]
    if a.shape is None or b.shape is None or shape is None:
        return None
    if a.shape[-1] == 0:
        return [e.Expand(e.like(0, a), e.ints(*shape), shape=shape)]
    row = e.reshape(a, (1, *a.shape)) if len(a.shape) == 1 else a
    column = e.reshape(b, (*b.shape, 1)) if len(b.shape) == 1 else b
    if a.dtype in FLOATS:
        return [e.reshape(e.MatMul(row, column), shape)]
    *lead, n, m = size_of(column)
    products = e.Mul(e.reshape(row, (*size_of(row), 1)), e.reshape(column, (*lead, 1, n, m)))
    return [e.reshape(e.ReduceSum(products, e.ints(-2), keepdims=0), shape)]


@body("Einsum")
def _einsum(e: Emitter, op: Asked, *values: Value) -> Sequence[Value] | None:
    """With letters for dots, and operands without the axes along which they are repeated."""
    if any(v.shape is None or v.dtype not in ("float16", "float32") for v in values):
        return None
    terms, result, sizes = terms_of(op.attrs, [size_of(v) for v in values])
    read, apart = unrepeated(e, terms, values, sizes)
    return [e.Einsum(*apart, equation=f"{','.join(read)}->{result}", shape=[sizes[label] for label in result])]


# -- truth -----------------------------------------------------------------------------------------------
@body("Or")
def _or(e: Emitter, op: Asked, a: Value, b: Value) -> Sequence[Value]:
    return [e.Not(e.And(e.Not(a), e.Not(b)))]


@body("Equal")
def _equal(e: Emitter, op: Asked, a: Value, b: Value) -> Sequence[Value] | None:
    return None if a.dtype != "bool" else [e.Equal(e.cast(a, "int32"), e.cast(b, "int32"))]


@body("Xor")
def _xor(e: Emitter, op: Asked, a: Value, b: Value) -> Sequence[Value]:
    return [e.Not(e.Equal(a, b))]
