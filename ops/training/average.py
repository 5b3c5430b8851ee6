"""Moving averages of weights: ``ExponentialAverage(found_inf, step, a1, w1 … an, wn) -> (step, a1 … an)``.

``a += (1 - d) * (w - a)`` in fp32, where ``w`` is the value that a parameter (its master weight, where it has one)
takes in this step. ``d`` is the attribute ``decay``; where ``step`` (int32, good steps so far) is given, it is
``min(decay, (1 + step) / (10 + step))``, so that an average follows closely at first. A bad step (``found_inf``,
None: nothing is checked) changes nothing.
"""

from __future__ import annotations

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ops.training.scaling import gate

AVERAGE = "ExponentialAverage"


@lowering_rule(
    own(AVERAGE),
    slots=Slots(
        inputs=("found_inf", "step"),
        input_row=("average", "weight"),
        outputs=("step",),
        output_row=("average",),
        gated=True,
    ),
)
def _average(
    e: Emitter, op: Operator, found_inf: Value | None, step: Value | None, *rows: Value | None
) -> list[Value | None]:
    kept = gate(e, found_inf)
    new_step = None if step is None else kept(e.Add(step, e.const(1, "int32"), shape=step.shape), step)
    results: list[Value | None] = [new_step]
    share = _share(e, op.attrs["decay"], step)
    for average, value in zip(rows[::2], rows[1::2], strict=True):
        if average is None or value is None:  # another rank's
            results.append(None)
            continue
        way = e.Sub(e.cast(value, average.dtype), average, shape=average.shape)
        new = e.Add(average, e.Mul(way, e.cast(share, average.dtype), shape=average.shape), shape=average.shape)
        results.append(kept(new, average))
    return results


def _share(e: Emitter, decay: float, step: Value | None) -> Value:
    """``1 - d``, a scalar."""
    least = e.const(1 - decay, "float32")
    if step is None:
        return least
    done = e.cast(e.reshape(step, ()), "float32")
    return e.Max(least, e.Div(e.const(9, "float32"), e.Add(done, e.const(10, "float32"), shape=()), shape=()), shape=())
