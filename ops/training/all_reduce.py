"""Gradients of several ranks: ``AllReduce(g1 … gn) -> (r1 … rn)``, their means over the ranks.

``precision`` is the element type in which they travel: they are cast to it before, and back behind. In a lowered model
each is one node of this package's domain, at which the model is cut into sessions (``passes/lowering/exchanges.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import OWN, Operator
from amp_transpiler.ir.opdef import Slots, lowering_rule, own
from amp_transpiler.ops.training.branches import as_tensor, emulating

ALL_REDUCE = "AllReduce"


@lowering_rule(own(ALL_REDUCE), native=True, slots=Slots(input_row=("gradient",), output_row=("gradient",)))
def all_reduce(e: Emitter, op: Operator, *grads: Value) -> Sequence[Value]:
    """What travels is a tensor of the type itself, also where 16 bit is emulated."""
    precision = str(op.attrs["precision"])
    reduced = []
    for grad in grads:
        sent = e.cast(grad, precision)
        held = as_tensor(e, sent)
        with e.emulation(False):
            real = e.cast(held, precision)
            made = e.op(ALL_REDUCE, real, domain=OWN, dtype=real.dtype, shape=grad.shape)
        reduced.append(e.cast(emulating(e, made, sent), grad.dtype))
    return reduced
