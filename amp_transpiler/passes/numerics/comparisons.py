"""Elements of one tensor that are compared with each other, as each with the largest around it.

They are the same number or they are not, unless one of them was rounded on its way and the other was not: by a cast
that precision decides on, or because onnxruntime leaves out on the CPU a rounding that stands in the file. So the
comparison, and what chooses from the tensor on one side alone, stays fp32.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import written_name


def keep_comparisons(flow: Flow, constraints: Constraints) -> None:
    """Add to ``constraints`` what compares elements of one tensor, and what chooses them from it.

    What an earlier conversion did to the program makes no difference.
    """
    for op, _, read in flow.steps if any(kind.compares for kind in flow.kinds.values()) else ():
        if not traits_of(op).compares or len(read) != 2:
            continue
        left, right = (_chosen_from(variable, flow) for variable in read)
        same, apart = left.keys() & right.keys(), left.keys() ^ right.keys()
        if same and apart:
            why = Reason(Kind.COMPARES, written_name(next(v for v in left if v in same)))
            constraints.keep(op, why)
            for variable, maker in (left | right).items():
                if maker is not None and variable in apart:
                    constraints.keep(maker, why)


def _chosen_from(variable: Variable | None, flow: Flow) -> dict[Variable, Operator | None]:
    """The tensors of which it holds elements, the nearest first, each with what chose them from another."""
    found: dict[Variable, Operator | None] = {}
    pending = [variable]
    for each in pending:
        if each is None or each in found or is_constant(each):
            continue
        maker = found[each] = each.producer if each.producer is not None and traits_of(each.producer).exact else None
        pending += flow.inputs[maker] if maker is not None else ()
    return found
