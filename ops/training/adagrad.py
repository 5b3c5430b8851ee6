"""Adagrad (Duchi et al., 2011), with an accumulator for each element, or for each row of a parameter."""

from __future__ import annotations

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ops.training.scaling import Switch, add_product
from amp_transpiler.ops.training.update import decayed, shifted, update_rule
from amp_transpiler.ops.training.update_nodes import Gradient, Step


@update_rule("Adagrad", accumulators=("moment",))
def _adagrad(e: Emitter, op: Operator, switch: Switch, lr: Value) -> tuple[list[Value], Step]:
    def step(index: int, p: Value, g: Gradient, moment: Value) -> tuple[Value, ...]:
        g = g.changed(decayed(e, op, index, g.value, p))
        return _adapted(e, op, switch, lr, p, g, moment, e.Mul(g.tensor, g.tensor))

    return [], step


@update_rule("RowWiseAdagrad", accumulators=("moment",))
def _row_wise_adagrad(e: Emitter, op: Operator, switch: Switch, lr: Value) -> tuple[list[Value], Step]:
    """The accumulator of a row is that of the mean of the squares; a vector's elements are its rows."""

    def step(index: int, p: Value, g: Gradient, moment: Value) -> tuple[Value, ...]:
        g = g.changed(decayed(e, op, index, g.value, p))
        square, axes = e.Mul(g.tensor, g.tensor), range(1, len(p.shape or ()))
        if axes:
            square = e.op("ReduceMean", square, e.ints(*axes), keepdims=1, shape=moment.shape)
        return _adapted(e, op, switch, lr, p, g, moment, square)

    return [], step


def _adapted(
    e: Emitter, op: Operator, switch: Switch, lr: Value, p: Value, g: Gradient, moment: Value, square: Value
) -> tuple[Value, Value]:
    """The parameter and the accumulator, to which the square of ``g.tensor`` was added."""
    moment = add_product(e, moment, square, g.share(e.like(1, moment), 2))
    bottom = e.Add(e.Sqrt(moment, shape=moment.shape), e.like(op.attrs["epsilon"], moment), shape=moment.shape)
    return shifted(e, switch, p, e.Div(g.value, bottom, shape=p.shape), e.Neg(e.cast(lr, p.dtype))), moment
