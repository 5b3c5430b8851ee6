"""Multiples: a scaling by a number, as a dropout's of what it keeps, costs no pass where its readers can take it over.

A product of matrices takes the number into its factor, and rounds once; a sum takes it where CUDA has a kernel that
multiplies and adds (and rounds in between, as the two would). Who fetches the multiple gets it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ops.common import multiple
from amp_transpiler.ops.gpu_kernels import product
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage


def emit_multiple(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit a sum or product that reads multiples from what they are multiples of; False where it is none."""
    result = op.outputs[0] if op.outputs else None
    if op.full_type not in ("Add", "MatMul") or result is None or result.name in storage.keep_fp32:
        return False
    values = [storage.stands_for(v, storage.read(op, v)) for v in op.inputs if v is not None]
    if all(multiple(storage.e, v)[0] is v for v in values) or not all(v.shape for v in values):
        return False
    return (_sum if op.type == "Add" else _product)(storage, result, *values)


def _product(storage: EmulatedStorage, result: Variable, a: Value, b: Value) -> bool:
    if len(a.shape or ()) < 2 or len(b.shape or ()) < 2:
        return False
    with storage.e.emulation() if storage.cpu else nullcontext():
        value = product(storage.e, a, b)
    storage.env[result.key] = storage.finished(result, value, False)
    return True


def _sum(storage: EmulatedStorage, result: Variable, a: Value, b: Value) -> bool:
    e = storage.e
    if e.place != "cuda" or a.shape != b.shape or a.shape is None:
        return False
    plain, (base, factor) = (b, multiple(e, a)) if multiple(e, b)[0] is b else (a, multiple(e, b))
    row = (1, math.prod(a.shape))
    gate = e.const([[factor]], base.dtype)
    total = e.op("GatedAdd", e.reshape(plain, row), e.reshape(base, row), gate, domain=DOMAIN, shape=row)
    storage.env[result.key] = e.reshape(total, a.shape)
    return True
