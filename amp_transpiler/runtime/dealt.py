"""Variables whose rows are dealt out among ranks: what this rank keeps of one, and the whole of what all keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_transpiler.errors import DistributedError
from amp_transpiler.ir.dealt_rows import held_shape, spare_row
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.ops.training.initializers import DRAWN
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


def hold_rows(startup: Graph) -> bool:
    """Let a startup program make of all variables whose rows are dealt out what a rank keeps, any rows behind its own.

    False where it cannot, because it computes one of them from more than its rows, or another variable from one.
    """
    dealt = [v for v in startup.variables if v.dealt is not None]
    makers = {op for v in dealt for op in (v.producer, *(reader for reader, _ in v.readers)) if op is not None}
    for op in makers:
        copies = op.full_type in ("Identity", "Cast")
        if not copies and not (op.domain == OWN and op.type in DRAWN):
            return False
        if any(v is not None and v.dealt is None for v in (*op.outputs, *(op.inputs if copies else ()))):
            return False
    for variable in dealt:
        variable.shape, variable.data = held_shape(variable), None  # an array is state by now, of a rank's rows
    for op in makers:
        if op.type in DRAWN:
            op.attrs["ranks"] = own_size()
    return True


def clear_spare(program: Graph, values: Mapping[str, Any]) -> None:
    """Let the rows of nobody be zeros in what a startup program has made of variables whose rows are dealt out."""
    for variable in dealt_variables(program):
        value, engine = values.get(variable.name), current()
        if value is not None and engine is not None and variable.producer is not None and variable.shape:
            held, *rest = value.shape()
            mine = len(range(engine.rank, int(str(variable.shape[0])), engine.size))
            spare = device_tensors.view(value, mine * math.prod(rest), (held - mine, *rest))
            device_tensors.write(spare, np.zeros(spare.shape(), numpy_dtype(device_tensors.dtype_of(value))))


def deal_out(program: Graph, values: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank keeps of the values that a startup program has made, OrtValues by name."""
    found = {}
    for variable in dealt_variables(program):
        value = values.get(variable.name)
        if value is not None and variable.producer is not None:
            rows = own_rows(variable, device_tensors.to_array(value))
            found[variable.name] = device_tensors.from_array(rows)
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
