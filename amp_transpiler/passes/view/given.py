"""What callers give to several passes of training."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.pipeline import Context, Value

#: What is minimised: variables of the program, or their names.
LOSS: Value[Variable | str | Sequence[Variable | str]] = Value("loss")
#: The operator lists and the 16-bit type.
LISTS: Value[AutoMixedPrecisionLists] = Value("amp_lists")


def losses_of(graph: Graph, context: Context) -> list[Variable]:
    """The losses, as variables of ``graph``. GraphError where it has none of that name."""
    given = context[LOSS]
    listed = [given] if isinstance(given, (str, Variable)) else list(given)
    return [graph.var(each if isinstance(each, str) else each.name) for each in listed]
