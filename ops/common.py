"""What the gradient rules share."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.errors import GradientError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator

#: What a gradient rule returns: one value per forward input, None where there is no gradient.
Grads = Sequence[Value | None]


def summed(e: Emitter, value: Value, source: Value, index: int) -> Value:
    """``value``, of the shape of ``source``, summed (in fp32) to the shape of forward input ``index``."""
    assert source.shape is not None
    return e.sum_to(value, shape_of(e, index), source.shape)


def shape_of(e: Emitter, index: int) -> tuple[int, ...]:
    """The shape of forward input ``index``, whose gradient is wanted."""
    shape = e.output_shapes[index]
    assert shape is not None
    return shape


def size_of(value: Value) -> tuple[int, ...]:
    """The shape of a rule's input."""
    assert value.shape is not None
    return value.shape


def integers(e: Emitter, op: Operator, slot: int, what: str) -> list[int] | None:
    """The integers in input ``slot`` of a gradient operator, None where it is left out.

    GradientError where they are not known before the run.
    """
    variable = op.input(slot)
    if variable is None:
        return None
    known = e.known(variable)
    if known is None:
        raise GradientError(
            f"'{op.label}' needs the {what} ('{variable.name}') before the run, but they are computed in it. "
            "Make them constant, or take the operator off the training path"
        )
    return [int(number) for number in known.reshape(-1)]
