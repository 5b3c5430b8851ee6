"""Operators that keep a recomputed part of the forward pass apart from the first computation, and late.

onnxruntime merges equal subexpressions, and would merge a recomputed activation with the original. So what a
recomputed segment reads goes through ``RecomputeInput``, which adds a negative zero: no bit of any number changes
(x + -0.0 is x for every x, +0.0, infinities and NaN included). The zero is made by ``RecomputeToken`` from the
gradient that reaches the segment, whatever its value is, so that nothing of the segment runs before it is there.
"""

from __future__ import annotations

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Types
from amp_transpiler.ir.opdef import lowering_rule, own, traits
from amp_transpiler.ops.common import multiple, once, times
from amp_transpiler.ops.training.random import masked

TOKEN, INPUT, DROPOUT = "RecomputeToken", "RecomputeInput", "RecomputedDropout"


@lowering_rule(own(TOKEN), native=True, infer=lambda op: [("float32", ())])
def token(e: Emitter, op: Operator, gradient: Value) -> list[Value]:
    """-0.0 as an fp32 scalar that depends on ``gradient``: no number, NaN included, is less than itself."""
    some = e.f32(e.op("Slice", e.reshape(gradient, [-1]), e.ints(0), e.ints(1)))  # none of an empty batch
    first = e.ReduceSum(some, e.ints(0), keepdims=0, shape=())
    never = e.cast(e.Less(first, first), "float32")
    return [e.Mul(never, e.like(-1, never))]


def _like_input(op: Operator) -> Types:
    source = op.input(1)
    assert source is not None
    return [(source.dtype, source.shape)]


@lowering_rule(own(INPUT), native=True, infer=_like_input)
def recompute_input(e: Emitter, op: Operator, zero: Value, x: Value) -> list[Value]:
    """``x``, bit for bit; a multiple is one still, or its readers would round otherwise."""
    if x.dtype == "bool":
        return [e.Or(x, e.cast(zero, "bool"), shape=x.shape)]
    base, factor = multiple(e, x)
    late = e.Add(base, e.cast(zero, x.dtype), shape=x.shape)
    return [late if factor == 1 else times(e, late, factor)]


traits(own(INPUT), exact=True)


def _dropout_types(op: Operator) -> Types:
    source = op.input(1)
    assert source is not None
    types: Types = [(source.dtype, source.shape), ("bool", source.shape)]
    return types[: len(op.outputs)]


@lowering_rule(own(DROPOUT), native=True, infer=_dropout_types)
def recomputed_dropout(
    e: Emitter, op: Operator, zero: Value, x: Value, ratio: Value | None, mode: Value | None = None
) -> list[Value]:
    """Dropout with the same mask, made again from the words of this step when the token is there."""
    late = once(e, f"late {zero.name}", lambda: e.cast(zero, "uint32"))
    return masked(e, op, 2, x, ratio, late)
