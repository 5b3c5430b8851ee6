"""Det: the determinant of each matrix of a batch, which exporters write for ``logdet`` too.

Its gradient is the determinant times the transposed inverse (Jacobi's formula), by onnxruntime's own operator: a matrix
that has none makes it NaN, a bad step.
"""

from __future__ import annotations

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ops.common import Grads, exchanged, size_of


@gradient("Det", "x0 y0 dy0")
def det(e: Emitter, op: Operator, x: Value, y: Value, dy: Value) -> Grads:
    batch = size_of(x)[:-2]
    inverse = e.op("Inverse", x, domain=DOMAIN, shape=size_of(x))
    turned = exchanged(e, inverse)
    return [e.Mul(e.reshape(e.Mul(dy, y), (*batch, 1, 1)), turned)]


traits("Det", overflows=Kind.MULTIPLIES)
