"""Where the rows of a variable lie that are dealt out among ranks, as cards are: row r is row r // N of rank r % N.

Each rank keeps as many rows as the one that has most, and one more, the spare row: what is not sent to a rank, because
another one has it, has a place there.
"""

from __future__ import annotations

from collections.abc import Mapping

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable


def spare_row(rows: int, ranks: int) -> int:
    """The number of the spare row on each rank."""
    return -(-rows // ranks)


def held_shape(variable: Variable) -> tuple[int, ...]:
    """The shape of what a rank holds of a variable whose rows are dealt out."""
    assert variable.dealt is not None and variable.shape is not None
    rows, *rest = (int(size) for size in variable.shape if isinstance(size, int))
    return (spare_row(rows, variable.dealt) + 1, *rest)


def held_shapes(program: Graph) -> Mapping[str, tuple[int, ...]]:
    """Those of the variables of a program, by name; none in a startup program, which makes them whole."""
    if any(v.persistable and v.producer is not None for v in program.variables):
        return {}
    return {v.name: held_shape(v) for v in program.variables if v.dealt is not None and v.producer is None}
