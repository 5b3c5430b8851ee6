"""The fp32 constraints that are known without running a program: the same for a conversion and for training.

A program that is trained has weights of which only the first values are known. They constrain where
16 bit does not hold them (a parameter beyond the format stays fp32, and so does what reads it), but they prove no
range: what trained weights make is bounded by nothing. Constants, masks, integers held as floats and the structure
stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import FULL
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS, SHORT
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.numerics.comparisons import keep_comparisons, keep_equalities
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed
from amp_transpiler.passes.numerics.fed_angles import keep_angles, keep_fed_logarithms
from amp_transpiler.passes.numerics.fed_differences import keep_fed_differences, keep_fed_scores
from amp_transpiler.passes.numerics.fed_orders import keep_fed_orders, keep_orders
from amp_transpiler.passes.numerics.integer_valued import keep_integer_valued
from amp_transpiler.passes.numerics.masks import Masks
from amp_transpiler.passes.numerics.near_one import keep_near_one
from amp_transpiler.passes.numerics.overflow_rules import apply_overflow_rules
from amp_transpiler.passes.numerics.places import keep_places
from amp_transpiler.passes.numerics.poles import keep_from_poles
from amp_transpiler.passes.numerics.quantised import keep_fake_quantised, keep_quantised
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.numerics.rounding_loss import check_constants
from amp_transpiler.passes.numerics.running_sums import keep_running_sums
from amp_transpiler.passes.pipeline import Context, Pass
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.given import LISTS, LOSS, losses_of
from amp_transpiler.passes.view.names import written_name


def known_constraints(
    program: Graph, dtype: str, ranges: Ranges, progress: Callable[[str], None] = lambda stage: None
) -> Constraints:
    """The constraints of constants, integers, places, patterns and intervals; the program is not changed."""
    constraints, flow = Constraints(), Flow(program)
    masks = Masks(flow, dtype)
    progress("constants")
    check_constants(program, masks, constraints, ranges.extremes)
    keep_from_poles(flow, dtype, constraints)
    keep_near_one(flow, ranges, constraints)
    progress("integers and ranges")
    keep_integer_valued(flow, constraints)
    keep_places(flow, constraints)
    fed = Fed(program, flow)
    keep_angles(fed, ranges, constraints)
    if dtype == "float16":
        keep_fed_logarithms(fed, ranges, constraints)
    keep_fed_scores(fed, ranges, dtype, constraints)
    keep_fed_differences(fed, ranges, dtype, constraints)
    keep_fed_orders(fed, constraints)
    keep_running_sums(flow, constraints)
    keep_comparisons(flow, constraints)
    keep_equalities(flow, dtype, constraints)
    keep_quantised(flow, constraints)
    apply_overflow_rules(program, masks, ranges, constraints)
    keep_orders(flow, constraints)
    return constraints


def training_constraints(program: Graph, dtype: str, like: Graph | None) -> Constraints:
    """What a precision pass for training keeps fp32 beyond its lists.

    Args:
        program: the forward program as it was written, its masks saturated.
        dtype: the 16-bit type.
        like: a training program that was rewritten already. Where ``program`` has an operator of it, the operator
            runs in fp32 here where it does there, so that both read the same stored parameters.
    """
    constraints = known_constraints(program, dtype, Ranges(program, trained=True))
    for variable in constraints.replaced:
        if variable.persistable:  # only constants are brought into the format
            constraints.keep_tensor(variable, Reason(Kind.PARAMETER_MASK, variable.name, (SHORT[dtype],)))
    constraints.replaced.clear()
    keep_fake_quantised(program, constraints)
    return constraints if like is None else _as_in(like, program, constraints)


def keep_losses(losses: Sequence[Variable], lists: AutoMixedPrecisionLists) -> None:
    """Let what makes the losses run in fp32, back to the program's outputs or to operators of the white list.

    A sum over a batch leaves fp16 before the numbers that it sums do.
    """
    ends = set(losses[0].program.outputs) - set(losses)
    pending, seen = [loss.producer for loss in losses], set[Operator]()
    while pending:
        op = pending.pop()
        if op is None or op in seen or op.attrs.programs or op.full_type in lists.white_list:
            continue
        seen.add(op)
        op.metadata.setdefault(FULL, str(Reason(Kind.LOSS)))
        pending += [v.producer for v in op.inputs if v is not None and v not in ends and v.dtype in FLOATS]


def _as_in(other: Graph, program: Graph, constraints: Constraints) -> Constraints:
    """The decisions of ``other`` on what both have, and ``constraints`` on the rest."""
    known = {name: op for op in other.walk() if not op.inserted for name in _names(op)}
    found = Constraints(constants=constraints.constants)
    for op in program.walk():
        there = next((known[name] for name in _names(op) if name in known), None)
        if there is None:
            why = constraints.on(op)
        else:
            full = there.why is not None and there.why.runs == SHORT["float32"]
            why = there.why.running("") if full and there.why is not None else None
        if why is not None:
            found.keep(op, why)
    return found


def _names(op: Operator) -> list[str]:
    """What the operator makes, by the names that the program was written with."""
    return [written_name(v) for v in op.outputs if v is not None]


class KeepLosses(Pass):
    """What makes the losses runs in fp32, back to the program's outputs or to operators of the white list."""

    name = "keep-losses"
    needs = (LOSS,)
    takes = (LISTS,)

    def run(self, graph: Graph, context: Context) -> None:
        keep_losses(losses_of(graph, context), context.get(LISTS) or AutoMixedPrecisionLists())
