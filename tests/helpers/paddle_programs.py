"""Programs that PaddlePaddle's own passes were recorded on, translated operator by operator into ours.

A recorded operator is ``[type, {slot: [names]}, {slot: [names]}]``. Names stay; types and slots are
translated by :data:`OPERATORS`. :func:`view` reduces a recorded program, and :func:`view_of` one of ours, to what can
be compared: for every operator the element type of each slot and the variable behind it, and the set of casts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.program import Program
from tests.helpers.where import PADDLE

DTYPES = {"fp32": "float32", "fp16": "float16", "int64": "int64", "uint8": "bool"}


@dataclass(frozen=True)
class Translation:
    """An ONNX operator, the order of Paddle's slots in it, and constant inputs that are attributes in Paddle."""

    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[Any, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)


def _unary(type_: str) -> Translation:
    return Translation(type_, ("X",), ("Out",))


_SHAPE = np.array([-1], np.int64)
_SLICE = (np.array([0]), np.array([1]), np.array([1]))
#: Slots that are left out have no counterpart in ONNX: XShape, SavedMean, SavedVariance, ReserveSpace.
OPERATORS: dict[str, Translation] = {
    "batch_norm": Translation(
        "BatchNormalization",
        ("X", "Scale", "Bias", "Mean", "Variance"),
        ("Y", "MeanOut", "VarianceOut"),
        attrs={"training_mode": 1},
    ),
    "concat": Translation("Concat", ("X",), ("Out",), attrs={"axis": 0}),
    "conv2d": Translation("Conv", ("Input", "Filter"), ("Output",)),
    "dropout": Translation("Dropout", ("X",), ("Out", "Mask"), constants=(np.array(0.1, np.float32),)),
    "elementwise_add": Translation("Add", ("X", "Y"), ("Out",)),
    "exp": _unary("Exp"),
    "gelu": _unary("Gelu"),
    "layer_norm": Translation("LayerNormalization", ("X", "Scale", "Bias"), ("Y", "Mean", "Variance")),
    "log": _unary("Log"),
    "lookup_table_v2": Translation("Gather", ("W", "Ids"), ("Out",)),
    "matmul_v2": Translation("MatMul", ("X", "Y"), ("Out",)),
    "mul": Translation("MatMul", ("X", "Y"), ("Out",)),
    "pool2d": Translation("MaxPool", ("X",), ("Out",), attrs={"kernel_shape": [2, 2]}),
    "reduce_mean": Translation("ReduceMean", ("X",), ("Out",)),
    "relu": _unary("Relu"),
    "reshape2": Translation("Reshape", ("X",), ("Out",), constants=(_SHAPE,)),
    # a scale with bias 0, whose factor is an attribute in Paddle
    "scale": Translation("Mul", ("X",), ("Out",), constants=(np.array(0.5, np.float32),)),
    "slice": Translation("Slice", ("Input",), ("Out",), constants=_SLICE),
    "softmax": _unary("Softmax"),
    "softmax_with_cross_entropy": Translation(
        "SoftmaxCrossEntropyLoss", ("Logits", "Label"), ("Loss", "Softmax"), attrs={"reduction": "none"}
    ),
    "tanh": _unary("Tanh"),
    "transpose2": _unary("Transpose"),
}


@dataclass
class Recorded:
    """One recorded program: its operators, element types, parameters, and the names that the pass returned."""

    ops: list[tuple[str, dict[str, list[str]], dict[str, list[str]], bool]]
    dtypes: dict[str, str]
    parameters: dict[str, str]
    returned: set[str] | None

    @classmethod
    def read(cls, data: dict[str, Any]) -> Recorded:
        """From either of the two layouts of the files."""
        (block,) = data["blocks"]
        returned = data.get("returned_to_fp16_var_names", data.get("to_fp16_var_names"))
        ops, dtypes = [], dict(data.get("dtypes", {}))
        for op in block:
            if isinstance(op, list):
                ops.append((op[0], op[1], op[2], False))
                continue
            slots = []
            for side in ("in", "out"):
                slots.append({slot: [name for name, _ in uses] for slot, uses in op[side].items()})
                dtypes.update({name: dtype for uses in op[side].values() for name, dtype in uses})
            ops.append((op["type"], slots[0], slots[1], op["attrs"].get("in_fp16_guard", False)))
        parameters = data.get("params") or {name: info[1] for name, info in data.get("parameters", {}).items()}
        dtypes |= parameters
        return cls(
            ops,
            {n: DTYPES[d] for n, d in dtypes.items()},
            {n: DTYPES[d] for n, d in parameters.items()},
            None if returned is None else set(returned),
        )


def load(file: str) -> dict[str, Any]:
    """A file of recorded programs."""
    data: dict[str, Any] = json.loads((PADDLE / file).read_text(encoding="utf-8"))
    return data


def translate(recorded: Recorded) -> Program:
    """Our program for a recorded one that no pass has touched. Statistics written in place become state updates."""
    program = Program()
    made = {name for _, _, outs, _ in recorded.ops for names in outs.values() for name in names}
    statistics = {
        name
        for _, ins, outs, _ in recorded.ops
        for slot in ("Mean", "Variance")
        for name in ins.get(slot, [])
        if name in outs.get(f"{slot}Out", [])
    }
    for name, dtype in recorded.dtypes.items():
        if name in recorded.parameters:
            program.add_variable(name, dtype, None, persistable=True, trainable=name not in statistics)
        elif name not in made:
            program.add_input(name, dtype, None)
    for type_, ins, outs, guard in recorded.ops:
        rule = OPERATORS[type_]
        inputs = [program.var(name) for slot in rule.inputs for name in ins[slot]]
        inputs += [program.add_constant(f"{type_}.constant", each) for each in rule.constants]
        outputs = [_output(program, name, recorded.dtypes) for slot in rule.outputs for name in outs[slot]]
        op = program.add_operator(rule.type, inputs, outputs, attrs=dict(rule.attrs))
        op.guard = guard
    return program


def _output(program: Program, name: str, dtypes: dict[str, str]) -> Variable:
    if not program.has_var(name):
        return program.add_variable(name, dtypes[name])
    state = program.var(name)  # Paddle writes statistics in place
    new = program.add_variable(f"{name}@NEW", dtypes[name])
    program.set_update(state, new)
    return new


Slot = tuple[str, str]  # the variable as the program was written, and the element type in this slot


@dataclass
class View:
    """``ops``: type, inputs and outputs, in order; ``casts``: (variable, element type that it is cast to)."""

    ops: list[tuple[str, tuple[Slot, ...], tuple[Slot, ...]]]
    casts: list[Slot]
    parameters: dict[str, str]


def view(recorded: Recorded) -> View:
    """A recorded program in our operator types and slots."""
    ops, casts = [], []
    for type_, ins, outs, _ in recorded.ops:
        if type_ == "cast":
            ((source,), (result,)) = ins["X"], outs["Out"]
            casts.append((source, recorded.dtypes[result]))
            continue
        rule = OPERATORS[type_]
        read = [(_written(n), recorded.dtypes[n]) for slot in rule.inputs for n in ins[slot]]
        made = [(n, recorded.dtypes[n]) for slot in rule.outputs for n in outs[slot]]
        ops.append((rule.type, tuple(read), tuple(made)))
    return View(ops, casts, recorded.parameters)


def _written(name: str) -> str:
    return name.removesuffix(".cast_fp16").removesuffix(".cast_fp32")


def view_of(program: Program, before: Program) -> View:
    """A program of ours after a pass; ``before`` is the same one untouched. Constants are left out."""
    ops, casts = [], []
    for op in program.operators:
        if op.type == "Cast" and not any(_same(op, old) for old in before.operators):
            source, result = op.inputs[0], op.outputs[0]
            assert source is not None and result is not None
            casts.append((_name(source, before), str(result.dtype)))
            continue
        read = [(_name(v, before), str(v.dtype)) for v in op.inputs if v is not None and not v.is_constant]
        made = [(_name(v, before), str(v.dtype)) for v in op.outputs if v is not None]
        ops.append((op.type, tuple(read), tuple(made)))
    parameters = {v.name: str(v.dtype) for v in program.variables if v.persistable}
    return View(ops, casts, parameters)


def _same(op: Operator, old: Operator) -> bool:
    return [v and v.name for v in op.outputs] == [v and v.name for v in old.outputs] and op.type == old.type


def _name(variable: Variable, before: Program) -> str:
    """The variable of ``before`` whose value this one holds: a cast's source, or what a raw result is cast into."""
    if before.has_var(variable.name):
        return variable.name.removesuffix("@NEW")
    producer = variable.producer
    if producer is not None and producer.type == "Cast" and producer.inputs[0] is not None:
        return _name(producer.inputs[0], before)
    for reader, _ in variable.readers:
        result = reader.output(0)
        if reader.type == "Cast" and result is not None and before.has_var(result.name):
            return result.name
    raise AssertionError(f"{variable.name} stands for nothing of the program before")
