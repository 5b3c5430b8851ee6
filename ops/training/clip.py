"""Gradient clipping, in fp32 on unscaled gradients: ``Clip…(g1 … gn) -> (c1 … cn)``.

A gradient that is not finite makes the results useless; found_inf of the finite check, which comes
before, keeps them out of every state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Types
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ops.training.all_reduce import ALL_REDUCE
from amp_transpiler.ops.training.dealt_gradients import rescaled_part
from amp_transpiler.ops.training.exchange import exchanged
from amp_transpiler.ops.training.rows import joined, parts, rows_of
from amp_transpiler.ops.training.scaling import master_type, rescaled, summed_up

GLOBAL_NORM, NORM, VALUE = "ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue"
CLIPS = frozenset({GLOBAL_NORM, NORM, VALUE})
_SLOTS = Slots(input_row=("gradient",), output_row=("gradient",))


def _types(op: Operator) -> Types:
    return [None if g is None else (master_type(g.dtype), g.shape) for g in op.inputs]


def _factor(e: Emitter, squares: Value, limit: float) -> Value:
    """``limit / max(norm, limit)``: 1 while the norm is within the limit."""
    bound = e.like(limit, squares)
    return e.Div(bound, e.Max(e.Sqrt(squares), bound), shape=())


def _square(e: Emitter, op: Operator, number: int, gradient: Value) -> Value:
    """The square of the norm of a gradient, of all ranks' where each has that of its rows (attribute ``dealt``)."""
    square: Value = e.ReduceSumSquare(gradient, keepdims=0, shape=())
    if not op.attrs.get("dealt", ()) or not op.attrs["dealt"][number]:
        return square
    return e.reshape(exchanged(e, ALL_REDUCE, [e.reshape(square, (1,))], op="sum")[0], ())


def _clipped(
    e: Emitter, op: Operator, grads: Sequence[Value], clip: Callable[[list[Value]], list[Value]]
) -> list[Value]:
    """The gradients clipped, those of one buffer together: ``clip`` gets and gives tensors that hold them."""
    groups = rows_of(e, op, len(grads))
    wide = [
        e.cast(joined(e, rows, [grads[i] for i in rows.numbers]), master_type(grads[rows.numbers[0]].dtype))
        for rows in groups
    ]
    results = dict[int, Value]()
    for rows, new in zip(groups, clip(wide), strict=True):
        for number, part in zip(rows.numbers, parts(e, rows, new), strict=True):
            results[number] = part
            rescaled_part(e, grads[number], part, new)
    return [results[number] for number in range(len(grads))]


@lowering_rule(own(GLOBAL_NORM), infer=_types, slots=_SLOTS)
def _by_global_norm(e: Emitter, op: Operator, *grads: Value) -> list[Value]:
    def clip(wide: list[Value]) -> list[Value]:
        first = [rows.numbers[0] for rows in rows_of(e, op, len(grads))]
        squares = [e.cast(_square(e, op, number, g), "float32") for number, g in zip(first, wide, strict=True)]
        factor = _factor(e, summed_up(e, squares), op.attrs["clip_norm"])
        return [rescaled(e, g, factor) for g in wide]

    return _clipped(e, op, grads, clip)


@lowering_rule(own(NORM), infer=_types, slots=_SLOTS)
def _by_norm(e: Emitter, op: Operator, *grads: Value) -> list[Value]:
    wide = [e.cast(g, master_type(g.dtype)) for g in grads]
    return [
        e.Mul(g, _factor(e, _square(e, op, number, g), op.attrs["clip_norm"]), shape=g.shape)
        for number, g in enumerate(wide)
    ]


@lowering_rule(own(VALUE), infer=_types, slots=_SLOTS)
def _by_value(e: Emitter, op: Operator, *grads: Value) -> list[Value]:
    def clip(wide: list[Value]) -> list[Value]:
        low, high = op.attrs["min"], op.attrs["max"]
        return [e.Min(e.Max(g, e.like(low, g)), e.like(high, g), shape=g.shape) for g in wide]

    return _clipped(e, op, grads, clip)
