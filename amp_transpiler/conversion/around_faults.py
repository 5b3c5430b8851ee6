"""What the kernels of the place compute wrongly is written in another way."""

from __future__ import annotations

import numpy as np
import onnx

from amp_transpiler.conversion.conversion_options import OPTIONS
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.annotate import annotate
from amp_transpiler.ir.attributes import attributes_of
from amp_transpiler.ir.clone import clone
from amp_transpiler.ir.decompose import Entry, Parts, decomposition_of, write_instead
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.lists import faults
from amp_transpiler.ops.place_bodies import Asked, body_of
from amp_transpiler.passes.canonicalize.opset import convert_opset
from amp_transpiler.passes.numerics.quantised import latest_opset
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.kernel_faults import fault_in_fp32
from amp_transpiler.passes.view.typing import programs

#: The first opset of Pad that takes its sizes as an input.
_PADS_INPUT = 11
#: The first opset at which bodies are what they are at the target opset; it adds types to their operators alone.
_EARLIER = 20


class AroundFaults(Pass):
    """What the place's kernels compute wrongly, or fail at, in fp32 too is written in another way: some convolutions
    with channels of zeros, the others as what stands for them in a lowered program."""

    name = "around-faults"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)
    invalidates = (Property.TARGET_OPSET,)

    def applies(self, graph: Graph, context: Context) -> bool:
        return bool(faults(context[OPTIONS].kind))

    def run(self, graph: Graph, context: Context) -> None:
        kind = context[OPTIONS].kind
        # taken from the end, those around nested graphs first: a name that they take is not taken again inside
        nested_first = [op for each in reversed([*programs(graph)]) for op in each.operators]
        wrong = [(op, fault) for op in nested_first if (fault := fault_in_fp32(kind, op)) is not None]
        if any(fault.around == "body" for _, fault in wrong):
            context.notes += _raised(graph)
        while wrong:
            op, fault = wrong.pop()
            if fault.channels:
                _pad_channels(op, fault.channels)
                made = [op]
            elif fault.around == "left out":
                op.set_input(len(op.inputs) - 1, None)
                made = [op]
            else:
                try:
                    made = _written_instead(op, kind)
                except GraphError as error:
                    context.notes.append(f"{error}: {fault.what}")
                    continue
            wrong += [(each, fault) for each in made if (fault := fault_in_fp32(kind, each)) is not None]


def _raised(graph: Graph) -> list[str]:
    """Bring the program to the opset that bodies are written at; a sentence on that, if any."""
    own = graph.opset()
    target = latest_opset(graph)
    if own >= target:
        return []
    try:
        convert_opset(clone(graph), target)
    except GraphError as error:
        return [f"opset {own} is not raised to {target}, at which ({error})"]
    convert_opset(graph, target)
    annotate(graph)
    return [f"opset {own} raised to {target}, for what stands for operators whose kernels are wrong on the place"]


def _written_instead(op: Operator, kind: str) -> list[Operator]:
    """What stands for an operator on a place of this kind; where its sizes are open, what it decomposes into."""
    parts = decomposition_of(op)
    try:
        return write_instead(op, _body(kind))
    except GraphError:
        if parts is None:
            raise
        return write_instead(op, parts)


def _body(kind: str) -> Entry:
    """Writes what stands for an operator on a place of this kind."""

    def entry(d: Parts, op: Operator, *inputs: Variable | None) -> list[Variable]:
        e, write = Emitter(kind), body_of(op.full_type)
        known = {v.name: v for v in inputs if v is not None}
        e.reserve(known)
        for v in known.values():
            data = None if v.dtype in FLOATS else constants.content(v)
            if data is not None:  # sizes and axes
                e.initializers[v.name] = onnx.numpy_helper.from_array(as_array(data), v.name)
        results = [_value(v) for v in op.outputs if v is not None]
        values = write and write(e, Asked(op.attrs, results), *(None if v is None else _value(v) for v in inputs))
        if not values or op.program.opset() < _EARLIER:
            raise GraphError(f"operator '{op.label}' ({op.type}) stays as it is, and its kernel there is wrong")
        made = known | {n: d.const(onnx.numpy_helper.to_array(t)) for n, t in e.initializers.items() if n not in known}
        for node in e.nodes:
            attrs = attributes_of(node)
            while not node.input[-1]:  # see passes/lowering/fitting.py
                del node.input[-1]
            read = [made[name] if name else None for name in node.input]
            made |= dict(zip(node.output, d.add(node.op_type, *read, outputs=len(node.output), **attrs), strict=True))
        return [d.cast(made[value.name], result.dtype) for value, result in zip(values, results, strict=True)]

    return entry


def _value(variable: Variable) -> Value:
    return Value(variable.name, str(variable.dtype), static(variable.shape))


def _pad_channels(op: Operator, multiple: int) -> None:
    """Let a Conv read a multiple of so many channels, the last of which are zeros."""
    x, w = op.inputs[0], op.inputs[1]
    assert x is not None and w is not None and w.shape is not None
    missing = -int(w.shape[1] or 0) % multiple
    op.set_input(0, _padded(op, x, missing))
    data = constants.content(w) if constants.is_constant(w) and w.producer is None else None
    if data is None:
        op.set_input(1, _padded(op, w, missing))
        return
    array = as_array(data)
    wide = np.pad(array, [(0, missing if axis == 1 else 0) for axis in range(array.ndim)])
    if len(w.readers) == 1 and w not in op.program.outputs:  # it keeps its name
        constants.replace(w, wide)
        w.shape = wide.shape
    else:
        op.set_input(1, op.program.add_constant(f"{w.name}.padded", wide))


def _padded(op: Operator, variable: Variable, missing: int) -> Variable:
    """The variable with ``missing`` more channels of zeros, before ``op``."""
    program, rank = op.program, len(op.inputs[1].shape or ()) if op.inputs[1] is not None else 0
    sizes = [0] * (2 * rank)
    sizes[rank + 1] = missing
    shape = None if variable.shape is None else list(variable.shape)
    if shape is not None:
        shape[1] = shape[1] + missing if isinstance(shape[1], int) else None
    wide = program.fresh_variable(f"{variable.name}.padded", variable.dtype, shape)
    if program.opset() < _PADS_INPUT:
        program.add_operator("Pad", [variable], [wide], attrs={"pads": sizes}, like=op)
    else:
        pads = program.add_constant(f"{variable.name}.pads", np.array(sizes, np.int64))
        program.add_operator("Pad", [variable, pads], [wide], like=op)
    return wide
