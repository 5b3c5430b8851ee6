"""Softmaxes that an exporter wrote out become one operator again.

JAX has no softmax among its operations: exports hold Exp, ReduceSum and Div, and the ReduceMax that keeps the powers
small. As one operator it is known to make probabilities, runs in fp32 by the lists, and has one gradient.
"""

from __future__ import annotations

from amp_transpiler.ir.copies import original
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Shape, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.passes.canonicalize.matching import maker, put, reduced_axes
from amp_transpiler.passes.view.of_type import of_type


def fuse_softmaxes(program: Graph) -> list[str]:
    """Put one Softmax in the place of each ``exp(x) / sum(exp(x))`` along one axis; in place.

    ``x`` may be less its largest along that axis, which may be computed anew for the sum.
    """
    count = 0
    for op in of_type(program, "Div"):
        found = _found(op)
        if found is not None:
            x, axis = found
            put(op, "Softmax", [x], axis=axis)
            count += 1
    return [f"{count} softmaxes that were written out are one operator each"] if count else []


def _found(op: Operator) -> tuple[Variable, int] | None:
    """What a Div makes the softmax of, and along which axis."""
    powers, total = (None if v is None else original(v) for v in op.inputs)
    exponential = maker(powers, "Exp")
    if exponential is None or powers is None or total is None:
        return None
    summed = _along_one_axis(total, "ReduceSum", powers.shape)
    if summed is None:
        return None
    again, axis = summed
    if again is powers:
        return _unshifted(exponential, axis) or exponential.inputs[0], axis  # type: ignore[return-value]
    other = maker(again, "Exp")
    x = _unshifted(exponential, axis)
    return (x, axis) if other is not None and x is not None and x is _unshifted(other, axis) else None


def _unshifted(exponential: Operator, axis: int) -> Variable | None:
    """The tensor that an Exp reads less its largest number along an axis; None where it reads another."""
    shifted = maker(exponential.inputs[0], "Sub")
    x, largest = (None if v is None else original(v) for v in shifted.inputs) if shifted is not None else (None, None)
    if x is None or largest is None:
        return None
    return x if _along_one_axis(largest, "ReduceMax", x.shape) == (x, axis) else None


def _along_one_axis(variable: Variable, type_: str, shape: Shape | None) -> tuple[Variable, int] | None:
    """What of this shape was reduced along one axis to the variable, and the axis; the variable broadcasts as that
    reduction, with the axis kept, does: what gives it another form on the way says the same of it."""
    thin, op = variable, variable.producer
    while op is not None and not op.domain and (traits_of(op).view or op.type == "Expand"):
        if op.type == "Expand" and op.inputs[0] is not None:
            thin = op.inputs[0] if thin is op.outputs[0] else thin
            if op.inputs[0].shape != thin.shape:
                return None
        op = None if op.inputs[0] is None else op.inputs[0].producer
    if op is None or op.full_type != type_ or op.inputs[0] is None or shape is None:
        return None
    if variable.shape is None or len(variable.shape) != len(shape) or _spreads(variable.shape, shape):
        return None
    read, axes = original(op.inputs[0]), reduced_axes(op)
    if axes is None or len(axes) != 1 or read.shape != shape or thin.shape is None or len(thin.shape) != len(shape):
        return None
    kept = (*shape[: axes[0]], 1, *shape[axes[0] + 1 :])
    unlike = [size for size, wanted in zip(thin.shape, kept, strict=True) if size is None or size != wanted]
    return (read, axes[0]) if unlike in ([], [None]) else None  # the others leave but one number for it


def _spreads(one: Shape, other: Shape) -> bool:
    """Whether a tensor of one shape gives one of the other, of as many dimensions, a larger size."""
    return any(isinstance(b, int) and isinstance(a, int) and a not in (1, b) for a, b in zip(one, other, strict=True))
