"""A Reshape whose sizes are known but for one infers that one itself; the arithmetic that computed it goes.

Exporters keep a dynamic batch by reading it off a shape: Shape, Gather, Unsqueeze, Concat, and casts between integer
types. Those operators run on CPU even where everything else is on a GPU.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import constant_array
from amp_transpiler.ir.nodes import Operator, Variable


def infer_open_sizes(program: Graph, keep: frozenset[Operator]) -> int:
    """Let -1 stand for the one unknown element of the sizes that a Reshape is given, in nested graphs too; how many.

    The others have to be positive: then the unknown one is what the number of elements leaves, if it fits at all.
    """
    count = 0
    for op in program.operators:
        for nested in op.attrs.programs:
            count += infer_open_sizes(nested, keep)
        sizes = op.input(1) if op.type == "Reshape" and not op.domain and op not in keep else None
        known = None if sizes is None else _sizes(sizes)
        if sizes is not None and known is not None:
            op.set_input(1, program.add_constant(f"{sizes.name}.inferred", np.array(known, np.int64)))
            count += 1
    return count


def _sizes(variable: Variable) -> list[int] | None:
    """The sizes that a Concat joins, -1 for the one that is not known; None where that is not what they are."""
    joined = variable.producer
    if joined is None or joined.type != "Concat" or joined.domain:
        return None
    found: list[int] = []
    for piece in joined.inputs:
        array = None if piece is None or piece.is_input else constant_array(piece)
        if array is not None:
            found += [int(size) for size in array.reshape(-1)]
            if min(found[-array.size :], default=1) <= 0:
                return None
        elif piece is not None and piece.shape == (1,):
            found.append(-1)
        else:
            return None
    return found if found.count(-1) == 1 else None
