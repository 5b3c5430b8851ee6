"""What one kernel costs: the one place that forecasts, the minimum cut and the choice of bodies ask."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import BYTES

#: Element type and shape of a tensor.
Kind = tuple[str, tuple[int, ...]]


def tensor_bytes(tensor: Kind) -> int:
    """Bytes of a tensor of this element type and shape."""
    return math.prod(tensor[1]) * BYTES.get(tensor[0], 1)


def cast_bytes(shape: tuple[int, ...], source: str, target: str) -> int:
    """Bytes that a cast of a tensor of this shape reads and writes."""
    return tensor_bytes((source, shape)) + tensor_bytes((target, shape))


def launches(type_: str, domain: str = "") -> bool:
    """Whether a node of this type is a kernel: no view, no constant, and it reads elements, not only a shape."""
    traits = traits_of(type_, domain)
    return not (traits.view or traits.shape_only or (type_ == "Constant" and not domain))


def moved_bytes(type_: str, domain: str, inputs: Sequence[int], outputs: Sequence[int]) -> int:
    """Bytes that a kernel reads and writes, of operands and results of so many bytes.

    An operator that reads a part of its first operand reads no more of it than its largest result holds.
    """
    if not launches(type_, domain):
        return 0
    read = sum(inputs)
    if inputs and traits_of(type_, domain).part:
        read += min(inputs[0], max(outputs, default=0)) - inputs[0]
    return read + sum(outputs)
