"""A model of 16-bit floats as the fp32 model that it stands for: what training starts from.

Files that ``convert`` or ``train`` wrote, and those of other converters, hold 16-bit weights and casts. Precision is
decided anew for training, from fp32 weights; so all that a conversion to 16 bit put in is taken out again.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
import onnx

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import HALF, NAMES, ONNX_TYPES, SHORT, numpy_dtype
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.precision.casts import add_cast, cast_target
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.typing import programs, signature_of

#: Attributes that hold an element type.
_TYPED = ("dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision", "precision")
#: Copies of a constant for 16-bit readers, as the precision passes call them.
_COPY = re.compile(r"(.+)\.cast_(fp16|bf16)(?:_\d+)?")
_HALF_OF = {SHORT[dtype]: dtype for dtype in HALF}


def widen(program: Graph, moved: dict[str, str] | None = None, free: Collection[str] = ()) -> list[str]:
    """Turn 16-bit weights, constants and operators to fp32 and take their casts out, in place; notes on what was done.

    Values stay what they are: every 16-bit number is a fp32 number. Inputs and outputs keep their declared types,
    behind casts, but for those called ``free``; so do operators that do not take fp32 (those of foreign domains may
    not), between casts.
    ``moved`` is told of each tensor that went with a cast, or lies behind one now, which one holds it in fp32;
    that one may have moved as well.
    """
    moved = {} if moved is None else moved
    every = list(programs(program))
    if not any(v.dtype in HALF for each in every for v in each.variables):
        return []
    kept = {op: _types(op) for op in program.walk() if not _takes_float32(op)}
    io = _keep_io(program, moved, free)
    halves = [v for each in every for v in each.variables if v.dtype in HALF and v not in io]
    held = sorted({str(v.dtype) for v in halves if v.producer is None and v.data is not None})
    for each in every:
        _widen_attributes(each, io, kept)
    for variable in halves:
        _widen_content(variable)
        variable.dtype = "float32"
    for op, (reads, writes) in kept.items():
        _between_casts(op, reads, writes)
    casts = sum(_without_casts(each, moved if each is program else {}) for each in every)
    _merge_copies(program)
    for op in program.walk():
        if not op.inserted:
            op.precision = op.reason = ""
    program.touch()
    what = f"its {' and '.join(held)} weights are fp32 now" if held else "its operators are fp32 now"
    rest = f"; {len(kept)} operators that take no fp32 stay as they are" if kept else ""
    return [f"the model was in 16 bit: {what}, and {casts} casts are taken out{rest}"]


def _takes_float32(op: Operator) -> bool:
    """Whether the operator may hold fp32 where it holds 16 bit."""
    if not any(v is not None and v.dtype in HALF for v in (*op.inputs, *op.outputs)) or op.attrs.programs:
        return True
    if op.domain == OWN:
        return True
    sig = signature_of(op)
    if sig is None or traits_of(op).bits or any(_untyped(v) for v in (*op.inputs, *op.outputs)):
        return False
    slots = [(v, sig.input(slot)) for slot, v in enumerate(op.inputs)]
    slots += [(v, sig.output(slot)) for slot, v in enumerate(op.outputs)]
    return all("float32" in sig.admits[name] for v, name in slots if v is not None and v.dtype in HALF)


def _untyped(variable: Variable | None) -> bool:
    return variable is not None and variable.dtype is None and variable.type_proto is None


def _types(op: Operator) -> tuple[list[str | None], list[str | None]]:
    """The 16-bit types of an operator's slots; None for the others."""
    reads, writes = (
        [v.dtype if v is not None and v.dtype in HALF else None for v in variables]
        for variables in (op.inputs, op.outputs)
    )
    return reads, writes


def _keep_io(program: Graph, moved: dict[str, str], free: Collection[str]) -> set[Variable]:
    """Put casts behind 16-bit inputs and before 16-bit outputs; these variables, whose types are declared."""
    found = {v for v in (*program.inputs, *program.outputs) if v.dtype in HALF and v.name not in free}
    for variable in [v for v in program.variables if v in found]:
        producer = variable.producer
        if producer is None and not variable.readers:
            continue
        full = program.fresh_variable(f"{variable.name}.fp32", "float32", variable.shape)
        program.replace_uses(variable, full)
        if producer is None:
            add_cast(variable, full)
        else:
            producer.set_output(variable.producer_slot, full)
            add_cast(full, variable)
            _retarget(producer)
            moved[variable.name] = full.name
    return found


def _retarget(op: Operator) -> None:
    """Let a cast that wrote 16 bit write fp32."""
    made = op.output(0)
    if op.full_type == "Cast" and made is not None and made.dtype == "float32":
        op.attrs["to"] = cast_target(op.program, "float32")


def _widen_content(variable: Variable) -> None:
    """Let a weight or a constant without a producer hold fp32."""
    data = variable.data
    if isinstance(data, onnx.SparseTensorProto):
        variable.data = np.asarray(as_array(data), np.float32)
    elif data is not None and variable.producer is None:
        constants.replace(variable, constants.converted(variable, "float32", ""))


def _widen_attributes(program: Graph, io: set[Variable], kept: Collection[Operator]) -> None:
    """Let attributes hold fp32 tensors instead of 16-bit ones, and name that type."""
    for op in program.operators:
        if op in kept:
            continue
        for proto in op.attrs.protos():
            if proto.type == proto.TENSOR and NAMES.get(proto.t.data_type) in HALF:
                op.attrs[proto.name] = np.asarray(as_array(proto.t), np.float32)
        made = op.output(0)
        if op.full_type == "Cast" and made is not None and made.dtype in HALF and made not in io:
            op.attrs["to"] = cast_target(program, "float32")
        for name in _TYPED:
            if isinstance(op.attrs.get(name), int) and NAMES.get(op.attrs[name]) in HALF:
                op.attrs[name] = ONNX_TYPES["float32"]
    for variable in program.variables:
        if variable.type_proto is not None:
            proto = onnx.TypeProto()
            proto.CopyFrom(variable.type_proto)
            _widen_type(proto)
            variable.type_proto = proto


def _widen_type(proto: onnx.TypeProto) -> None:
    """Let the type of a sequence or an optional hold fp32 tensors."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type" and NAMES.get(proto.tensor_type.elem_type) in HALF:
        proto.tensor_type.elem_type = ONNX_TYPES["float32"]
    elif kind in ("sequence_type", "optional_type"):
        _widen_type(getattr(proto, kind).elem_type)


def _between_casts(op: Operator, reads: list[str | None], writes: list[str | None]) -> None:
    """Let an operator hold what it held, between casts."""
    program = op.program
    for slot, dtype in enumerate(reads):
        variable = op.input(slot)
        if dtype is not None and variable is not None:
            narrow = program.fresh_variable(f"{variable.name}.cast_{SHORT[dtype]}", dtype, variable.shape)
            add_cast(variable, narrow)
            op.set_input(slot, narrow)
    for slot, dtype in enumerate(writes):
        variable = op.output(slot)
        if dtype is not None and variable is not None:
            raw = program.fresh_variable(f"{variable.name}.{SHORT[dtype]}", dtype, variable.shape)
            op.set_output(slot, raw)
            add_cast(raw, variable)


def _without_casts(program: Graph, moved: dict[str, str]) -> int:
    """Take out casts from fp32 to fp32; their number."""
    count = 0
    for op in program.operators:
        read, made = op.input(0), op.output(0)
        if op.full_type != "Cast" or read is None or made is None or not read.dtype == made.dtype == "float32":
            continue
        program.remove_operator(op)
        if made in program.outputs:
            if read.producer is None or read in program.outputs:
                program.add_operator("Identity", [read], [made])
            else:  # the output keeps its name
                program.replace_uses(read, made)
                read.producer.set_output(read.producer_slot, made)
                program.remove_variable(read)
                moved[read.name] = made.name
        else:
            program.replace_uses(made, read)
            program.remove_variable(made)
            moved[made.name] = read.name
        count += 1
    return count


def _merge_copies(program: Graph) -> None:
    """Let a 16-bit copy that a precision pass made of a fp32 constant be that constant again: one weight, not two."""
    for variable in list(program.variables):
        found = _COPY.fullmatch(variable.name)
        if found is None or variable.data is None or variable.producer is not None or not program.has_var(found[1]):
            continue
        whole, dtype = program.var(found[1]), _HALF_OF[found[2]]
        if whole.data is None or whole.dtype != "float32" or whole.shape != variable.shape or variable.is_input:
            continue
        with np.errstate(all="ignore"):
            rounded = np.asarray(as_array(whole.data)).astype(numpy_dtype(dtype)).astype(np.float32)
        if np.array_equal(rounded, as_array(variable.data)) and variable not in program.outputs:
            program.replace_uses(variable, whole)
            program.remove_variable(variable)


class Widen(Pass):
    """16-bit weights, constants and operators are fp32 with the same values, and casts between them go."""

    name = "widen"
    needs = (Property.TYPED,)

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(widen(graph))
