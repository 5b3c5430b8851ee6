"""Scatters that add: on CPU in a form that adds whole whatever the number of threads, on GPUs in the faster one.

Exporters expand the places of rows to each of their elements, for ScatterElements: what networks over graphs do along
edges. Rows are added as rows here.
"""

from __future__ import annotations

from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined, traits_of
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.row_sums import added_rows, remember_places
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage


def emit_scatter(storage: EmulatedStorage, op: Operator) -> bool:
    """Emit a scatter that adds rows; False where it is none, or sizes are not known: then it has one thread."""
    places = op.input(1)
    if op.full_type not in ("ScatterND", "ScatterElements") or combined(op) != "add" or places is None:
        return False
    by_elements = op.type == "ScatterElements"
    result, values = op.output(0), list[Value]()
    for v in (op.input(0), _expanded(places) if by_elements else places, op.input(2)):
        shape = None if v is None else storage.fixed(v)
        if v is None or shape is None:
            return False
        held = storage.read(op, v)
        values.append(Value(held.name, held.dtype, shape))
    if result is None:
        return False
    total, at, rows = values
    e = storage.e
    if by_elements:
        if not _are_rows(total, at, rows) or int(op.attrs.get("axis", 0)) not in (0, -len(total.shape or ())):
            return False
        at = e.cast(e.reshape(at, (*size_of(at)[:1], 1)), "int64")
        remember_places(e, storage.env[places.key], at)
    if not (storage.cpu or e.at.fused):
        return False
    added = added_rows(e, total, at, rows)
    storage.env[result.key] = storage.finished(result, added, traits_of(op).exact)
    return True


def _expanded(places: Variable) -> Variable | None:
    """What was expanded to make places; None where they were not made so."""
    made = places.producer
    return made.input(0) if made is not None and made.full_type == "Expand" else None


def _are_rows(total: Value, at: Value, rows: Value) -> bool:
    """Whether there is one place for each of the rows, and these are whole."""
    shape, width = rows.shape or (), (total.shape or ())[1:]
    return len(shape) > 1 and shape[1:] == width and at.shape == (shape[0], *[1] * len(width))
