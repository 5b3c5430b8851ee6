"""What callers give to several passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.option_checks import shown
from amp_transpiler.passes.pipeline import Context, Value

Losses = Variable | str | Sequence[Variable | str]


def _checked_losses(call: str, graph: Graph, given: Any) -> Losses:
    listed = [given] if isinstance(given, (str, Variable)) else given
    if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(v, (str, Variable)) for v in listed):
        raise ArgumentTypeError(f"{call}: loss is {shown(given)}; expected a variable, its name, or a list of several")
    return listed


#: What is minimised: variables of the program, or their names.
LOSS: Value[Losses] = Value("loss", checked=_checked_losses)
#: The operator lists and the 16-bit type.
LISTS: Value[AutoMixedPrecisionLists] = Value("amp_lists", AutoMixedPrecisionLists, "amp.AutoMixedPrecisionLists(...)")


def losses_of(graph: Graph, context: Context) -> list[Variable]:
    """The losses, as variables of ``graph``. GraphError where it has none of that name."""
    given = context[LOSS]
    listed = [given] if isinstance(given, (str, Variable)) else list(given)
    return [graph.var(each if isinstance(each, str) else each.name) for each in listed]
