"""Running sums of which differences or phases are taken: both are small beside the sum, and 16 bit keeps no more of it.

A difference of two places of a running sum is what lies between them, as decays of linear attention have it; the sine
or the remainder of one is the phase of an oscillator, after many turns. The sum stays fp32 up to there, and for a phase
so does the arithmetic that makes its terms, the error of which it adds up. One that is read as it is, or whose
exponential is taken, may be 16 bit.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import label

#: What scales and shifts a sum, or counts its turns.
_LINEAR = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Floor"})


def keep_running_sums(flow: Flow, constraints: Constraints) -> None:
    """Add to ``constraints`` such sums, what tells their differences or phases, and what lies between.

    What an earlier conversion did to the program makes no difference. Linear in its size.
    """
    if "CumSum" not in flow.kinds:
        return
    sums = dict[Variable, Operator]()  # what is left of a sum after numbers and moves
    tells, phases, turns = dict[Operator, Reason](), set[Operator](), set[Variable]()
    for op, name, read in flow.steps:
        of = [sums[v] for v in read if v is not None and v in sums]
        periodic = bool(of) and (name == "Mod" or traits_of(op).periodic)
        if periodic or (name == "Sub" and len(of) == 2 and of[0] is of[1]):
            tells[op] = Reason(Kind.RUNNING_SUM, label(op))
            phases.update([op] if periodic or not turns.isdisjoint(read) else [])
        numbers = all(v is None or v in sums or is_constant(v) for v in read)
        if name == "CumSum" or (len(of) == 1 and (moves(op) or (name in _LINEAR and numbers))):
            made = [v for v in op.outputs if v is not None]
            sums.update((v, op if name == "CumSum" else of[0]) for v in made)
            turns.update(made if name == "Floor" or not turns.isdisjoint(read) else [])
    wanted, terms = dict[Variable, Reason](), set[Variable]()
    for op, _, read in reversed(flow.steps) if tells else ():
        why = tells.get(op) or next((wanted[v] for v in op.outputs if v is not None and v in wanted), None)
        if why is None:
            continue
        constraints.keep(op, why)
        phase = op in phases or any(v in terms for v in op.outputs if v is not None)
        for variable in read:
            made_by = variable.producer if variable is not None else None
            computed = made_by is not None and (moves(made_by) or traits_of(made_by).elementwise)
            if variable is not None and (variable in sums or (phase and computed)):
                wanted[variable] = why
                terms.update([variable] if phase else [])
