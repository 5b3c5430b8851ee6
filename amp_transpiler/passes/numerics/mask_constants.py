"""Constants that only mask are brought into the format, where 16 bit stores them.

Exporters mask with the lowest number of fp32, -3.4e38. In 16 bit that is minus infinity, and a row in which every
place is masked then makes NaN out of a softmax, which loss scaling answers by skipping every step.
"""

from __future__ import annotations

from collections.abc import Mapping

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.masks import Masks
from amp_transpiler.passes.pipeline import Context, Pass, Property, option
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.typing import Slots


def saturate_masks(program: Graph, dtype: str) -> bool:
    """Let constants that only mask end at half of the largest number of ``dtype`` or less, in place; whether any did.

    A conversion takes the largest number itself where nothing is added to a mask; half of it leaves room for the
    scores, and for a second mask, that come to it in 16 bit, and what is added more often shares the range
    (:class:`.Masks`). Constants within ``dtype``, infinities, parameters, and what anything but a mask's reader sees
    stay as they are. Called again, it changes nothing.
    """
    masks = Masks(Flow(program), dtype)
    found = [variable for variable in masks.found if not variable.persistable]
    for variable in found:
        constants.saturate(variable, masks.share(variable, least=2))
    return bool(found)


def saturate_stored(program: Graph, dtype: str, constraints: Constraints, decided: Mapping[Operator, Slots]) -> None:
    """Let the constants of ``constraints.replaced`` take their numbers, in place, if their masks come into ``dtype``.

    ``decided``: the element types that every operator reads and makes. What stays fp32 throughout keeps its numbers,
    and is no longer noted.
    """
    stored = Masks(Flow(program), dtype).stored(
        lambda op: dtype in decided[op].outputs, lambda op, slot: decided[op].inputs[slot] == dtype
    )
    for variable, value in constraints.replaced.items():
        if variable in stored:
            constants.saturate(variable, value)
    kept = {variable.name for variable in constraints.replaced.keys() - stored}
    constraints.constants[:] = [n for n in constraints.constants if n.name not in kept or n.problem != "overflow"]


class SaturateMasks(Pass):
    """Constants that only mask end at half of the largest number of the type."""

    name = "saturate-masks"
    needs = (Property.TYPED,)

    dtype: str = option("float16", "float16", "bfloat16")

    def run(self, graph: Graph, context: Context) -> bool:
        return saturate_masks(graph, self.dtype)
