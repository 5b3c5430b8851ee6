"""BatchNormalization in 16 bit has all its parameters in 16 bit too in a file: kernels there take one type.

The schema has types of their own for them. But onnxruntime's CUDA kernel wants one type (with two the node runs on the
CPU, between copies), its WebGPU kernel does not compile with two, and OpenVINO refuses such a model.

A variance has more range than float16. What counts is the slope, scale / sqrt(variance + epsilon): where parameters
that are rounded give it to within two roundings, they are stored as they are. Elsewhere the slope itself is the scale,
times a power of two that keeps it off the subnormal numbers, and the square of that power the variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import HALF, LIMITS, SHORT, numpy_dtype
from amp_transpiler.ops.norm_parts import epsilon_of
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.typing import Obstacle, narrowed, origin, programs

Array = np.ndarray[Any, Any]
#: What a variable holds, None where that is not known.
Content = Callable[[Variable], Array | None]
#: The exponent of two up to which a variance is a normal number of float16 whose root is a power of two.
_ROOTS = 7


def constant(variable: Variable) -> Array | None:
    """What a constant holds, also one outside of a nested program."""
    held = constants.content(origin(variable))
    return None if held is None else as_array(held)


def keep_norms(program: Graph, dtype: str, constraints: Constraints) -> None:
    """Constrain to fp32 each norm that ``dtype`` does not hold the parameters of, or of which they are computed."""
    for norm in _norms(program):
        slots = narrowed(norm, dtype)
        if isinstance(slots, Obstacle) or len({*slots.inputs}) == 1 or _stored(norm, dtype, constant) is not None:
            continue
        computed = next((v for v in norm.inputs[1:] if v is not None and constant(v) is None), None)
        named = next(v for v in (computed, *norm.inputs[1:]) if v is not None)
        how = "beyond it" if computed is None else "computed"
        constraints.keep(norm, Reason(Kind.ONE_TYPE, origin(named).name, (SHORT[dtype], how)))


def store_norms(program: Graph, content: Content = constant) -> None:
    """Store the fp32 parameters of norms that run in 16 bit in it, as constants.

    ``content``: what a parameter holds, None where that is not known; its norm is left as it is.
    """
    for norm in _norms(program):
        data = norm.input(0)
        dtype = "" if data is None or data.dtype is None else data.dtype
        if dtype not in HALF or len({v.dtype for v in norm.inputs if v is not None}) == 1:
            continue
        stored = _stored(norm, dtype, content)
        if stored is not None:
            arrays, epsilon = stored
            if epsilon != epsilon_of(norm):
                norm.attrs["epsilon"] = epsilon
            for slot, array in enumerate(arrays, 1):
                _give(norm, slot, array, dtype)


def _norms(program: Graph) -> Iterator[Operator]:
    for each in programs(program):
        norms = (op for op in of_type(each, "BatchNormalization") if not op.attrs.get("training_mode", 0))
        yield from (op for op in norms if len(op.inputs) == 5 and None not in op.inputs)


def _stored(norm: Operator, dtype: str, content: Content) -> tuple[list[Array], float] | None:
    """Scale, bias, mean and variance in ``dtype``, and epsilon; None where it does not hold them."""
    contents = [content(v) for v in norm.inputs[1:] if v is not None]
    if any(each is None for each in contents):
        return None
    scale, bias, mean, variance = (each.astype(np.float64) for each in contents if each is not None)
    epsilon, limits = epsilon_of(norm), LIMITS[dtype]
    with np.errstate(all="ignore"):
        slope = _slope(scale, variance, epsilon)
        power = np.clip(-np.frexp(slope)[1], -_ROOTS, _ROOTS).astype(np.float64)
        for factor, over, added in ((scale, variance, epsilon), (slope * 2.0**power, 4.0**power, 0.0)):
            arrays = [array.astype(numpy_dtype(dtype)) for array in (factor, bias, mean, over)]
            held = [array.astype(np.float64) for array in arrays]
            off = np.abs(_slope(held[0], held[3], added) - slope)
            if all(np.isfinite(each).all() for each in held) and (off <= limits.epsilon * np.abs(slope)).all():
                return arrays, added
    return None


def _slope(scale: Array, variance: Array, epsilon: float) -> Array:
    return scale / np.sqrt(variance + epsilon)


def _give(norm: Operator, slot: int, array: Array, dtype: str) -> None:
    """Let the norm read this: under the name of what it has read, where nothing else reads that."""
    variable, program = norm.inputs[slot], norm.program
    assert variable is not None
    if variable.outer is None and len(variable.readers) == 1 and variable not in program.outputs:
        constants.replace(variable, array)
        variable.dtype, variable.persistable = dtype, False
    else:
        norm.set_input(slot, program.add_constant(program.unique(f"{variable.name}.cast_{SHORT[dtype]}"), array))
