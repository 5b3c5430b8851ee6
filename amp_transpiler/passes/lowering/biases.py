"""Biases: a product of matrices and the sum with a bias behind it are one kernel that rounds once, as Gemm is.

onnxruntime would fuse them so by itself, and a 16-bit product would not be rounded before its bias is added. So what is
lowered says it: on CUDA it is one Gemm, and on CPU, where 16 bit is emulated, the product is not rounded. Of batches of
matrices it is a Gemm on CPU too: onnxruntime fuses those only where it knows their sizes, so that a session that serves
several would compute other bits.

A softmax of scores and a bias, as a mask is, is one kernel too where a place has it: its sum is not stored.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import place_traits
from amp_transpiler.ops.common import along_last_axis, multiple, scaled_by
from amp_transpiler.ops.gpu_kernels import untransposed
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage

#: The element types of com.microsoft's BiasSoftmax, and the longest rows that it takes in one pass (onnxruntime 1.31).
_ADDS_BIAS, _LONGEST = ("float16", "float32"), 1024


def biased_products(
    order: Sequence[Operator], place: str, keep_fp32: Container[str], fetches: Container[Variable]
) -> dict[Operator, Operator]:
    """Of each Add that adds a bias to a product of matrices and alone reads it: the product.

    On CPU an fp32 product that is fetched too is not computed a second time.
    """
    types = (*HALF, "float32") if place_traits(place).runs else ()
    found = {}
    for op in order:
        if op.full_type != "Add" or len(op.inputs) != 2:
            continue
        for product, bias in (op.inputs, op.inputs[::-1]):
            if product is not None and bias is not None and _is_biased(op, product, bias, types, keep_fp32):
                assert product.producer is not None
                if not place_traits(place).host or product.dtype in HALF or product not in fetches:
                    found[op] = product.producer
                break
    return found


def _is_biased(
    add: Operator, product: Variable, bias: Variable, types: Container[str | None], keep_fp32: Container[str]
) -> bool:
    made, result = product.producer, add.outputs[0]
    if made is None or made.full_type != "MatMul" or made.program is not add.program or result is None:
        return False
    a, b = made.input(0), made.input(1)
    fits = a is not None and b is not None and _rank(b) == 2 and (_rank(a) or 0) >= 2 and _rank(bias) == 1
    width = b.shape[1] if fits and b is not None and b.shape is not None else None
    return (
        isinstance(width, int)
        and bias.shape == (width,)
        and result.dtype in types
        and {v.dtype for v in (*made.inputs, product, bias) if v is not None} == {result.dtype}
        and len(product.readers) == 1
        and product.name not in keep_fp32
        and result.name not in keep_fp32
    )


def _rank(variable: Variable) -> int | None:
    return None if variable.shape is None else len(variable.shape)


def emit_biased(storage: EmulatedStorage, product: Operator | None, add: Operator) -> bool:
    """Emit the product with its bias, for the variable that the Add makes; False where it is to stand as it does."""
    if product is None:
        return False
    e, result = storage.e, add.outputs[0]
    (of_product,) = product.outputs
    (bias,) = (v for v in add.inputs if v is not of_product)
    variables = [*product.inputs, bias]
    assert result is not None
    a, b, c = (storage.read(op, v) for op, v in zip((product, product, add), variables, strict=True) if v is not None)
    base, alpha = multiple(e, a)
    b, turned = untransposed(e, b)
    of_a, of_b = (None if v is None else storage.fixed(v) for v in variables[:2])
    rounds = storage.cpu and e.kernels is not None
    if of_a is not None and of_b is not None and (not storage.cpu or rounds or (len(of_a) > 2 and alpha == 1)):
        count = math.prod(of_a[:-1])
        with e.emulation(rounds):
            if rounds:
                base, b, c = (Value(v.name, result.dtype or "", v.shape) for v in (base, b, c))
            rows = e.reshape(Value(base.name, base.dtype, of_a), (count, of_a[-1]))
            scale, trans_b = None if alpha == 1 else alpha, 1 if turned else None
            flat = e.op("Gemm", rows, b, c, alpha=scale, transB=trans_b, shape=(count, of_b[1]))
            total = e.reshape(flat, (*of_a[:-1], of_b[1]))
        storage.env[result.key] = storage.finished(result, total, False) if storage.cpu else total
        return True
    if not storage.cpu or result.dtype not in HALF:
        return False
    total = scaled_by(e, e.op("MatMul", base, b, dtype="float32"), alpha)
    total = e.op("Add", total, c, dtype="float32")
    storage.env[result.key] = storage.finished(result, total, False)
    return True


def emit_biased_softmax(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit a softmax, along the last axis, of a sum that it alone reads; False where no kernel adds as it reads."""
    total, result = op.input(0), op.output(0)
    if op.full_type != "Softmax" or not storage.e.at.fused or total is None or result is None:
        return False
    add = total.producer
    if add is None or add.full_type != "Add" or add.program is not op.program or len(total.readers) > 1:
        return False
    if result.dtype not in _ADDS_BIAS:
        return False
    shape = storage.fixed(total)
    if shape is None or not along_last_axis(op, len(shape)):
        return False
    for x, bias in (add.inputs, add.inputs[::-1]):
        if x is None or bias is None or storage.fixed(x) != shape:
            continue
        spread = _spread(shape, storage.fixed(bias))
        if spread is not None:
            operands, inner = (storage.read(add, v) for v in (x, bias)), int(spread == "inner")
            storage.env[result.key] = storage.e.op(
                "BiasSoftmax", *operands, domain=DOMAIN, axis=len(shape) - 1, is_inner_broadcast=inner, shape=shape
            )
            return True
    return False


def _spread(shape: tuple[int, ...], bias: tuple[int, ...] | None) -> str | None:
    """How BiasSoftmax spreads a bias over tensors of ``shape``.

    "inner": the same for all rows of what its first axes count; "outer": its last axes are theirs; None: it does not.
    """
    if not bias or len(bias) > len(shape) or not 0 < shape[-1] <= _LONGEST or bias[-1] != shape[-1]:
        return None
    rows, (*lead, _) = shape[:-1], (1,) * (len(shape) - len(bias)) + bias
    same = [have == of for have, of in zip(lead, rows, strict=True)]
    ones = [size == 1 for size in lead]
    for at in range(len(rows) + 1):
        if all(same[:at]) and all(ones[at:]):
            return "inner"
        if all(ones[:at]) and all(same[at:]):
            return "outer"
    return None
