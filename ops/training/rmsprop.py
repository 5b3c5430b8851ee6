"""RMSProp (Hinton, 2012): steps divided by the root of a running mean of squares, or of a running variance."""

from __future__ import annotations

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ops.training.scaling import Switch, blended
from amp_transpiler.ops.training.update import decayed, shifted, update_rule
from amp_transpiler.ops.training.update_nodes import Gradient, Step


@update_rule("RMSProp", accumulators=("mean_square",), by_row=False)
@update_rule("RMSPropMomentum", accumulators=("mean_square", "momentum"), by_row=False)
@update_rule("CenteredRMSProp", accumulators=("mean_square", "mean_grad"), by_row=False)
@update_rule("CenteredRMSPropMomentum", accumulators=("mean_square", "mean_grad", "momentum"), by_row=False)
def _rmsprop(e: Emitter, op: Operator, switch: Switch, lr: Value) -> tuple[list[Value], Step]:
    """Without centring there is no mean of gradients, and without momentum the step is not kept."""
    rho, mu = op.attrs["rho"], op.attrs["mu"]

    def step(index: int, p: Value, g: Gradient, square: Value, *others: Value) -> tuple[Value, ...]:
        g, rate = g.changed(decayed(e, op, index, g.value, p)), e.cast(lr, p.dtype)
        square = blended(e, switch, square, rho, e.Mul(g.tensor, g.tensor), g.share(e.like(1 - rho, square), 2))
        spread, kept, left = square, [square], list(others)
        if op.type.startswith("Centered"):
            mean = left.pop(0)
            mean = blended(e, switch, mean, rho, g.tensor, g.share(e.like(1 - rho, mean)))
            spread = e.Max(e.Sub(square, e.Mul(mean, mean)), e.like(0, square))  # rounded, it may be below 0
            kept.append(mean)
        way = e.Div(g.value, e.Sqrt(e.Add(spread, e.like(op.attrs["epsilon"], spread))))
        if not left:
            return (shifted(e, switch, p, way, e.Neg(rate)), *kept)
        moved = shifted(e, switch, e.Mul(left[0], switch.keep(e.like(mu, p))), way, rate)
        return (shifted(e, switch, p, moved, e.like(-1, p)), *kept, moved)

    return [], step
