"""What each part of an optimizer counts for itself, its beta powers, where a checkpoint was saved with other parts.

An optimizer updates parameters of one rate, decay and clipping as one part. Other groups, or parameters that no longer
decay, make other parts of the same parameters: the number of a part then says nothing, and its moments, which are
stored by parameter, say whether it goes on or begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime.checkpoint.state_slots import Key, Stored


def agreed_counts(program: Program, stored: Mapping[Key, Stored]) -> dict[str, Stored]:
    """By kind the count of which every stored part has the same value, bit for bit: all took the same steps."""
    found = {}
    for kind in {kind for update in training_step(program).updates for kind in update.scalars}:
        parts = [tensor for (role, of, _), tensor in stored.items() if role == kind and not of]
        numbers = all(math.prod(tensor.shape) == 1 for tensor in parts)  # a file may say anything
        if numbers and len({tensor.read().tobytes() for tensor in parts}) == 1:
            found[kind] = parts[0]
    return found


def fit_counts(program: Program, sources: dict[Variable, Stored | None], agreed: Mapping[str, Stored]) -> list[str]:
    """Let the counts of a part begin with its moments, where none of these is stored; otherwise let one of which
    nothing is stored under its number have what all stored parts agree on.

    The parameters that come without moments to a part that goes on, by name: its counts are not theirs.
    """
    late = list[str]()
    for update in training_step(program).updates:
        known = [(row, any(sources.get(v) for v in row.accumulators.values() if v is not None)) for row in update.rows]
        begins = not any(goes_on for _, goes_on in known)
        for kind, count in update.scalars.items():
            if count in sources:
                sources[count] = None if begins else sources[count] or agreed.get(kind)
        if update.scalars and not begins:
            late += [row.parameter.name for row, goes_on in known if row.parameter is not None and not goes_on]
    return late
