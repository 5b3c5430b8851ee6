"""Angles of positions and times: 16 bit holds one of 1000 to half a radian, and its sine may then be any number.

Backwards from sines and cosines, through what moves numbers, elementwise arithmetic, and products that sum hardly
anything (times and their frequencies, coordinates and a matrix of directions), where all of that comes of inputs,
integers, constants and weights alone: prompts, time steps, rotary positions, Fourier features. What a layer computes
was rounded before, and its sine is an activation, which may be 16 bit. So may the sine of what is proved to be no more
than half a turn.

Likewise logarithms, which are taken of what is of any size: counts, incomes, energies. float16 ends at 65504 and 6e-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS, LIMITS
from amp_transpiler.ops.einsum import labels_of
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.numerics.weight_norms import summed_axes
from amp_transpiler.passes.view.flow import Flow

#: Terms of a sum: the coordinates of a place.
_FEW = 4


def keep_angles(program: Graph, flow: Flow, ranges: Ranges, constraints: Constraints) -> None:
    """Add to ``constraints`` the sines and cosines of such angles, and what computes the angles.

    What an earlier conversion did to the program makes no difference. Linear in its size.
    """
    if any(kind.periodic for kind in flow.kinds.values()):
        _keep(program, flow, constraints, Kind.ANGLE, lambda op, v: _is_angle(op) and not ranges.within(v, math.pi))


def keep_fed_logarithms(program: Graph, flow: Flow, ranges: Ranges, constraints: Constraints) -> None:
    """Add to ``constraints`` the logarithms of what is fed and may leave float16, and what computes their operands."""
    if "Log" in flow.kinds:
        limits = LIMITS["float16"]

        def may_leave(op: Operator, variable: Variable) -> bool:
            low, high = ranges.bound(variable) or (0.0, math.inf)
            leaves = high > limits.largest or 0 < low < limits.normal
            return op.full_type == "Log" and leaves and not _held(variable)

        _keep(program, flow, constraints, Kind.FED_LOGARITHM, may_leave)


def _keep(
    program: Graph, flow: Flow, constraints: Constraints, kind: Kind, taken: Callable[[Operator, Variable], bool]
) -> None:
    """Keep the operators of which ``taken`` holds for their operand, where that is given, and what computes it."""
    given, wanted = _given(program, flow), set[Variable]()
    for op, _, read in reversed(flow.steps):
        operand = read[0] if read else None
        found = operand is not None and (operand in given or _held(operand)) and taken(op, operand)
        if found or any(v in wanted and v in given for v in op.outputs if v is not None):
            constraints.keep(op, Reason(kind))
            wanted.update(v for v in read if v is not None)


def _is_angle(op: Operator) -> bool:
    return traits_of(op).periodic


def _held(variable: Variable) -> bool:
    """Whether the program holds it."""
    return variable.persistable or variable.data is not None


def _given(program: Graph, flow: Flow) -> set[Variable]:
    """The inputs, and what is computed of nothing but them, constants and weights, as angles are."""
    given = {v for v in program.inputs if v.dtype in FLOATS}
    for op, _, read in flow.steps:
        operands = [v for v in read if v is not None]
        if operands and not (moves(op) or traits_of(op).elementwise or _sums_few(op, operands)):
            continue
        if not op.attrs.programs and all(v in given or _held(v) for v in operands):
            given.update(v for v in op.outputs if v is not None)
    return given


def _sums_few(op: Operator, operands: Sequence[Variable]) -> bool:
    """Whether it is a product, each of whose results adds up a few terms at most."""
    if op.full_type == "Einsum":
        shapes = [v.shape for v in operands if v.shape is not None]
        if len(shapes) < len(operands):
            return False
        terms, result = labels_of(op.attrs["equation"], [len(shape) for shape in shapes])
        axes = [axis for pair in zip(terms, shapes, strict=True) for axis in zip(*pair, strict=True)]
        return _few([size for label, size in dict(axes).items() if label not in result])
    summed, weights = summed_axes(op), op.input(1)
    return summed is not None and weights is not None and _few([(weights.shape or ())[axis] for axis in summed])


def _few(sizes: Sequence[int | str | None]) -> bool:
    known = [size for size in sizes if isinstance(size, int)]
    return len(known) == len(sizes) and math.prod(known) <= _FEW
