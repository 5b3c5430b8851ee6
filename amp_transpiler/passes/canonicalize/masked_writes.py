"""What is written where a mask is true is selected: ``x[mask] = v`` has no size that data decide.

Exporters look up the places of the mask (NonZero) and scatter as many copies of v there. How many there are is not
known before the run, so that nothing on that path can be trained; a Where gives the same, row by row.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined
from amp_transpiler.passes.canonicalize.matching import computed, maker, put
from amp_transpiler.passes.view.of_type import of_type


def select_by_masks(program: Graph) -> list[str]:
    """Put a Where in the place of each ScatterND that writes one value, or one row, wherever a mask is true; in
    place."""
    count = 0
    for scatter in of_type(program, "ScatterND"):
        mask, value = _mask(scatter), _repeated(scatter.input(2))
        x, out = scatter.input(0), scatter.output(0)
        if mask is None or value is None or x is None or out is None or x.shape is None or mask.shape is None:
            continue
        if combined(scatter) == "none" and _fits(mask, value, x):
            _write(scatter, mask, value)
            count += 1
    return [f"{count} values that are written where a mask is true are selected by it"] if count else []


def _mask(scatter: Operator) -> Variable | None:
    """The mask whose places are looked up."""
    turned = maker(scatter.input(1), "Transpose")
    places = None if turned is None or list(turned.attrs.get("perm", (1, 0))) != [1, 0] else turned.input(0)
    found = maker(places, "NonZero")
    mask = None if found is None else found.input(0)
    return mask if mask is not None and mask.dtype == "bool" else None


def _repeated(updates: Variable | None) -> Variable | None:
    """What is repeated once for each place: one number, or a row."""
    reshape = maker(updates, "Reshape")
    repeat = maker(updates if reshape is None else reshape.input(0), "Expand")
    value, made = (None, None) if repeat is None else (repeat.input(0), repeat.output(0))
    if value is None or made is None or value.shape is None or made.shape is None:
        return None
    row = list(value.shape)
    rows = len(made.shape) == len(row) + 1 and list(made.shape[1:]) == row
    return value if (rows and None not in row) or all(size == 1 for size in row) else None


def _fits(mask: Variable, value: Variable, x: Variable) -> bool:
    """Whether each place takes the same number, or each row of x the same row.

    Two sizes that nobody knows may differ: a mask shorter than x is true nowhere beyond its end.
    """
    shape, held = list(x.shape or ()), list(mask.shape or ())
    if value.shape is None or None in held or held != shape[: len(held)]:
        return False
    row = list(value.shape)
    if all(size == 1 for size in row):
        return len(row) <= 1
    along = len(shape) - len(row)
    if along < 1 or row != shape[along:]:
        return False
    if len(held) <= along:  # rows that the mask picks whole
        return len(held) == along
    wide = maker(mask, "Expand")  # a mask of numbers that is the same along each row
    before = None if wide is None else wide.input(0)
    return before is not None and list(before.shape or ()) == [*shape[:along], *[1] * len(row)]


def _write(scatter: Operator, mask: Variable, value: Variable) -> None:
    x = scatter.inputs[0]
    assert x is not None
    missing = len(x.shape or ()) - len(mask.shape or ())
    if missing:
        axes, shape = np.arange(-missing, 0), (*(mask.shape or ()), *[1] * missing)
        read = [mask, scatter.program.add_constant(f"{mask.name}.axes", axes)]
        mask = computed(scatter, "Unsqueeze", read, f"{mask.name}.tmp", shape)
    put(scatter, "Where", [mask, value, x])
