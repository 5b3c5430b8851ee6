"""How often a Loop runs whose body computes whether to go on: the ``while`` of TensorFlow, which counts.

Where single numbers that are known before the run decide that, what computes it is run alone, turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.evaluation import fold
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of


def trip_count(op: Operator, known: Callable[[Variable], np.ndarray | None], most: int) -> int | None:
    """The turns of a Loop; None where that is not known before the run, or more than ``most``.

    ``known``: the content of a small variable around the loop, None where that is not known.
    """
    body: Graph = op.attrs["body"]
    limit, start = ((None if v is None else known(v)) for v in op.inputs[:2])
    found = _deciding(body)
    if found is None or any(v and (a is None or a.size != 1) for v, a in zip(op.inputs, (limit, start), strict=False)):
        return None
    operators, states, leaves = found
    fixed = {v: constant_array(v) if v.outer is None else known(v.outer) for v in leaves}
    begins = dict(zip(body.inputs[2:], op.inputs[2:], strict=True))
    now = {inner: None if (outer := begins[inner]) is None else known(outer) for inner in states}
    if any(number is None or number.size > 1 for number in (*fixed.values(), *now.values())):
        return None
    turns, going = 0, start is None or bool(start.all())
    while going and (limit is None or turns < limit.item()):
        if turns == most:
            return None
        values: dict[Variable, np.ndarray] = {**fixed, **now}  # type: ignore[dict-item]
        values |= {body.inputs[0]: np.array(turns), body.inputs[1]: np.array(True)}
        for each in operators:
            made = fold(each, [values[v] for v in each.inputs if v is not None])
            out = each.output(0)
            if made is None or out is None:
                return None
            values[out] = made
        going = bool(values[body.outputs[0]].all())
        now = {inner: values[after] for inner, after in states.items()}
        turns += 1
    return turns


def _deciding(body: Graph) -> tuple[list[Operator], dict[Variable, Variable], list[Variable]] | None:
    """What decides whether to go on: operators in order, states with what they become, and what is the same always.

    None where an operator is among them that may make more than one number, or another each time.
    """
    follows = dict(zip(body.inputs[2:], body.outputs[1:], strict=False))
    makers: set[Operator] = set()
    states: dict[Variable, Variable] = {}
    leaves: list[Variable] = []
    pending, seen = [body.outputs[0]], set(body.inputs[:2])
    while pending:
        variable = pending.pop()
        if variable in seen:
            continue
        seen.add(variable)
        maker = variable.producer
        if variable in follows:
            states[variable] = follows[variable]
            pending.append(follows[variable])
        elif maker is None or maker.type == "Constant":
            leaves.append(variable)
        elif maker.domain or not _one_of_one(maker):
            return None
        else:
            makers.add(maker)
            pending += [v for v in maker.inputs if v is not None]
    return [op for op in body.operators if op in makers], states, leaves


def _one_of_one(op: Operator) -> bool:
    """Whether it makes one number of single numbers, and the same each time."""
    traits = traits_of(op)
    return len(op.outputs) == 1 and not traits.random and (traits.elementwise or traits.view)
