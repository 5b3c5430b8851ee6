"""Which operators work by channel: on tensors that lie in rows, one for each channel (ops/channel_rows.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import differentiated, lookup, traits_named, traits_of
from amp_transpiler.ir.rule_errors import rule_of
from amp_transpiler.ops.channel_rows import exchanged, lies_in_rows, restored
from amp_transpiler.ops.common import size_of

Size = tuple[int, ...]


def exchange(
    e: Emitter, op: Operator, inputs: Sequence[Value | None], made: Sequence[Size | None]
) -> tuple[list[Value | None], list[Size | None]] | None:
    """An operator's inputs, and the shapes of its outputs, with batch and channels exchanged; None where it has no use.

    It has where the operator treats both axes alike and one of the inputs lies in rows.
    """
    found = next((v for v in inputs if lies_in_rows(e, v)), None)
    if found is None or found.shape is None or not _treats_axes_alike(op):
        return None
    rank, batch, channels = len(found.shape), *found.shape[:2]
    single = [v is None or v.shape is None or math.prod(v.shape) == 1 for v in inputs]
    sizes = [v.shape for v in inputs if v is not None]
    for size in (*sizes, *(shape for shape in made if shape is not None)):
        whole = None if size is None else _broadcast(size, rank)
        if whole is None or len(whole) > rank or whole[0] not in (1, batch) or whole[1] not in (1, channels):
            return None
    turned = [
        v if number or v is None else exchanged(e, e.reshape(v, _broadcast(size_of(v), rank)))
        for v, number in zip(inputs, single, strict=True)
    ]
    return turned, [None if shape is None else _turned(_broadcast(shape, rank)) for shape in made]


def _broadcast(size: Size, rank: int) -> Size:
    """A shape in this rank, as broadcasting takes it."""
    return (*[1] * (rank - len(size)), *size)


def _turned(size: Size) -> Size:
    return (size[1], size[0], *size[2:])


def as_image(e: Emitter, made: Value, shape: Size | None) -> Value:
    """What an operator made of exchanged inputs, in the shape that it has otherwise."""
    image = restored(e, made)
    return image if shape is None else e.reshape(image, shape)


def _treats_axes_alike(op: Operator) -> bool:
    kind = differentiated(op)
    facts = traits_of(op) if kind is None else traits_named(kind)
    return facts.elementwise or facts.over == "spatial"


def by_channel(e: Emitter, op: Operator, inputs: Sequence[Value | None], shape: Size | None) -> Value | None:
    """What a standard operator makes by channel: one tensor of this shape. None where it does not work so."""
    first, rule = inputs[0] if inputs else None, lookup(op)
    known = shape is not None and all(v is None or v.shape is not None for v in inputs)
    if not known or op.domain or len([v for v in op.outputs if v is not None]) != 1:
        return None
    if rule is not None and rule.by_channel is not None and lies_in_rows(e, first):
        e.output_shapes = [shape]
        with rule_of(op):
            results: Sequence[Value] | None = rule.by_channel(e, op, *inputs)
        return results[0] if results else None
    turned = exchange(e, op, inputs, [shape])
    output = op.outputs[0]
    if turned is None or output is None:
        return None
    attrs = {name: op.attrs[name] for name in op.attrs}
    return as_image(e, e.op(op.type, *turned[0], dtype=output.dtype, shape=turned[1][0], **attrs), shape)
