"""Small numbers to which a model adds 1 on the way to a logarithm, or that are left of an exponential less 1.

``log(1 + x)`` is x where x is small, and of an x of 0.001 the sum keeps one digit in float16. So exporters write log1p
and expm1, of which torch's own 16-bit kernels keep all digits. What adds and the logarithm, or the exponential and what
subtracts, run in fp32.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import label

#: Numbers of this size lose a digit of two at most beside 1.
_LARGE = 0.5


def keep_near_one(flow: Flow, ranges: Ranges, constraints: Constraints) -> None:
    """Add to ``constraints`` the two operators of log(1 + x), log(1 - x), exp(x) - 1 and 1 - exp(x), unless x is proved
    to be no small number."""
    for op, name, read in flow.of("Add", "Sub") if flow.of("Log", "Exp") else ():
        for slot in (0, 1):
            x, number = read[slot], flow.number(read[1 - slot])
            if x is None or number is None or abs(number) != 1:
                continue
            sign = -1 if name == "Sub" and slot == 1 else 1
            number = -number if name == "Sub" and slot == 0 else number
            power = x.producer if x.producer is not None and x.producer.full_type == "Exp" else None
            if power is not None and number == -sign:
                _keep(power, op, flow.inputs[power][0], ranges, constraints)
            made = op.output(0)
            for reader in flow.readers([made]) if made is not None and number == 1 else ():
                if reader.full_type == "Log":
                    _keep(op, reader, x, ranges, constraints)


def _keep(first: Operator, last: Operator, x: Variable | None, ranges: Ranges, constraints: Constraints) -> None:
    low, high = ranges.bound(x) or (0.0, 0.0)
    if low < _LARGE and high > -_LARGE:
        for op in (first, last):
            if constraints.on(op) is None:  # what is known of a pole says more
                constraints.keep(op, Reason(Kind.NEAR_ONE, label(last)))
