"""Functions of a 16-bit number that GPU places look up in a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.evaluation import evaluated
from amp_transpiler.ir.types import HALF, LIMITS, ONNX_TYPES
from amp_transpiler.ops.common import unwidened

#: A function of one number, elementwise, as a rule writes it.
Function = Callable[[Emitter, Value], Value]


def rounded_once(e: Emitter, function: Function, x: Value, reach: float) -> Value:
    """``function(x)`` as if computed in fp32, in the type of X.

    On GPU places a value of 16 bit, also one that was widened, is looked up in a table with entries of the type of X:
    four passes, where ten or more would each round. The function must be constant, to 16 bit, beyond -``reach`` and
    ``reach``. The steps of the table are powers of two, so that no 16-bit number above 1/8 (of a ``reach`` of 4 to 7)
    falls between two entries; below, it takes the one nearer to 0.
    """
    if not is_looked_up(e, x):
        return e.cast(function(e, e.f32(x)), x.dtype)
    held = unwidened(e, x)
    steps = 2.0 ** math.floor(math.log2(LIMITS["float16"].largest / reach))
    end = e.like(reach * steps, held)
    place = e.Mul(held, e.like(steps, held))
    if held.dtype == "bfloat16":  # CUDA has no kernel of Clip
        place = e.Max(e.Min(place, end), e.like(-reach * steps, held))
    else:
        place = e.Clip(place, e.like(-reach * steps, held), end)
    table = e.const(_table(function, reach, steps), x.dtype)
    return e.Gather(table, e.cast(place, "int32"), shape=x.shape)


def is_looked_up(e: Emitter, x: Value) -> bool:
    """Whether :func:`rounded_once` looks its function of this value up."""
    return e.at.fused and unwidened(e, x).dtype in HALF


@cache
def _table(function: Function, reach: float, steps: float) -> np.ndarray[Any, Any]:
    """The function at 0, 1 / steps, … reach, and then at -reach … -1 / steps: where negative indices find them."""
    e, count = Emitter(), int(reach * steps)
    x = Value("x", "float64", (2 * count + 1,))
    y = function(e, x)
    kind = ONNX_TYPES[x.dtype]
    given, made = (onnx.helper.make_tensor_value_info(v.name, kind, x.shape) for v in (x, y))
    graph = onnx.helper.make_graph(e.nodes, "table", [given], [made], list(e.initializers.values()))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", e.opset)])
    at = np.concatenate([np.arange(count + 1), np.arange(-count, 0)]) / steps
    return evaluated(model, {"x": at})
