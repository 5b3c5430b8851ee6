"""Ports of a lowered model that runs without an executor: what goes in, and what comes out, by variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from amp_transpiler.ir.infer import static
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.passes.lowering.lowered import Port

Array = np.ndarray[Any, Any]


def fed(ports: Iterable[Port], value: Callable[[str], Array]) -> dict[str, Array]:
    """The tensors of state ports, from the values of variables."""
    found = {}
    for port in ports:
        if not port.segments:
            found[port.tensor] = value(port.variable)
            continue
        whole = np.zeros(static(port.shape) or (), numpy_dtype(port.dtype))
        for part in port.segments:
            whole.reshape(-1)[part.offset : part.offset + math.prod(part.shape)] = value(part.variable).ravel()
        found[port.tensor] = whole
    return found


def taken(ports: Iterable[Port], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The values of variables, from the tensors of output ports."""
    found = {}
    for port in ports:
        if not port.segments:
            found[port.variable] = tensors[port.tensor]
        for part in port.segments:
            flat = tensors[port.tensor].reshape(-1)[part.offset : part.offset + math.prod(part.shape)]
            found[part.variable] = flat.reshape(part.shape)
    return found
