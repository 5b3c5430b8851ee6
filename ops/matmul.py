"""MatMul, Gemm and Einsum. Their gradients are matrix products in the element type of the operands.

A product accumulates in fp32 and rounds once. So where a gradient sums over broadcast batch dimensions,
these dimensions are folded into the contracted one: one product, never a sum of rounded ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.intervals import Interval, Ranges, product as interval_product, total, weighted
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import SlotShapes, flops, gradient, range_rule, traits
from amp_transpiler.ops.common import Grads, along_last_axis, reshaped, shape_of, size_of, summed
from amp_transpiler.ops.einsum import terms_of, unrepeated
from amp_transpiler.ops.gpu_kernels import apart_for, product, remember_weighed


@gradient("MatMul", reads="x0 x1 dy0", native=True)
def matmul(e: Emitter, op: Operator, a: Value, b: Value, dy: Value) -> Grads:
    """Y[.., m, n] = A[.., m, k] B[.., k, n]; a 1-D A is a row, a 1-D B a column."""
    rank = max(len(size_of(a)), len(size_of(b)), 2)
    a_shape = (1, *size_of(a)) if len(size_of(a)) == 1 else size_of(a)
    b_shape = (*size_of(b), 1) if len(size_of(b)) == 1 else size_of(b)
    a_shape, b_shape = ((1,) * (rank - len(s)) + s for s in (a_shape, b_shape))
    batch = tuple(max(p, q) if p and q else 0 for p, q in zip(a_shape[:-2], b_shape[:-2], strict=True))
    dy = reshaped(e, dy, (*batch, a_shape[-2], b_shape[-1]))
    da = db = None
    if e.wants(0):
        da = e.reshape(_da(e, b, b_shape, dy, a_shape), shape_of(e, 0))
        if e.summand is None and len(size_of(a)) == len(size_of(b)) > 2 and not _broadcast(a_shape, dy):
            remember_weighed(e, da, dy, b)
    if e.wants(1):
        db = e.reshape(_db(e, a, a_shape, dy, b_shape), shape_of(e, 1))
    return [da, db]


def _broadcast(shape: Sequence[int], dy: Value) -> list[int]:
    """Batch dimensions in which an operand was broadcast, so that its gradient sums over them."""
    return [i for i, (d, full) in enumerate(zip(shape[:-2], size_of(dy)[:-2], strict=True)) if d == 1 and full != 1]


def _folded(e: Emitter, value: Value, dims: Sequence[int], row: int) -> Value:
    """Move the batch dimensions ``dims`` into matrix dimension ``row`` (-2 or -1), in front of it."""
    shape = size_of(value)
    rank = len(shape)
    batch = [i for i in range(rank - 2) if i not in dims]
    m, n = rank - 2, rank - 1
    perm = [*batch, *dims, m, n] if row == -2 else [*batch, m, *dims, n]
    count = math.prod(shape[i] for i in dims)
    matrix = [count * shape[m], shape[n]] if row == -2 else [shape[m], count * shape[n]]
    turned = value if perm == list(range(rank)) else e.transpose(value, perm)
    return reshaped(e, turned, [*(shape[i] for i in batch), *matrix])


def _without_batch(e: Emitter, value: Value, shape: Sequence[int]) -> Value:
    """The operand as one matrix where its batch dimensions are all 1, else in its full rank."""
    return e.reshape(value, shape[-2:] if math.prod(shape[:-2]) == 1 else shape)


def _da(e: Emitter, b: Value, b_shape: tuple[int, ...], dy: Value, a_shape: tuple[int, ...]) -> Value:
    dims = _broadcast(a_shape, dy)
    if not dims:
        b = _without_batch(e, b, b_shape)
        if len(size_of(b)) == 2:  # one product of matrices
            dy = reshaped(e, dy, (math.prod(size_of(dy)[:-1]), b_shape[-1]))
        return product(e, dy, apart_for(e, dy, b), trans_b=True, plus=e.summand)
    return product(e, _folded(e, dy, dims, -1), _folded(e, e.reshape(b, b_shape), dims, -1), trans_b=True)


def _db(e: Emitter, a: Value, a_shape: tuple[int, ...], dy: Value, b_shape: tuple[int, ...]) -> Value:
    dims = _broadcast(b_shape, dy)
    a = e.reshape(a, a_shape)
    if dims:
        # The weight of a layer: x [B, T, D] and dy [B, T, N] become [B T, D] and [B T, N].
        a, dy = _folded(e, a, dims, -2), _folded(e, dy, dims, -2)
    return product(e, a, dy, trans_a=True)


@gradient("Gemm", reads="x0 x1 x2 dy0", native=True)
def gemm(e: Emitter, op: Operator, a: Value, b: Value, c: Value | None, dy: Value) -> Grads:
    """Y = alpha A' B' + beta C, where A' and B' are transposed as transA and transB say."""
    trans_a, trans_b = bool(op.attrs.get("transA", 0)), bool(op.attrs.get("transB", 0))
    alpha, beta = float(op.attrs.get("alpha", 1.0)), float(op.attrs.get("beta", 1.0))
    da = db = dc = None
    if e.wants(0):
        sides = (b, dy, trans_b, True) if trans_a else (dy, b, False, not trans_b)
        da = product(e, *sides, alpha, e.summand)
    if e.wants(1):
        db = product(e, dy, a, True, trans_a, alpha) if trans_b else product(e, a, dy, not trans_a, False, alpha)
    if e.wants(2):
        dc = summed(e, dy, dy, 2)
        if beta != 1:
            dc = e.f32(dc)
            dc = e.Mul(dc, e.like(beta, dc))
    return [da, db, dc]


@gradient("Einsum", reads="x* dy0", native=True)
def einsum(e: Emitter, op: Operator, xs: list[Value], dy: Value) -> Grads:
    """The gradient of one operand is the Einsum of dy with the others, expanded over labels that only it has.

    An operand that was broadcast along a label has size 1 there: it is read without that label.
    """
    terms, result, sizes = terms_of(op.attrs, [size_of(x) for x in xs])
    read, values = unrepeated(e, terms, xs, sizes)
    grads: list[Value | None] = []
    for i, term in enumerate(read):
        if not e.wants(i):
            grads.append(None)
            continue
        others = [j for j in range(len(xs)) if j != i]
        labels = [result, *(read[j] for j in others)]
        kept = "".join(dict.fromkeys(label for label in term if any(label in other for other in labels)))
        value = _einsum_grad(e, labels, kept, [dy, *(values[j] for j in others)], sizes)
        grads.append(_spread(e, value, kept, term, sizes, shape_of(e, i)))
    return grads


def _einsum_grad(e: Emitter, labels: list[str], kept: str, values: list[Value], sizes: dict[str, int]) -> Value:
    alone = any(sum(label in other for other in labels) == 1 and label not in kept for label in "".join(labels))
    if len(values) > 2 or alone or values[0].dtype == "bfloat16":
        # More than one product, or a sum over one operand, rounds in between; CUDA has no bfloat16 Einsum.
        values = [e.f32(v) for v in values]
    return e.Einsum(*values, equation=f"{','.join(labels)}->{kept}", shape=[sizes[label] for label in kept])


def _spread(e: Emitter, value: Value, kept: str, term: str, sizes: dict[str, int], shape: tuple[int, ...]) -> Value:
    """A value over the labels ``kept``, in the shape of an operand with the labels ``term``: repeated over the labels
    that are missing, on the diagonal of a label that the operand has twice, 0 beside it."""
    full = [sizes[label] for label in term]
    first = [term.index(label) == i for i, label in enumerate(term)]
    value = e.reshape(value, [sizes[k] if k in kept and f else 1 for k, f in zip(term, first, strict=True)])
    if tuple(full) != value.shape and all(first):
        value = e.Expand(value, e.ints(*full), shape=full)
    for i, label in enumerate(term):
        if not first[i]:
            along = [sizes[label] if j in (i, term.index(label)) else 1 for j in range(len(term))]
            value = e.Mul(value, e.const(np.eye(sizes[label]).reshape(along), value.dtype))
    if tuple(full) != value.shape:
        value = e.Expand(value, e.ints(*full), shape=full)
    return e.reshape(value, shape)


def _gemm_axes(op: Operator, rank: int) -> tuple[int, ...]:
    return (1,) if op.attrs.get("transB", 0) else (0,)


def _matmul_axes(op: Operator, rank: int) -> tuple[int, ...]:
    return (max(rank - 2, 0),)


traits("QLinearMatMul")
traits("Gemm", "MatMul", "Einsum", product=True)
traits("Gemm", weights=(1, 2), biases=(2,), weight_axes=_gemm_axes)
traits("MatMul", weights=(1,), weight_axes=_matmul_axes)


@range_rule("Gemm")
def _gemm_range(op: Operator, ranges: Ranges) -> Interval | None:
    found = weighted(ranges.bound(op.input(0)), ranges, op.input(1), partial(_gemm_axes, op))
    alpha, beta, bias = float(op.attrs.get("alpha", 1.0)), float(op.attrs.get("beta", 1.0)), ranges.bound(op.input(2))
    found = found and interval_product(found, (alpha, alpha))
    return found if op.input(2) is None else total(found, bias and interval_product(bias, (beta, beta)))


@range_rule("MatMul")
def _matmul_range(op: Operator, ranges: Ranges) -> Interval | None:
    left, right = op.inputs
    if _is_softmax(ranges.source(left)):  # weights that add up to 1: between the least and the largest row
        return ranges.bound(right)
    if ranges.content(left) is not None:
        return weighted(ranges.bound(right), ranges, left, lambda rank: (rank - 1,))
    return weighted(ranges.bound(left), ranges, right, lambda rank: _matmul_axes(op, rank))


@range_rule("Einsum")
def _einsum_range(op: Operator, ranges: Ranges) -> Interval | None:
    """Of products that are not added up: the result has every label."""
    left, arrow, result = str(op.attrs["equation"]).replace(" ", "").partition("->")
    bounds = [found for v in op.inputs if (found := ranges.bound(v)) is not None]
    if not arrow or len(bounds) < len(op.inputs) or not set(left) - {","} <= set(result):
        return None
    return reduce(interval_product, bounds)


def _is_softmax(variable: Variable | None) -> bool:
    op = variable.producer if variable is not None else None
    if op is None or op.full_type != "Softmax":
        return False
    made = op.outputs[0]
    return along_last_axis(op, None if made is None or made.shape is None else len(made.shape))


@flops("MatMul", "Gemm", f"{DOMAIN}::FusedMatMul", f"{DOMAIN}::TransposeMatMul", f"{DOMAIN}::FusedGemm")
@flops("MatMulInteger", "QLinearMatMul")
def product_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """A multiplication and an addition for each element of the result and of the contracted dimension."""
    a, y = inputs[0], outputs[0]
    assert a is not None and y is not None
    turned = attrs.get("transA") and len(a) > 1
    return 2 * math.prod(y) * a[(0 if attrs.get("transBatchA") else -2) if turned else -1]


@flops("Einsum")
def einsum_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """An operation for each operand and each value of all labels together."""
    terms, _, sizes = terms_of(attrs, [shape for shape in inputs if shape is not None])
    return len(terms) * math.prod(sizes.values())
