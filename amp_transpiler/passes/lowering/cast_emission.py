"""Casts of a program: 16-bit results as the place holds them, states together, transposed matrices as they were."""

from __future__ import annotations

from typing import Any

from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.types import HALF, ONNX_TYPES
from amp_transpiler.ops.common import multiple, times, unwidened
from amp_transpiler.ops.gpu_kernels import transposed, untransposed
from amp_transpiler.ops.training.rows import state_as
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage
from amp_transpiler.passes.lowering.multiples import read_by_products


def emit_cast(storage: EmulatedStorage, op: Operator) -> None:
    """Emit a Cast."""
    e, source, target = storage.e, op.inputs[0], op.outputs[0]
    assert source is not None and target is not None and target.dtype is not None
    value, turned = untransposed(e, storage.read(op, source))
    if source.dtype == target.dtype:
        made = value
    elif target.dtype in HALF and storage.cpu:
        kept = target.name in storage.keep_fp32
        made = e.cast(value, "float32") if kept else e.stored(value, target.dtype)
    elif unwidened(e, value).dtype == target.dtype:
        made = unwidened(e, value)
    elif target.dtype in HALF:
        base, factor = multiple(e, value)
        if factor != 1 and e.at.fused and storage.trains and read_by_products(target):
            made = times(e, e.cast(base, target.dtype), factor)
        else:
            made = state_as(e, value, target.dtype)
    elif value.dtype == target.dtype:
        made = value
    else:
        extra: dict[str, Any] = {"saturate": op.attrs.proto("saturate").i} if "saturate" in op.attrs else {}
        made = e.op("Cast", value, dtype=target.dtype, shape=value.shape, to=ONNX_TYPES[target.dtype], **extra)
    storage.env[target.key] = transposed(e, made) if turned else made
