"""What is known against 16 bit in a program without running it: the same for a conversion and for training.

A program that is trained has weights of which only the first values are known. They speak against 16 bit where
they do not survive in it (a parameter beyond the format stays fp32, and so does what reads it), but they prove no
range: what trained weights make is bounded by nothing. Constants, masks, positions and the structure stay what
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import FULL, inserted
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS, SHORT
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.numerics.constraints import Evidence
from amp_transpiler.passes.numerics.integer_valued import keep_positions
from amp_transpiler.passes.numerics.overflow_rules import guard_numerics
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.numerics.rounding_loss import check_constants
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import written_name
from amp_transpiler.passes.view.typing import operator_name


def known_evidence(
    program: Graph, dtype: str, ranges: Ranges, progress: Callable[[str], None] = lambda stage: None
) -> Evidence:
    """What constants, positions, patterns and intervals say against ``dtype``; the program is not changed."""
    evidence, flow = Evidence(), Flow(program)
    progress("constants")
    check_constants(program, dtype, evidence, flow)
    progress("positions and ranges")
    keep_positions(program, evidence)
    guard_numerics(program, dtype, ranges, evidence, flow)
    return evidence


def training_evidence(program: Graph, dtype: str, like: Graph | None = None) -> Evidence:
    """What a precision pass for training keeps fp32 beyond its lists.

    Args:
        program: the forward program as it was written, its masks saturated.
        dtype: the 16-bit type.
        like: a training program that was rewritten already. Where ``program`` has an operator of it, the operator
            runs in fp32 here where it does there, so that both read the same stored parameters.
    """
    evidence = known_evidence(program, dtype, Ranges(program, trained=True))
    for variable in evidence.replaced:
        if variable.persistable:  # only constants are brought into the format
            evidence.keep_tensor(variable, Reason(Kind.PARAMETER_MASK, variable.name, (SHORT[dtype],)))
    evidence.replaced.clear()
    return evidence if like is None else _as_in(like, program, evidence)


def keep_losses(losses: Sequence[Variable], lists: AutoMixedPrecisionLists) -> None:
    """Let what makes the losses run in fp32, back to the program's outputs or to operators of the white list.

    A sum over a batch leaves fp16 before the numbers that it sums do.
    """
    ends = set(losses[0].program.outputs) - set(losses)
    pending, seen = [loss.producer for loss in losses], set[Operator]()
    while pending:
        op = pending.pop()
        if op is None or op in seen or op.attrs.programs or operator_name(op) in lists.white_list:
            continue
        seen.add(op)
        op.metadata.setdefault(FULL, str(Reason(Kind.LOSS)))
        pending += [v.producer for v in op.inputs if v is not None and v not in ends and v.dtype in FLOATS]


def _as_in(other: Graph, program: Graph, evidence: Evidence) -> Evidence:
    """The decisions of ``other`` on what both have, and ``evidence`` on the rest."""
    known = {name: op for op in other.walk() if not inserted(op) for name in _names(op)}
    found = Evidence(constants=evidence.constants)
    for op in program.walk():
        there = next((known[name] for name in _names(op) if name in known), None)
        if there is None:
            why = evidence.against(op)
        else:
            full = there.why is not None and there.why.runs == SHORT["float32"]
            why = there.why.running("") if full and there.why is not None else None
        if why is not None:
            found.keep(op, why)
    return found


def _names(op: Operator) -> list[str]:
    """What the operator makes, by the names that the program was written with."""
    return [written_name(v) for v in op.outputs if v is not None]
