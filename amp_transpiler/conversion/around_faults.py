"""What the kernels of the place compute wrongly is written in another way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_transpiler.conversion.conversion_options import OPTIONS
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.lists import faults
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.kernel_faults import fault_at

#: The first opset of Pad that takes its sizes as an input.
_PADS_INPUT = 11


@dataclass(frozen=True)
class AroundFaults(Pass):
    """Convolutions that the place's kernel computes wrongly get channels of zeros, with which it is right."""

    name = "around-faults"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)

    def applies(self, graph: Graph, context: Context) -> bool:
        return bool(faults(context[OPTIONS].kind))

    def run(self, graph: Graph, context: Context) -> None:
        kind = context[OPTIONS].kind
        for op in list(graph.walk()):
            fault = fault_at(kind, op)
            if fault is not None and fault.channels:
                _pad_channels(op, fault.channels)


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
    if len(w.readers) == 1:  # it keeps its name
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
    wide = program.add_variable(program.unique(f"{variable.name}.padded"), variable.dtype, shape)
    if program.opset() < _PADS_INPUT:
        before = program.add_operator("Pad", [variable], [wide], attrs={"pads": sizes})
    else:
        before = program.add_operator(
            "Pad", [variable, program.add_constant(f"{variable.name}.pads", np.array(sizes, np.int64))], [wide]
        )
    before.role, before.guard, before.scope = op.role, op.guard, op.scope
    return wide
