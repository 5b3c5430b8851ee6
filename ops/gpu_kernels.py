"""Operators of onnxruntime (com.microsoft) that gradient rules use on GPU places, and what stands for them elsewhere.

Each moves fewer bytes than the standard operators that do the same, and rounds no more often.
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import exchanged, multiple, number_of, once, size_of, times

#: Numbers of 16 bit that tensor cores take at once.
AT_ONCE = 8


def product(
    e: Emitter,
    a: Value,
    b: Value,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    plus: Value | None = None,
) -> Value:
    """alpha A' B' over the last two axes, rounded once; A' and B' are transposed as the flags say.

    Gemm and FusedMatMul transpose while they read, also an operand that is :func:`transposed`. Elsewhere onnxruntime
    fuses Transpose and MatMul by itself. Of an operand that is a multiple the number goes into alpha. To the product of
    two matrices ``plus``, of as many elements, is added before it is rounded.
    """
    (a, of_a, turned_a), (b, of_b, turned_b) = _operand(e, a), _operand(e, b)
    alpha *= of_a * of_b
    trans_a, trans_b = trans_a != turned_a, trans_b != turned_b
    a_shape, b_shape = size_of(a), size_of(b)
    shape = (
        *(int(d) for d in np.broadcast_shapes(a_shape[:-2], b_shape[:-2])),
        a_shape[-1] if trans_a else a_shape[-2],
        b_shape[-2] if trans_b else b_shape[-1],
    )
    if 0 in a_shape and 0 not in shape:  # nothing to add up, where onnxruntime's FusedMatMul leaves what memory holds
        return e.zeros(shape, a.dtype) if plus is None else e.reshape(plus, shape)
    if plus is not None:
        return e.op(
            "Gemm",
            *(a, b, e.reshape(plus, shape)),
            alpha=None if alpha == 1 else alpha,
            transA=int(trans_a),
            transB=int(trans_b),
            shape=shape,
        )
    whole = len(b_shape) == 2 and not trans_a  # the rows of A, whatever they are counted by
    if e.at.fused and len(shape) > 2 and (whole or math.prod(shape[:-2]) == 1):
        a = e.reshape(a, (math.prod(a_shape[:-1]), a_shape[-1]) if whole else a_shape[-2:])
        return e.reshape(product(e, a, e.reshape(b, b_shape[-2:]), trans_a, trans_b, alpha), shape)
    plain = not trans_a and not trans_b and alpha == 1
    if len(a_shape) == len(b_shape) == 2 and (alpha != 1 or (e.at.fused and not plain)):
        return e.op("Gemm", a, b, alpha=alpha, transA=int(trans_a), transB=int(trans_b), shape=shape)
    if e.at.fused and not plain:
        made = e.op(
            "FusedMatMul", a, b, domain=DOMAIN, shape=shape, transA=int(trans_a), transB=int(trans_b), alpha=alpha
        )
        return of_some(e, a, made) if e.hangs(a_shape[-2 if trans_a else -1]) else made
    a, b = exchanged(e, a) if trans_a else a, exchanged(e, b) if trans_b else b
    if alpha == 1:
        return e.MatMul(a, b, shape=shape)
    y = e.MatMul(e.f32(a), e.f32(b), shape=shape)
    return e.cast(e.Mul(y, e.like(alpha, y)), a.dtype)


def product_of_rows(e: Emitter, a: Value, b: Value) -> Value:
    """A B' of matrices with long rows.

    Kernels for tensor cores write eight numbers at once: where only A has so many rows, it is made as (B A')' (64 and
    147 rows of 802,816 numbers take 0.09 ms for 0.53 on an H200).
    """
    turned = e.at.fused and a.dtype in HALF and size_of(b)[-2] % AT_ONCE and not size_of(a)[-2] % AT_ONCE
    return exchanged(e, product(e, b, a, trans_b=True)) if turned else product(e, a, b, trans_b=True)


def of_some(e: Emitter, x: Value, y: Value) -> Value:
    """What a kernel sums up of ``x``; zeros where the run finds that this is empty, of which it computes nothing."""
    some = e.Greater(e.op("Size", x, dtype="int64", shape=()), e.const(np.int64(0)))
    return e.Where(some, y, e.zeros(size_of(y), y.dtype), shape=y.shape)


def transposed(e: Emitter, value: Value) -> Value:
    """The last two axes exchanged; :func:`product` reads what they were, where its kernels can."""
    new = exchanged(e, value)
    if e.at.fused:
        e.shared[_transposed(new)] = (value,)
    return new


def untransposed(e: Emitter, value: Value) -> tuple[Value, bool]:
    """The tensor of which a value has the last two axes exchanged, and True; the value itself and False else."""
    found = e.shared.get(_transposed(value))
    return (value, False) if found is None else (found[0], True)


def _transposed(value: Value) -> str:
    return f"transposed: {value.name}"


def _operand(e: Emitter, value: Value) -> tuple[Value, float, bool]:
    """The tensor of which a value is a multiple, the number, and whether it is transposed besides."""
    base, factor = multiple(e, value)
    base, turned = untransposed(e, base)
    base, before = multiple(e, base)
    return base, factor * before, turned


def transposed_product(e: Emitter, value: Value) -> Value | None:
    """The last two axes of a product exchanged, by a product of its operands; None where no one kernel made it."""
    shape, (base, alpha) = size_of(value), _unmoved(e, value)
    maker = e.makers.get(base.name)
    if not e.at.fused or maker is None or maker.type not in ("FusedMatMul", "Gemm", "MatMul") or len(maker.inputs) > 2:
        return None
    if size_of(base)[-2:] != shape[-2:]:
        return None
    a, b = maker.inputs
    assert a is not None and b is not None
    turned_a, turned_b = (not maker.attrs.get(name) for name in ("transA", "transB"))
    new = product(e, b, a, turned_b, turned_a, alpha * (maker.attrs.get("alpha") or 1.0))
    return e.cast(e.reshape(new, (*shape[:-2], shape[-1], shape[-2])), value.dtype)


def _unmoved(e: Emitter, value: Value) -> tuple[Value, float]:
    """The tensor of which a value is a multiple, whatever its shape and type, and the number."""
    base, alpha = multiple(e, value)
    while (maker := e.makers.get(base.name)) is not None and maker.type in ("Cast", "Reshape") and maker.inputs[0]:
        base, factor = multiple(e, maker.inputs[0])
        alpha *= factor
    return base, alpha


def along_rows(e: Emitter, a: Value, x: Value, b: Value, y: Value) -> Value:
    """a x + b y, computed in fp32 and rounded once.

    X and Y are alike; a and b are fp32, with one number for each row: of size 1 along the last axis. One number may be
    a for all rows.
    """
    if not e.at.fused:
        return e.cast(_plus_wide_rows(e, e.Mul(e.f32(x), a), b, e.f32(y)), x.dtype)
    rows = math.prod(size_of(x)[:-1])
    if a.shape == ():
        a = for_rows(e, a, rows)
    return _post_mix(e, x, a, e.reshape(b, (rows, 1)), y)


def plus_rows(e: Emitter, x: Value, b: Value, y: Value) -> Value:
    """x + b y, with one number of b for each row, of size 1 along the last axis.

    On a GPU in the type of X, the product rounded before the sum; elsewhere computed in fp32 and rounded once.
    """
    if not e.at.fused:
        return e.cast(_plus_wide_rows(e, e.f32(x), e.f32(b), e.f32(y)), x.dtype)
    return e.op("GatedAdd", x, y, e.cast(b, x.dtype), domain=DOMAIN, shape=x.shape)


def _plus_wide_rows(e: Emitter, x: Value, b: Value, y: Value) -> Value:
    """x + b y of what is not of 16 bit; in fp32 one kernel where there is one, with the same bits in half of the time.

    It takes rows one by one: of one number each, that is slower. Of rows that may be empty it makes an error.
    """
    shape = x.shape
    one_kernel = e.at.gated_add and x.dtype == "float32" and shape == y.shape and b.shape == (*(shape or ())[:-1], 1)
    if not one_kernel or not shape or 0 in shape or shape[-1] == 1 or e.hangs(shape[-1]):
        return e.Add(x, e.Mul(y, b))
    return e.op("GatedAdd", x, y, b, domain=DOMAIN, dtype=x.dtype, shape=shape)


def along_even_rows(e: Emitter, a: Value, x: Value, b: Value, y: Value) -> Value:
    """a x + b y of rows whose numbers are about 1, so that a and b, about as large as the result, fit its type.

    On a GPU the products are rounded before the sum: that takes less than half of the time of :func:`along_rows`, whose
    kernel divides 64-bit integers for each number (51.4 million on an H200: 0.18 ms for 0.41).
    """
    if not e.at.fused:
        return along_rows(e, e.f32(a), x, e.f32(b), y)
    return plus_rows(e, e.Mul(x, e.cast(a, x.dtype), shape=x.shape), b, y)


def sums_of_rows(e: Emitter, value: Value, factor: float = 1.0) -> Value:
    """The sum over the last axis, which stays, times a number; kernels add up in fp32.

    In 16 bit on a GPU a product with ones: 49,152 rows of 128 numbers take a third of the time on an H200.
    """
    *lead, width = size_of(value)
    shape, rows = (*lead, 1), math.prod(lead)
    if e.at.fused and value.dtype in HALF and width:
        ones = e.const(np.ones((width, 1)), value.dtype)
        alpha = None if factor == 1 else factor
        return e.reshape(e.Gemm(e.reshape(value, (rows, width)), ones, alpha=alpha, shape=(rows, 1)), shape)
    sums: Value = e.ReduceSum(value, e.ints(len(lead)), keepdims=1, shape=shape)
    return sums if factor == 1 else e.Neg(sums) if factor == -1 else e.Mul(sums, e.like(factor, sums))


def mixed_rows(e: Emitter, x: Value, a: Value, y: Value, z: Value) -> Value:
    """a x + y z, element by element, computed in fp32 and rounded once to the type of x and z.

    a is a column, with a number for each row; it and y are of one type, which may be another.
    """
    *before, width = size_of(x)
    return _post_mix(e, x, a, e.reshape(y, (math.prod(before), 1, width)), z)


def added_multiple(e: Emitter, x: Value, y: Value, number: float) -> Value:
    """x + number y, element by element, of fp32 tensors alike; the product is rounded before the sum."""
    line = (1, math.prod(size_of(x)))
    flat = (e.reshape(v, line) for v in (x, y))
    return e.reshape(e.op("GatedAdd", *flat, e.const([[number]], x.dtype), domain=DOMAIN, shape=line), size_of(x))


def plus_product(e: Emitter, x: Value, y: Value, z: Value) -> Value:
    """x + y z, element by element, of matrices alike; in fp32 on a GPU one kernel."""
    if not e.at.fused or x.dtype != "float32":
        return e.Add(x, e.Mul(y, z))
    rows, width = size_of(x)
    return _post_mix(e, x, None, e.reshape(y, (rows, 1, width)), z)


def _post_mix(e: Emitter, x: Value, a: Value | None, gates: Value, z: Value) -> Value:
    """a x + gates z: a number of each row, or all 1; a gate for each row [rows, 1], or for each element."""
    shape = size_of(x)
    rows, width = math.prod(shape[:-1]), shape[-1]
    mixed = e.op(
        "HyperConnectionPostMix",
        e.reshape(x, (rows, 1, width)),
        e.reshape(z, (rows, width)),
        gates,
        None if a is None else e.reshape(a, (rows, 1, 1)),
        domain=DOMAIN,
        shape=(rows, 1, width),
    )
    return e.reshape(mixed, shape)


def remember_product(e: Emitter, made: Value | None, a: Value | None, b: Value | None) -> None:
    """Say which product takes a tensor first, as it is or cast: of several, the first."""
    if made is None or a is None or b is None or not e.at.fused:
        return
    (a, of_a, turned_a), (b, of_b, turned_b) = _operand(e, a), _operand(e, b)
    if turned_a or turned_b:
        return
    maker = e.makers.get(a.name)
    for first in (a, maker.inputs[0] if maker is not None and maker.type == "Cast" else None):
        if first is not None:
            e.shared.setdefault(_product_of(first), (made, a, b, e.const(of_a * of_b, "float64")))


def _product_of(first: Value) -> str:
    return f"the product of {first.name}"


def weighed_sums(e: Emitter, dp: Value, p: Value, apart: bool) -> tuple[Value, Value] | None:
    """-sum(dp p) over each row, where dp is the gradient of the weights p of sums o = p v, as attention has them.

    Since dp = do v', it is -sum(do o): rows as short as those of v. And dp as the product made it, before it was cast.
    Where dp may be less a number for each row (``apart``), and is 16-bit, both are without what rows of v have in
    common: beside that o is rounded.
    None where that is not known, or where the rows are not so much shorter that it is worth to keep o for them.
    """
    back, found, shorter = e.makers.get(dp.name), e.shared.get(_product_of(p)), 4
    if back is not None and back.type == "Cast" and back.inputs[0] is not None:
        dp, shorter = back.inputs[0], 2  # and dp need not be cast
        back = e.makers.get(dp.name)
    if back is None or back.type != "FusedMatMul" or found is None:
        return None
    (o, weights, v, factor), (do, other), size = found, back.inputs, found[0].shape
    if do is None or other is None or size is None or v.name != other.name:
        return None
    if back.attrs.get("transA") or not back.attrs.get("transB") or shorter * size[-1] > size_of(p)[-1]:
        return None
    if (do.dtype, do.shape, dp.dtype) != (o.dtype, size, o.dtype):
        return None
    alpha = float(back.attrs.get("alpha") or 1.0)
    if not apart or o.dtype not in HALF:
        return sums_of_rows(e, e.Mul(do, o), -alpha / number_of(e, factor)), dp
    v = _less_mean(e, v)
    sums = sums_of_rows(e, e.Mul(do, e.reshape(product(e, weights, v), size)), -alpha)
    return sums, e.reshape(product(e, do, v, trans_b=True, alpha=alpha), size_of(dp))


def remember_weighed(e: Emitter, dp: Value, do: Value, v: Value) -> None:
    """Say that a tensor is the gradient of the first operand of sums p v: do v'."""
    e.shared[_weighed(dp)] = (do, v)


def of_apart(e: Emitter, dp: Value) -> Value | None:
    """The gradient of the weights of sums p v, less a number for each row of it; None where it is of something else.

    What the rows of v have in common leaves few digits to the rest.
    """
    do, v = e.shared.get(_weighed(dp), (dp, dp))
    if v is dp or do.dtype != dp.dtype or v.dtype != dp.dtype:
        return None
    return e.reshape(product(e, do, _less_mean(e, v), trans_b=True), size_of(dp))


def _less_mean(e: Emitter, v: Value, axis: int = -2) -> Value:
    """A tensor less its mean along an axis: rows less what they have in common."""
    shape = list(size_of(v))
    shape[axis] = 1
    return e.Sub(v, e.ReduceMean(v, e.ints(axis), keepdims=1, shape=tuple(shape)), shape=v.shape)


def remember_balanced(e: Emitter, value: Value) -> None:
    """Say that the rows of a tensor add up to nothing, but for what was rounded."""
    e.shared[_balanced(e, value)] = (value,)


def apart_for(e: Emitter, a: Value, b: Value) -> Value:
    """B as the product A B' takes it: less what the rows of B' have in common where the rows of A add up to nothing.

    That would add up what a row of A is off by as a whole, beside which the rest of the product may be small.
    """
    if _balanced(e, a) not in e.shared:
        return b
    base, factor, turned = _operand(e, b)
    base = _less_mean(e, base, -2 if turned else -1)
    b = transposed(e, base) if turned else base
    return b if factor == 1 else times(e, b, factor)


def _balanced(e: Emitter, value: Value) -> str:
    return f"rows of {size_of(value)[-1]} that add up to nothing: {_unmoved(e, value)[0].name}"


def _weighed(dp: Value) -> str:
    return f"the gradient of weights: {dp.name}"


def for_rows(e: Emitter, number: Value, rows: int) -> Value:
    """A scalar as a column of so many rows."""
    key = f"{number.name} for {rows} rows"
    return once(e, key, lambda: e.Expand(number, e.ints(rows, 1, 1), shape=(rows, 1, 1)))


def column_product(e: Emitter, narrow: Value, wide: Value) -> Value:
    """The product, in fp32, of a number and two columns of one shape, of which the first may be of 16 bit."""
    if not e.at.fused or narrow.dtype not in HALF:
        return e.Mul(e.f32(narrow), wide)
    shape = size_of(wide)
    rows = math.prod(shape)
    mixed = e.op(
        "HyperConnectionPreMix",
        e.reshape(wide, (rows, 1, 1)),
        e.reshape(narrow, (rows, 1)),
        domain=DOMAIN,
        reduction_scale=1.0,
        shape=(rows, 1),
    )
    return e.reshape(mixed, shape)
