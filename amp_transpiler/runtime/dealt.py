"""Variables whose rows are dealt out among ranks: what this rank keeps of one, and the whole of what all keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_transpiler.errors import DistributedError
from amp_transpiler.ir.dealt_rows import held_shape, spare_row
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import current, own_size
from amp_transpiler.runtime.collective.engine import Engine

#: Bytes of rows that travel at once.
_ROOM = 1 << 24


def dealt_variables(program: Graph) -> list[Variable]:
    """Those of a program that live in a scope. DistributedError: they are dealt out among more or fewer ranks."""
    found, ranks = [v for v in program.variables if v.dealt is not None and v.persistable], own_size()
    for variable in found:
        if variable.dealt != ranks:
            raise DistributedError(
                f"the rows of '{variable.name}' of program '{program.name}' are dealt out among {variable.dealt} "
                f"ranks, and there are {ranks}; build the program anew, and load a checkpoint"
            )
    return found


def whole_rows(program: Graph) -> dict[str, int]:
    """How many rows all ranks have together of each of them."""
    return {v.name: int(v.shape[0]) for v in dealt_variables(program) if v.shape and isinstance(v.shape[0], int)}


def own_rows(variable: Variable, whole: np.ndarray) -> np.ndarray:
    """What this rank keeps of the value of a variable; of one whose rows are not dealt out, all of it."""
    engine = current()
    if variable.dealt is None or engine is None:
        return whole
    kept = np.zeros(held_shape(variable), whole.dtype)
    mine = whole[engine.rank :: engine.size]
    kept[: len(mine)] = mine
    return kept


def deal_out(program: Graph, values: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """What this rank keeps of the values that a startup program has made, OrtValues by name."""
    found = {}
    for variable in dealt_variables(program):
        value = values.get(variable.name)
        if value is not None and variable.producer is not None:
            rows = own_rows(variable, device_tensors.to_array(value))
            found[variable.name] = device_tensors.from_array(rows, place)
    return found


def collected(engine: Engine, held: np.ndarray, rows: int, root: int | None = None) -> np.ndarray:
    """The whole of what all ranks keep of a variable of ``rows`` rows, on every rank, or on ``root`` alone.

    All ranks call it. Rows travel some at a time; elsewhere than on ``root`` an array of no rows comes out.
    """
    here = root is None or engine.rank == root
    whole = np.empty((rows if here else 0, *held.shape[1:]), held.dtype)
    step = max(1, _ROOM // max(1, held[:1].nbytes * engine.size))
    for start in range(0, spare_row(rows, engine.size), step):
        mine = held[start : min(start + step, len(range(engine.rank, rows, engine.size)))]
        parts = [mine if root is None or rank == root else mine[:0] for rank in range(engine.size)]
        for rank, part in enumerate(engine.all_to_all(parts)):
            whole[rank :: engine.size][start : start + len(part)] = part
    return whole
