"""Elements of one tensor that are compared with each other, as each with the largest around it.

They are the same number or they are not, unless one of them was rounded on its way and the other was not: by a cast
that precision decides on, or because onnxruntime leaves out on the CPU a rounding that stands in the file. So the
comparison, and what chooses from the tensor on one side alone, stays fp32.

So does what asks whether elements are a number that 16 bit does not hold, as the 4001st of many kinds or -9999 for what
is missing: 4001 and 4000 are one in float16, and where onnxruntime leaves out the rounding of the elements alone, none
is -9999 any more.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import LIMITS, SHORT, numpy_dtype
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.constants import constant_content, is_constant
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import written_name


def keep_comparisons(flow: Flow, constraints: Constraints) -> None:
    """Add to ``constraints`` what compares elements of one tensor, and what chooses them from it.

    What an earlier conversion did to the program makes no difference.
    """
    for op, _, read in flow.of(having=lambda kind: kind.compares):
        if len(read) != 2:
            continue
        left, right = (_chosen_from(variable, flow) for variable in read)
        same, apart = left.keys() & right.keys(), left.keys() ^ right.keys()
        if same and apart:
            why = Reason(Kind.COMPARES, written_name(next(v for v in left if v in same)))
            constraints.keep(op, why)
            for variable, maker in (left | right).items():
                if maker is not None and variable in apart:
                    constraints.keep(maker, why)


def keep_equalities(flow: Flow, dtype: str, constraints: Constraints) -> None:
    """Add to ``constraints`` what asks whether elements are a number that ``dtype`` rounds, and what chooses them."""
    for op, _, read in flow.of("Equal"):
        for number, asked in (read, read[::-1]):
            if number is None or not _is_rounded(number, dtype):
                continue
            why = Reason(Kind.EQUALS, written_name(number), (SHORT[dtype],))
            constraints.keep(op, why)
            for maker in _chosen_from(asked, flow).values():
                if maker is not None:
                    constraints.keep(maker, why)


def _is_rounded(variable: Variable, dtype: str) -> bool:
    """Whether a constant has numbers within the range of ``dtype`` that it does not hold."""
    data = constant_content(variable)
    if data is None:
        return False
    numbers, limits = as_array(data).astype(np.float64), LIMITS[dtype]
    numbers = numbers[(np.abs(numbers) >= limits.normal) & (np.abs(numbers) <= limits.largest)]
    return bool((numbers != numbers.astype(numpy_dtype(dtype)).astype(np.float64)).any())


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
