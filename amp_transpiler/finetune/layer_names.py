"""Parameters by the names and layouts of their layers, where exporters wrote weights under names of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import onnx

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.parameter_names import made_up
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.torch_marks import exported_from, torch_layer
from amp_transpiler.program import Program

#: What the slots of weights are called, by operator.
_SLOTS = {
    "LSTM": (None, "W", "R", "B"),
    "GRU": (None, "W", "R", "B"),
    "RNN": (None, "W", "R", "B"),
    "Gather": ("weight",),
    "PRelu": (None, "weight"),
    "MatMul": ("weight", "weight"),
    "Add": ("bias", "bias"),
    "Mul": ("weight", "weight"),
    "Concat": ("token",) * 8,
}
#: Elements that are looked at first.
_ELEMENTS = 64
#: Decimal digits of the numbers that parameters begin with.
_DIGITS = 3
_MODULE = (None, "weight", "bias")  # Conv, Gemm and the normalisations


def restore_names(program: Program) -> list[str]:
    """Name anonymous parameters after the module that reads them, and give linear layers their own layout back.

    ``onnx::MatMul_308``, read by ``/encoder/layer.0/query/MatMul``, becomes ``encoder.layer.0.query.weight`` of shape
    [out, in] behind a Transpose, as PyTorch has it, so that checkpoints and patterns fit.
    """
    renamed, turned = 0, 0
    for variable in program.parameters:
        if not made_up(variable.name) or not variable.readers:
            continue
        op, slot = variable.readers[0]
        turn = op.type == "MatMul" and slot == 1 and len(variable.shape or ()) == 2
        of = exported_from(variable)
        name = of[0][1] if len(of) == 1 else torch_layer(op)[0] if turn else ""
        name = name or (name_of(op, int(slot)) if not isinstance(slot, str) else "")
        if not name or program.has_var(name) or (op.type == "Add" and not is_vector(variable)):
            continue
        program.rename_variable(variable, name)
        renamed += 1
        if turn:
            _transpose(variable, op)
            turned += 1
    if not renamed:
        return []
    return [f"{renamed} anonymous parameters are named after their layers, {turned} of them transposed back"]


def _transpose(variable: Variable, op: Operator) -> None:
    """Turn a matrix, and let all that read it, operator ``op`` and others, read what it was."""
    program, shape = variable.program, variable.shape or ()
    folded = program.fresh_variable(f"{variable.name}.T", variable.dtype, shape)
    variable.data = onnx.numpy_helper.from_array(np.ascontiguousarray(as_array(variable.data).T), variable.name)
    variable.shape = shape[::-1]
    program.replace_uses(variable, folded)
    turn = program.add_operator("Transpose", [variable], [folded], attrs={"perm": [1, 0]})
    turn.scope, turn.guard = op.scope, op.guard


def name_of(op: Operator, slot: int) -> str:
    """``<module>.<parameter>`` for what an operator reads in a slot; "" where the operator has no module."""
    module, slots = module_of(op), _SLOTS.get(op.type, _MODULE)
    return f"{module}.{slots[slot]}" if module and slot < len(slots) and slots[slot] else ""


def module_of(op: Operator) -> str:
    """The path of the module that an operator belongs to; "" where it has none."""
    if op.inserted:
        return ""
    parts: list[str] = []
    for part in op.scope.split("/"):
        if parts and part.startswith(parts[-1] + "."):
            parts.pop()  # 'layer1/layer1.0' is module layer1.0
        parts.append(part)
    return ".".join(parts)


def called(ops: Iterable[Operator]) -> dict[Operator, str]:
    """The modules of operators that read something: TorchScript counts the calls of one behind its name."""
    modules = {op: module_of(op) for op in ops}
    known = set(modules.values())
    for op, module in modules.items():
        first = re.sub(r"_\d+$", "", module) if op.name.startswith("/") else module
        modules[op] = first if first in known else module
    return modules


def is_vector(variable: Variable) -> bool:
    """Whether it has one axis, beside those of 1: a bias, or a scale."""
    return sum(size != 1 for size in variable.shape or ()) <= 1


def uniform(variable: Variable) -> bool:
    """Whether all elements are alike: what a parameter is before it was trained; one alone is a round number then."""
    array = np.asarray(as_array(variable.data)).reshape(-1)
    if array.size == 1:
        return bool(array[0] == array.dtype.type(f"{float(array[0]):.{_DIGITS}g}"))
    return bool(array.size) and bool((array[:_ELEMENTS] == array[0]).all()) and bool((array == array[0]).all())
