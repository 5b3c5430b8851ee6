"""FP32 constraints: which operators and tensors of a program must not be 16 bit, by rules and by measurements.

Operators and tensors are those of the program as it was written (:func:`~.names.source`): inserted casts
and the variables of nested graphs that stand for outer ones never appear here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Reason
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.view.names import source


@dataclass(frozen=True)
class ConstantNote:
    """A constant of which 16 bit does not hold some values, and what was done about it.

    ``problem`` is "overflow" or "underflow", ``count`` how many of ``size`` elements it befalls, ``worst`` the
    value furthest outside, ``action`` what happens to it, in words.
    """

    name: str
    problem: str
    count: int
    size: int
    worst: float
    action: str


@dataclass
class Constraints:
    """Reasons, by operator and by tensor.

    ``operators``: these run in fp32. ``tensors``: these are not stored in 16 bit, so that the operator that
    makes them and those that read them run in fp32. ``replaced``: constants that take this value instead
    (a mask saturated to the format's minimum). ``constants``: what befell constants, for the report. ``magnitudes``:
    the largest of the numbers of each constant that was looked through and has nothing but finite ones.
    """

    operators: dict[Operator, Reason] = field(default_factory=dict)
    tensors: dict[Variable, Reason] = field(default_factory=dict)
    replaced: dict[Variable, float] = field(default_factory=dict)
    constants: list[ConstantNote] = field(default_factory=list)
    magnitudes: dict[Variable, float] = field(default_factory=dict, compare=False)

    def keep(self, op: Operator, why: Reason) -> None:
        """Let the operator run in fp32; the first reason stands."""
        self.operators.setdefault(op, why)

    def keep_tensor(self, variable: Variable, why: Reason) -> None:
        """Never store the tensor in 16 bit; the first reason stands."""
        self.tensors.setdefault(source(variable), why)

    def on(self, op: Operator, lists: AutoMixedPrecisionLists | None = None) -> Reason | None:
        """Why the operator runs in fp32; None where nothing constrains it.

        ``lists``: what their custom white list names is the caller's business, and is free.
        """
        if lists is not None and op.full_type in lists.custom_white_list:
            return None
        if op in self.operators:
            return self.operators[op]
        for variable in (*op.outputs, *op.inputs) if self.tensors else ():
            why = None if variable is None else self.tensors.get(source(variable))
            if why is not None:
                return why
        return None
