"""Multiples: a scaling by a number, as a dropout's of what it keeps, costs no pass where its readers can take it over.

A product of matrices takes the number into its factor, and rounds once (and transposes as it reads, on CUDA, as layers
of PyTorch want their weights); a sum takes it where CUDA has a kernel that
multiplies and adds (and rounds in between, as the two would). Who fetches the multiple gets it. What a program
multiplies by a number that it knows is a multiple where products alone read it, as the queries of attention, moved or
not. A program that has no gradients rounds where its file does.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.metadata import only_looks
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import own
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import exchanges_matrices, multiple, times
from amp_transpiler.ops.gpu_kernels import product, remember_product, transposed, untransposed
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage

#: Operators that move the elements of their first input, and change none.
_MOVES = ("Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_PRODUCTS = ("MatMul", own("MatMulGrad"))


def emit_multiple(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit a sum or product that reads multiples from what they are multiples of, or a multiple; False where it is none
    of these."""
    result = op.outputs[0] if op.outputs else None
    if result is None or result.name in storage.keep_fp32:
        return False
    if op.full_type == "Mul" or op.full_type in _MOVES:
        if (storage.e.at.fused or (storage.cpu and result.dtype in HALF)) and _made(storage, op, result):
            return True
        return op.type in _MOVES and _transposed(storage, op, result)
    if op.full_type not in ("Add", "MatMul"):
        return False
    values = [storage.stands_for(v, storage.read(op, v)) for v in op.inputs if v is not None]
    scaled = any(multiple(storage.e, v)[0] is not v for v in values)
    turned = op.type == "MatMul" and any(untransposed(storage.e, v)[1] for v in values)
    if not (scaled or turned) or not all(v.shape for v in values):
        return False
    return (_sum if op.type == "Add" else _product)(storage, result, *values)


def _made(storage: EmulatedStorage, op: Operator, result: Variable) -> bool:
    """Emit a multiple that products alone read: of a tensor by a number, or of another multiple that is moved."""
    e = storage.e
    source, factor = op.input(0), 1.0
    if op.type == "Mul":
        numbers = [known for v in op.inputs if (known := e.known(v)) is not None and known.size == 1]
        tensors = [v for v in op.inputs if v is not None and e.known(v) is None]
        if len(numbers) != 1 or len(tensors) != 1:
            return False
        source, factor = tensors[0], float(numbers[0].item())
    shape = storage.fixed(result)
    if source is None or shape is None or len(shape) < 2 or result.dtype not in (*HALF, "float32"):
        return False
    base, before = multiple(e, storage.stands_for(source, storage.read(op, source)))
    fits = base.shape is not None and math.prod(base.shape) == math.prod(shape)
    if factor * before == 1 or not fits or not storage.trains or not read_by_products(result):
        return False
    with e.emulation() if storage.cpu else nullcontext():
        perm = op.attrs.get("perm", range(len(shape))[::-1]) if op.type == "Transpose" else None
        turned = perm is not None and exchanges_matrices(perm)
        moved = (
            e.reshape(base, shape) if perm is None else transposed(e, base) if turned else e.transpose(base, list(perm))
        )
        value = times(e, moved, factor * before)
    storage.env[result.key] = storage.finished(result, value, False)
    return True


def _transposed(storage: EmulatedStorage, op: Operator, result: Variable) -> bool:
    """Emit matrices that are transposed, which products read as they were, or a view of such; False but on CUDA."""
    source, e = op.input(0), storage.e
    if not e.at.fused or source is None:
        return False
    value = storage.read(op, source)
    if value.shape is None:  # as the places that NonZero finds
        return False
    if op.type == "Transpose":
        if exchanges_matrices(op.attrs.get("perm", range(len(value.shape))[::-1])):
            storage.env[result.key] = transposed(e, value)
            return True
        return False
    base, turned = untransposed(e, value)
    shape = storage.fixed(result)
    if not turned or shape is None or value.shape[-2:] != shape[-2:]:
        return False
    storage.env[result.key] = transposed(e, e.reshape(base, (*shape[:-2], shape[-1], shape[-2])))
    return True


def read_by_products(variable: Variable) -> bool:
    """Whether products of matrices, and their gradients, alone read a variable, moved or not."""
    readers = [op for op, _ in variable.readers if not only_looks(op)]
    moved = [op.outputs[0] for op in readers if op.full_type in _MOVES]
    return (
        bool(readers)
        and all(op.full_type in _MOVES or op.full_type in _PRODUCTS for op in readers)
        and all(v is not None and read_by_products(v) for v in moved)
    )


def _product(storage: EmulatedStorage, result: Variable, a: Value, b: Value) -> bool:
    if len(a.shape or ()) < 2 or len(b.shape or ()) < 2:
        return False
    with storage.e.emulation() if storage.cpu else nullcontext():
        value = product(storage.e, a, b)
    remember_product(storage.e, value, a, b)
    storage.env[result.key] = storage.finished(result, value, False)
    return True


def _sum(storage: EmulatedStorage, result: Variable, a: Value, b: Value) -> bool:
    e = storage.e
    if not e.at.fused or a.shape != b.shape or a.shape is None:
        return False
    plain, (base, factor) = (b, multiple(e, a)) if multiple(e, b)[0] is b else (a, multiple(e, b))
    row = (1, math.prod(a.shape))
    gate = e.const([[factor]], base.dtype)
    total = e.op("GatedAdd", e.reshape(plain, row), e.reshape(base, row), gate, domain=DOMAIN, shape=row)
    storage.env[result.key] = e.reshape(total, a.shape)
    return True
