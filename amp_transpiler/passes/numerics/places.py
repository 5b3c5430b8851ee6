"""Places in an image (sampling grids, regions, boxes): 16 bit holds them to half a pixel from 1024 pixels on.

Backwards from what reads there: through what moves them, elementwise arithmetic, and matrices that turn coordinates.
What else makes them is fp32 as well where it makes the places themselves, as a layer that predicts regions; where only
arithmetic makes places of its results, as of a flow that is added to a grid, these may be 16 bit.

The least of two ends less the largest of two beginnings is the overlap of two boxes. Areas leave float16 from 256
pixels on, so that all that is computed of such places is fp32, up to a quotient such as an intersection over a union.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.integer_valued import operands
from amp_transpiler.passes.numerics.overflow_propagation import summed_terms
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import is_float

#: Coordinates of a place: three, and the 1 by which a matrix shifts them.
_COORDINATES = 4


def keep_places(flow: Flow, constraints: Constraints) -> None:
    """Add to ``constraints`` the operators that read at places in an image, and those that compute the places.

    What an earlier conversion did to the program makes no difference. Linear in its size.
    """
    overlaps = [read for _, _, read in flow.of("Sub") if _is_overlap(read)]
    if not overlaps and not flow.of(having=lambda kind: bool(kind.places)):
        return
    why = Reason(Kind.PLACES)
    #: What becomes places, and whether it holds them as it is.
    becomes: dict[Variable, bool] = {}
    becomes |= {v: True for read in overlaps for v in read if v is not None}
    for op, _, _ in reversed(flow.steps):
        places = traits_of(op).places
        if places:
            constraints.keep(op, why)
            becomes |= {source(v): True for v in map(op.input, places) if v is not None and is_float(v)}
            continue
        made = [becomes[v] for v in op.outputs if v is not None and v in becomes]
        whole = moves(op) or _turns(op, flow)
        passes = whole or traits_of(op).elementwise
        if not (any(made) or (made and passes)) or op.attrs.programs:
            continue
        constraints.keep(op, why)
        held = any(made) and whole
        for variable in map(source, operands(op)) if passes else ():
            if not is_constant(variable):
                becomes[variable] = held or becomes.get(variable, False)
    for op, name, read in flow.steps if overlaps else ():
        operands_ = [v for v in read if v is not None and not is_constant(v)]
        if not operands_ or any(v not in becomes for v in operands_) or op.attrs.programs:
            continue
        if moves(op) or traits_of(op).elementwise:
            constraints.keep(op, why)
            becomes.update((v, False) for v in op.outputs if v is not None and name != "Div")


def _is_overlap(read: list[Variable | None]) -> bool:
    """Whether a difference is the least of two computed tensors less the largest of two others."""
    for variable, name in zip(read, ("Min", "Max"), strict=True):
        maker = None if variable is None else variable.producer
        if maker is None or maker.full_type != name or sum(not is_constant(source(v)) for v in operands(maker)) != 2:
            return False
    return True


def _turns(op: Operator, flow: Flow) -> bool:
    """Whether it combines the coordinates of each place, as the product of a grid with an affine matrix."""
    x = op.input(0)
    if op.type == "MatMul":
        terms = x.shape[-1] if x is not None and x.shape else None
    else:
        terms = summed_terms(op, flow)
    return isinstance(terms, int) and terms <= _COORDINATES
