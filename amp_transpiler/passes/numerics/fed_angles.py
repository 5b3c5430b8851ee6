"""Angles of positions and times: 16 bit holds one of 1000 to half a radian, and its sine may then be any number.

So what computes the operands of sines and cosines is kept where these are given (:attr:`.Fed.given`): prompts, time
steps, rotary positions, Fourier features. The sine of what is proved to be no more than half a turn may be 16 bit.
Remainders are phases too: the hour of the day, of hours that were counted.

Likewise logarithms and roots, which are taken of what is of any size: counts, incomes, energies. float16 ends at 65504
and 6e-8.
"""

from __future__ import annotations

import math

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed, held
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.view.flow import Flow


def keep_angles(fed: Fed, ranges: Ranges, constraints: Constraints) -> None:
    """Add to ``constraints`` the sines, cosines and remainders of such angles, and what computes the angles."""

    def is_angle(op: Operator, variable: Variable) -> bool:
        return _is_phase(op, fed.flow) and not ranges.within(variable, math.pi)

    steps = fed.flow.of("Mod", "Sub", having=lambda kind: kind.periodic)
    fed.keep(constraints, Kind.ANGLE, fed.given, steps, is_angle)


def keep_fed_logarithms(fed: Fed, ranges: Ranges, constraints: Constraints) -> None:
    """Add to ``constraints`` the logarithms and roots of what is fed and may leave float16, and what computes their
    operands."""
    limits = LIMITS["float16"]

    def may_leave(op: Operator, variable: Variable) -> bool:
        if held(variable) or (op.full_type == "Pow" and not 0 < (fed.flow.number(op.input(1)) or 0) < 1):
            return False
        low, high = ranges.bound(variable) or (0.0, math.inf)
        return high > limits.largest or 0 < low < limits.normal

    steps = fed.flow.of("Pow", having=lambda kind: kind.shortens)
    fed.keep(constraints, Kind.FED_LOGARITHM, fed.given, steps, may_leave)


def _is_phase(op: Operator, flow: Flow) -> bool:
    """Whether it tells where in a turn an angle is: its sine, the remainder, or what it has beyond whole turns."""
    if op.full_type != "Sub":
        return True
    angle, whole = flow.inputs[op]
    maker = whole.producer if whole is not None else None
    return maker is not None and maker.full_type == "Floor" and flow.inputs[maker][0] is angle
