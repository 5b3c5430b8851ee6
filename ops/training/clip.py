"""Gradient clipping, in fp32 on unscaled gradients: ``Clip…(g1 … gn) -> (c1 … cn)``.

A gradient that is not finite makes the results useless; found_inf of the finite check, which comes
before, keeps them out of every state.
"""

from __future__ import annotations

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import Slots, lowering_rule, own
from amp_transpiler.ops.training.scaling import Types, master_type

GLOBAL_NORM, NORM, VALUE = "ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue"
CLIPS = frozenset({GLOBAL_NORM, NORM, VALUE})
_SLOTS = Slots(input_row=("gradient",), output_row=("gradient",))


def _types(op: Operator) -> Types:
    return [None if g is None else (master_type(g.dtype), g.shape) for g in op.inputs]


def _wide(e: Emitter, grads: tuple[Value, ...]) -> list[Value]:
    return [e.cast(g, master_type(g.dtype)) for g in grads]


def _factor(e: Emitter, squares: Value, limit: float) -> Value:
    """``limit / max(norm, limit)``: 1 while the norm is within the limit."""
    bound = e.like(limit, squares)
    return e.Div(bound, e.Max(e.Sqrt(squares), bound), shape=())


@lowering_rule(own(GLOBAL_NORM), infer=_types, slots=_SLOTS)
def _by_global_norm(e: Emitter, op: Operator, *grads: Value) -> list[Value]:
    wide = _wide(e, grads)
    squares = [e.cast(e.ReduceSumSquare(g, keepdims=0, shape=()), "float32") for g in wide]
    factor = _factor(e, squares[0] if len(squares) == 1 else e.op("Sum", *squares, shape=()), op.attrs["clip_norm"])
    return [e.Mul(g, e.cast(factor, g.dtype), shape=g.shape) for g in wide]


@lowering_rule(own(NORM), infer=_types, slots=_SLOTS)
def _by_norm(e: Emitter, op: Operator, *grads: Value) -> list[Value]:
    wide = _wide(e, grads)
    return [
        e.Mul(g, _factor(e, e.ReduceSumSquare(g, keepdims=0, shape=()), op.attrs["clip_norm"]), shape=g.shape)
        for g in wide
    ]


@lowering_rule(own(VALUE), infer=_types, slots=_SLOTS)
def _by_value(e: Emitter, op: Operator, *grads: Value) -> list[Value]:
    return [
        e.Min(e.Max(g, e.like(op.attrs["min"], g)), e.like(op.attrs["max"], g), shape=g.shape) for g in _wide(e, grads)
    ]


__all__ = ["CLIPS", "GLOBAL_NORM", "NORM", "VALUE"]
