"""A Reshape whose sizes are known but for one infers that one itself; the arithmetic that computed it goes.

Exporters keep a dynamic batch by reading it off a shape: Shape, Gather, Unsqueeze, Concat, and casts between integer
types. Those operators run on CPU even where everything else is on a GPU.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.view.of_type import of_type

#: What an element of a shape goes through on its way to other sizes.
_PICKS = frozenset({"Cast", "Slice", "Gather", "Squeeze", "Unsqueeze", "Reshape", "Identity"})
_HOPS = 8


def infer_open_sizes(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> int:
    """Let -1 stand for the one unknown element of the sizes that a Reshape is given, in nested graphs too; how many.

    The others have to be positive: then the unknown one is what the number of elements leaves, if it fits at all. An
    Expand behind it to the very same sizes goes. Variables among ``names`` and operators of ``keep`` stay.
    """
    count = 0
    for op in program.nesting:
        for nested in op.attrs.programs:
            count += infer_open_sizes(nested, names, keep)
    for op in of_type(program, "Expand"):
        if op not in keep and _is_there(op):
            made, read = op.outputs[0], op.inputs[0]
            if made is not None and read is not None and made not in program.outputs and made.name not in names:
                program.replace_uses(made, read)
                program.remove_operator(op)
                program.remove_variable(made)
    for op in of_type(program, "Reshape"):
        sizes = op.input(1) if op not in keep else None
        known = None if sizes is None else _sizes(sizes)
        if sizes is not None and known is not None:
            op.set_input(1, program.add_constant(f"{sizes.name}.inferred", np.array(known, np.int64)))
            count += 1
    return count


def _is_there(op: Operator) -> bool:
    """Whether an Expand reads what a Reshape gave the sizes that it asks for, the open one read off a shape."""
    read, sizes = op.input(0), op.input(1)
    maker = None if read is None else read.producer
    if maker is None or maker.full_type != "Reshape" or sizes is None or maker.input(1) is not sizes:
        return False
    joined = _joined(sizes)
    if joined is None or _sizes(sizes) is None:
        return False
    return all(piece is None or constant_array(piece) is not None or _of_a_shape(piece) for piece in joined.inputs)


def _of_a_shape(variable: Variable) -> bool:
    found: Variable | None = variable
    for _ in range(_HOPS):
        op = None if found is None else found.producer
        if op is None or op.full_type not in _PICKS:
            return op is not None and op.full_type == "Shape"
        found = op.input(0)
    return False


def _joined(variable: Variable) -> Operator | None:
    """The operator that makes sizes, before casts between integer types."""
    op = variable.producer
    while op is not None and op.full_type == "Cast" and op.inputs[0] is not None:
        if op.inputs[0].dtype not in ("int32", "int64"):
            return None
        op = op.inputs[0].producer
    return op


def _sizes(variable: Variable) -> list[int] | None:
    """The sizes that a Concat joins, -1 for the one that is not known; None where that is not what they are."""
    joined = _joined(variable)
    if joined is None or joined.full_type != "Concat":
        return None
    found: list[int] = []
    for piece in joined.inputs:
        array = constant_array(piece)
        if array is not None:
            found += [int(size) for size in array.reshape(-1)]
            if min(found[-array.size :], default=1) <= 0:
                return None
        elif piece is not None and piece.shape == (1,):
            found.append(-1)
        else:
            return None
    return found if found.count(-1) == 1 else None
