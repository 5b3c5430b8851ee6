"""Angles of positions and times: 16 bit holds one of 1000 to half a radian, and its sine may then be any number.

Backwards from sines and cosines, through what moves numbers, elementwise arithmetic, and products that sum hardly
anything (times and their frequencies, coordinates and a matrix of directions), where all of that comes of inputs,
integers, constants and weights alone: prompts, time steps, rotary positions, Fourier features. What a layer computes
was rounded before, and its sine is an activation, which may be 16 bit. So may the sine of what is proved to be no more
than half a turn. Remainders are phases too: the hour of the day, of hours that were counted.

Likewise logarithms, which are taken of what is of any size: counts, incomes, energies. float16 ends at 65504 and 6e-8.

And standard scores of what lies far from 0 beside its spread: years, prices, pressures. 16 bit holds 1990 to 0.5, or
to 4, and what is left of it less the mean is a few of these. What is scaled down, to seconds of a day in days, was
large: float16 ends at 65504. So are differences between what is fed, as of prices of two days: 16 bit rounds them off
before they are made, and as many bytes are moved where they are made first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS, LIMITS
from amp_transpiler.ops.einsum import labels_of
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.numerics.weight_norms import summed_axes
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.flow import Flow

#: Terms of a sum: the coordinates of a place.
_FEW = 4
#: Deviations by which a standard score may be off, and those that what is scored may lie from its mean.
_OFF, _REACH = 0.01, 8


def keep_angles(program: Graph, flow: Flow, ranges: Ranges, constraints: Constraints) -> None:
    """Add to ``constraints`` the sines, cosines and remainders of such angles, and what computes the angles.

    What an earlier conversion did to the program makes no difference. Linear in its size.
    """
    if {"Mod", "Floor"} & flow.kinds.keys() or any(kind.periodic for kind in flow.kinds.values()):

        def is_angle(op: Operator, variable: Variable) -> bool:
            return _is_phase(op, flow) and not ranges.within(variable, math.pi)

        _keep(program, flow, constraints, Kind.ANGLE, is_angle)


def keep_fed_logarithms(program: Graph, flow: Flow, ranges: Ranges, constraints: Constraints) -> None:
    """Add to ``constraints`` the logarithms of what is fed and may leave float16, and what computes their operands."""
    if "Log" in flow.kinds:
        limits = LIMITS["float16"]

        def may_leave(op: Operator, variable: Variable) -> bool:
            low, high = ranges.bound(variable) or (0.0, math.inf)
            leaves = high > limits.largest or 0 < low < limits.normal
            return op.full_type == "Log" and leaves and not _held(variable)

        _keep(program, flow, constraints, Kind.FED_LOGARITHM, may_leave)


def keep_fed_scores(program: Graph, flow: Flow, ranges: Ranges, dtype: str, constraints: Constraints) -> None:
    """Add to ``constraints`` the standard scores of what is fed that 16 bit would put off by more than :data:`_OFF`
    deviations where it holds the mean, or that is beyond it at :data:`_REACH` of them, what computes what is scored,
    and what is added to that, as a forecast to the state of the air."""
    limits = LIMITS[dtype]

    def is_off(op: Operator, variable: Variable) -> bool:
        return _any_above(_OFF, _mean_and_spread(op, flow), lambda mean, spread: mean / spread * limits.epsilon / 2)

    def leaves(op: Operator, variable: Variable) -> bool:
        if ranges.within(variable, limits.largest):
            return False
        return _any_above(limits.largest, _mean_and_spread(op, flow), lambda mean, spread: mean + _REACH * spread)

    if any(kind in flow.kinds for kind in ("BatchNormalization", "Div", "Mul", "ai.onnx.ml::Scaler")):
        _keep(program, flow, constraints, Kind.FED_SCORE, is_off)
        _keep_sums(flow, _keep(program, flow, constraints, Kind.FED_SCALE, leaves), constraints, Kind.FED_SCALE)


def keep_fed_differences(program: Graph, flow: Flow, constraints: Constraints) -> None:
    """Add to ``constraints`` the differences between elements of inputs, and what moves these. The returns of prices
    are such too: their quotients less 1, and the logarithms."""
    if not {"Sub", "Log"} & flow.kinds.keys():
        return
    elements = {v for v in program.inputs if v.dtype in FLOATS}
    for op, _, read in flow.steps:
        if moves(op) and not op.attrs.programs and all(v in elements for v in read if v is not None):
            elements.update(v for v in op.outputs if v is not None)

    def of_two(op: Operator | None, kind: str) -> bool:
        if op is None or op.full_type != kind:
            return False
        first, second = flow.inputs[op]
        return first in elements and second in elements - {first}

    def is_difference(op: Operator, variable: Variable) -> bool:
        less_one = op.full_type == "Sub" and flow.number(flow.inputs[op][1]) == 1
        return of_two(op, "Sub") or ((less_one or op.full_type == "Log") and of_two(variable.producer, "Div"))

    taken = _keep(program, flow, constraints, Kind.FED_DIFFERENCE, is_difference)
    _keep_sums(flow, taken, constraints, Kind.FED_OWN)


def _mean_and_spread(op: Operator, flow: Flow) -> tuple[Any, Any] | None:
    """The mean and the deviation of which the operator makes standard scores, up to their signs; None where it makes
    something else. A scale and a shift are such where they scale down: shares that become levels are none."""
    read = flow.inputs[op]
    if op.full_type == "BatchNormalization":
        mean, variance = (_numbers(v) for v in read[3:5])
        return None if mean is None or variance is None else (mean, np.sqrt(variance + op.attrs.get("epsilon", 1e-5)))
    if op.full_type == "ai.onnx.ml::Scaler":
        with np.errstate(divide="ignore"):
            return np.asarray(op.attrs.get("offset", 0.0)), 1 / np.asarray(op.attrs.get("scale", 1.0))
    spread, maker = _divisor(op, flow), None if read[0] is None else read[0].producer
    if spread is not None:
        mean = _numbers(flow.inputs[maker][1]) if maker is not None and maker.full_type in ("Sub", "Add") else None
        return (0.0 if mean is None else mean), spread
    if maker is None or op.full_type not in ("Sub", "Add"):
        return None
    shift, spread = _numbers(read[1]), _divisor(maker, flow)
    return None if shift is None or spread is None else (shift * spread * (np.abs(spread) > 1), spread)


def _divisor(op: Operator, flow: Flow) -> Any:
    """What the operator divides its first operand by, where that is known."""
    number = _numbers(flow.inputs[op][1]) if op.full_type in ("Div", "Mul") else None
    if number is None or op.full_type == "Div":
        return number
    with np.errstate(divide="ignore"):
        return 1 / number


def _any_above(limit: float, found: tuple[Any, Any] | None, measure: Callable[[Any, Any], Any]) -> bool:
    """Whether what is measured of a mean and a deviation, where it is finite, is anywhere above the limit."""
    if found is None:
        return False
    with np.errstate(all="ignore"):
        measured = measure(*map(np.abs, found))
    return bool((np.isfinite(measured) & (measured > limit)).any())


def _numbers(variable: Variable | None) -> Any:
    data = None if variable is None else content(variable)
    return None if data is None else as_array(data).astype(np.float64)


def _keep(
    program: Graph, flow: Flow, constraints: Constraints, kind: Kind, taken: Callable[[Operator, Variable], bool]
) -> set[Variable]:
    """Keep the operators of which ``taken`` holds for their operand, where that is given, and what computes it: the
    variables that come back."""
    given, wanted = _given(program, flow), set[Variable]()
    for op, _, read in reversed(flow.steps):
        operand = read[0] if read else None
        found = operand is not None and (operand in given or _held(operand)) and taken(op, operand)
        if found or any(v in wanted and v in given for v in op.outputs if v is not None):
            constraints.keep(op, Reason(kind))
            wanted.update(v for v in read if v is not None)
    return wanted & given


def _keep_sums(flow: Flow, large: set[Variable], constraints: Constraints, kind: Kind) -> None:
    """Keep the sums that one of these variables is a term of, and what moves it."""
    for op, _, read in flow.steps if large else ():
        moved = moves(op) and sum(v is not None for v in read) == 1 and not op.attrs.programs
        if (moved or op.full_type in ("Add", "Sub")) and any(v in large for v in read):
            constraints.keep(op, Reason(kind))
            large.update(v for v in op.outputs if v is not None)


def _is_phase(op: Operator, flow: Flow) -> bool:
    """Whether it tells where in a turn an angle is: its sine, the remainder, or what it has beyond whole turns."""
    if op.full_type == "Sub":
        angle, whole = flow.inputs[op]
        maker = whole.producer if whole is not None else None
        return maker is not None and maker.full_type == "Floor" and flow.inputs[maker][0] is angle
    return traits_of(op).periodic or op.full_type == "Mod"


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
