"""Constants that only mask are brought into the format, where 16 bit stores them.

Exporters mask with the lowest number of fp32, -3.4e38. In 16 bit that is minus infinity, and a row in which every
place is masked then makes NaN out of a softmax, which loss scaling answers by skipping every step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.masks import Masks
from amp_transpiler.passes.pipeline import Context, Pass, Property, option
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.typing import Slots


def saturate_masks(program: Graph, dtype: str) -> dict[Variable, np.ndarray]:
    """Let constants that only mask end at half of the largest number of ``dtype`` or less, in place; what they held.

    A conversion takes the largest number itself where nothing is added to a mask; half of it leaves room for the
    scores, and for a second mask, that come to it in 16 bit, and what is added more often shares the range
    (:class:`.Masks`). Constants within ``dtype``, infinities, parameters, and what anything but a mask's reader sees
    stay as they are. Called again, it changes nothing.
    """
    masks = Masks(Flow(program), dtype)
    found = [variable for variable in masks.found if not variable.persistable]
    before = {variable: array for variable in found if (array := constants.values(variable)) is not None}
    for variable in before:
        constants.saturate(variable, masks.share(variable, least=2))
    return before


def restore_full(
    program: Graph, dtype: str, before: Mapping[Variable, np.ndarray], decided: Mapping[Operator, Slots]
) -> None:
    """Let masks of which nothing comes into ``dtype`` be what they were before :func:`saturate_masks`, in place.

    ``decided``: the element types that every operator reads and makes. In fp32 scores do not vanish beside half of the
    largest float16: a row of which every place is masked would weigh the places by their scores.
    """
    saturated = {variable: array for variable in before if (array := constants.values(variable)) is not None}
    for variable, array in before.items():
        constants.replace(variable, array)
    for variable in _stored(program, dtype, decided) & saturated.keys():
        constants.replace(variable, saturated[variable])


def saturate_stored(program: Graph, dtype: str, constraints: Constraints, decided: Mapping[Operator, Slots]) -> None:
    """Let the constants of ``constraints.replaced`` take their numbers, in place, if their masks come into ``dtype``.

    ``decided``: the element types that every operator reads and makes. What stays fp32 throughout keeps its numbers,
    and is no longer noted.
    """
    stored = _stored(program, dtype, decided)
    for variable, value in constraints.replaced.items():
        if variable in stored:
            constants.saturate(variable, value)
    kept = {variable.name for variable in constraints.replaced.keys() - stored}
    constraints.constants[:] = [n for n in constraints.constants if n.name not in kept or n.problem != "overflow"]


def _stored(program: Graph, dtype: str, decided: Mapping[Operator, Slots]) -> set[Variable]:
    """The masks that come into ``dtype`` somewhere."""
    return Masks(Flow(program), dtype).stored(
        lambda op: dtype in decided[op].outputs, lambda op, slot: decided[op].inputs[slot] == dtype
    )


class SaturateMasks(Pass):
    """Constants that only mask end at half of the largest number of the type."""

    name = "saturate-masks"
    needs = (Property.TYPED,)

    dtype: str = option("float16", "float16", "bfloat16")

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(saturate_masks(graph, self.dtype))
