"""The place of the largest or smallest integer, in operators that every place computes.

Models look so for the end of a text among its tokens. CUDA has kernels of ArgMax and ArgMin for floats alone: such a
step would not run there, or wait for the host.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.decompose import Parts, write_instead
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.view.of_type import of_type


def write_integer_places(program: Graph) -> list[str]:
    """Put extremes and comparisons in the place of each ArgMax and ArgMin of integers along an axis of known size."""
    count = 0
    for op in of_type(program, "ArgMax", "ArgMin"):
        x = op.inputs[0]
        if x is not None and x.dtype is not None and x.dtype not in FLOATS and _size(op, x):
            write_instead(op, _written)
            count += 1
    return [f"{count} searches for the largest or smallest integer are written out"] if count else []


def _size(op: Operator, x: Variable) -> int:
    """The size of the axis that is searched; 0 where it is not known."""
    axis, shape = int(op.attrs.get("axis", 0)), x.shape or ()
    size = shape[axis] if -len(shape) <= axis < len(shape) else None
    return size if isinstance(size, int) else 0


def _written(d: Parts, op: Operator, x: Variable) -> list[Variable]:
    """The first place that holds the extreme, or the last: elsewhere stands a number behind, or before, all places."""
    size, rank = _size(op, x), d.rank(x)
    axis, last = d.whole("axis", 0) % rank, bool(d.whole("select_last_index", 0))
    x = x if x.dtype in ("int32", "int64") else d.cast(x, "int64")
    extreme = d.add("ReduceMax" if op.type == "ArgMax" else "ReduceMin", x, [axis], keepdims=1)
    places = d.const(np.arange(size).reshape(-1, *[1] * (rank - axis - 1)))
    found = d.Where(d.Equal(x, extreme), places, d.const(-1 if last else size, "int64"))
    return [d.add("ReduceMax" if last else "ReduceMin", found, [axis], keepdims=d.whole("keepdims", 1))]
