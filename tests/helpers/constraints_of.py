"""Constraints gathered from a program, and the program converted with it and run as 16-bit hardware would."""

from __future__ import annotations

import math

import numpy as np

import amp_transpiler as amp
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.extremes import extremes
from amp_transpiler.passes.numerics.masks import Masks
from amp_transpiler.passes.numerics.overflow_rules import apply_overflow_rules
from amp_transpiler.passes.numerics.rounding_loss import check_constants
from amp_transpiler.passes.partition.assign_precision import assign
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.program import Program
from tests.helpers.sessions import session


class Bounds:
    """Intervals by name, as a range analysis would give them."""

    def __init__(self, **intervals: tuple[float, float]) -> None:
        self.intervals = intervals

    def bound(self, variable: Variable) -> tuple[float, float] | None:
        return self.intervals.get(variable.name)

    def within(self, variable: Variable, limit: float) -> bool:
        low, high = self.intervals.get(variable.name, (-math.inf, math.inf))
        return -limit <= low and high <= limit


def without_parameters(p: Program) -> Program:
    """Nobody trains it: its parameters are constants."""
    become_constants(p)
    return p


def gather(
    p: Program, dtype: str = "float16", /, *, guards: bool = True, **intervals: tuple[float, float]
) -> Constraints:
    """All that speaks against 16 bit in a program."""
    constraints, masks = Constraints(), Masks(Flow(p), dtype)
    check_constants(p, masks, constraints, extremes(p))
    if guards:
        apply_overflow_rules(p, masks, Bounds(**intervals), constraints)
    return constraints


def of_constants(p: Program, dtype: str = "float16") -> Constraints:
    """The constraints of constants alone."""
    return gather(without_parameters(p), dtype, guards=False)


def kept(p: Program, constraints: Constraints) -> dict[str, str]:
    """Why operators stay fp32, by what they make."""
    return {
        op.outputs[0].name: str(constraints.on(op)) for op in p.walk() if constraints.on(op) and op.type != "Constant"
    }


def convert(p: Program, constraints: Constraints, dtype: str = "float16") -> Program:
    """The program in 16 bit where the constraints let it."""
    assign(p, AutoMixedPrecisionLists(dtype=dtype), "pure", constraints)
    p.verify()
    return p


def run_faithful(p: Program, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs, with every 16-bit tensor rounded as it is stored."""
    running = session(p.lower(amp.CPUPlace()).model)
    given = {name: value for name, value in feeds.items() if name in {i.name for i in running.get_inputs()}}
    return running.run(None, given)
