"""What may leave a format on the way to a tanh that is 1 before it does.

The approximated GELU takes the tanh of ``0.8 x + 0.036 x³``. The cube leaves float16 from 41 on, and is infinite then;
the tanh is 1 from 6 on, of infinity too. So it is with any polynomial whose coefficients are positive and whose powers
are odd: what is infinite has the sign of x, and nothing of the other sign is added to it. What it is made of is neither
too large nor too small where the tanh has a slope.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.polynomials import Polynomial, polynomial, polynomials
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import source

#: The tanh of this is 1 in float32.
_ONE = 10.0
#: What is less than this there has its digits below those of the format where they count.
_LEAST = 2.0**-4


def saturated(flow: Flow, limit: float) -> frozenset[Variable]:
    """Tensors between x and ``tanh(polynomial(x))`` that lie within ``limit`` wherever the tanh is not 1 or -1.

    Nothing else reads them.
    """
    found: set[Variable] = set()
    for op, _, (end,) in flow.of("Tanh"):
        for x, taken in polynomials(end):
            if max(taken, default=0) > 1 and end is not None:
                found |= _between(flow, op, end, x, taken, limit)
    return frozenset(found)


def _between(flow: Flow, tanh: Operator, end: Variable, x: Variable, taken: Polynomial, limit: float) -> set[Variable]:
    if not all(power % 2 and coefficient > 0 for power, coefficient in taken.items()):
        return set()
    reach = min((_ONE / coefficient) ** (1 / power) for power, coefficient in taken.items())
    found, pending = set[Variable](), [end]
    while pending:
        variable = pending.pop()
        part = None if variable is x or variable in found else polynomial(variable, x)
        if part is None or not part.keys() - {0, 1}:
            continue
        largest = sum(coefficient * reach**power for power, coefficient in part.items())
        if variable in flow.fetched or variable in flow.results or min(part.values()) <= 0:
            return set()
        if not _LEAST <= largest <= limit:
            return set()
        found.add(variable)
        pending += [source(v) for v in variable.producer.inputs if v is not None] if variable.producer else []
    readers = {op for variable in found for op, _ in flow.uses[variable]}
    return found if all(op is tanh or op.output(0) in found for op in readers) else set()
