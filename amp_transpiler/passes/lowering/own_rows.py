"""Rows of an update that a rank leaves to others, where masters and accumulators are dealt out among the ranks.

All ranks exchange the same in the same order, whether or not one needs what it brings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.passes.lowering.lowered import Row


def own_updates(
    graph: Graph, holds: Callable[[int | None], bool]
) -> tuple[bool | Mapping[Variable, Variable], list[Variable]]:
    """What a rank updates that ``holds`` what is of these owners (True: all), and the new values of the others."""
    own = {state: new for state, new in graph.updates.items() if holds(state.owner)}
    others = [new for state, new in graph.updates.items() if not holds(state.owner)]
    return (own, others) if others else (True, [])


def fullest(graph: Graph) -> int:
    """The rank that holds most of the state that is dealt out."""
    load: Counter[int] = Counter()
    for variable in graph.variables:
        if variable.owner is not None and not variable.is_parameter:
            load[variable.owner] += math.prod(static(variable.shape) or ())
    return max(load, key=lambda rank: (load[rank], -rank), default=0)


def left_to_others(operators: Sequence[Operator], targets: Sequence[Variable]) -> frozenset[Variable]:
    """What rows of state alone read or make, none of whose new values is needed for the targets.

    A row of an operator that gates state depends on nothing of its other rows. One reverse sweep.
    """
    needed, left = set(targets), set[Variable]()
    for op in reversed(operators):
        slots = slots_of(op.type, op.domain)
        read = [*op.inputs, *op.captures]
        if slots is not None and slots.gated and slots.output_row:
            read, width = [*op.inputs[: len(slots.inputs)]], len(slots.output_row)
            for number, row in enumerate(slots.rows(op.inputs)):
                first = len(slots.outputs) + number * width
                made = [v for v in op.outputs[first : first + width] if v is not None]
                if not needed.isdisjoint(made):
                    read += row.values()
                else:
                    left |= {v for v in (*row.values(), *made) if v is not None}
        needed |= {v for v in read if v is not None}
    return frozenset(left - needed)


def met_at(rows: Sequence[Row]) -> set[str]:
    """What exchanges between ranks bring."""
    return {name for each in rows if each.node.domain == OWN for name in each.makes}
