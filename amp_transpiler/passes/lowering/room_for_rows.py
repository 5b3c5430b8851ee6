"""Room for the rows of tables that ranks exchange, where some look up more than others."""

from __future__ import annotations

import math

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Shapes, static
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ops.training.all_reduce import ALL_GATHER, ROOM
from amp_transpiler.ops.training.dealt_tables import SEND
from amp_transpiler.passes.canonicalize.control_flow import FEED_SHAPES
from amp_transpiler.passes.lowering.wanted import WANTED, Wanted
from amp_transpiler.passes.pipeline import Context, Pass
from amp_transpiler.passes.view.lookups import is_row_lookup


class RoomForRows(Pass):
    """Exchanges of rows are told how many the rank has that looks up most, and send as many, or have room for them."""

    name = "room-for-rows"
    takes = (FEED_SHAPES, WANTED)

    def applies(self, graph: Graph, context: Context) -> bool:
        return bool(context.get(WANTED, Wanted()).largest)

    def run(self, graph: Graph, context: Context) -> bool:
        own = context.get(FEED_SHAPES) or {}
        shapes = Shapes(graph, {**own, **context.get(WANTED, Wanted()).largest})
        for op in graph.operators:
            rows = exchanged_rows(op)
            shape = None if rows is None else static(shapes[rows][1])
            if shape is not None:
                op.metadata[ROOM] = str(math.prod(shape))
        return True


def exchanged_rows(op: Operator) -> Variable | None:
    """The rows that ranks exchange at an operator, each of which may have more or fewer of them; None at others."""
    if op.domain == OWN:
        return op.input(0) if op.type in (ALL_GATHER, SEND) else None
    table = op.input(0)
    return op.input(1) if table is not None and table.dealt is not None and is_row_lookup(op, 0) else None
