"""The shape of a simple operator's result, from the shapes of its operands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from amp_transpiler.ir.traits import Traits


def result_shape(type_: str, traits: Traits, shapes: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """The shape of a simple operator's result, None where it takes more than this to tell."""
    known = [s for s in shapes if s is not None]
    if not known or len(known) < len(shapes):
        return None
    if traits.elementwise or (traits.over and not traits.reduces):
        if all(shape == known[0] for shape in known):
            return tuple(map(int, known[0]))
        return tuple(int(d) for d in np.broadcast_shapes(*known))
    if type_ == "MatMul" and min(len(s) for s in known) >= 2:
        a, b = known
        return (*(int(d) for d in np.broadcast_shapes(a[:-2], b[:-2])), a[-2], b[-1])
    return None
