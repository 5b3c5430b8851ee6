"""BatchNormalization in 16 bit has all its parameters in 16 bit too in a file: kernels there take one type.

The schema has types of their own for them. But onnxruntime's CUDA kernel wants one type (with two the node runs on the
CPU, between copies), its WebGPU kernel does not compile with two, and OpenVINO refuses such a model.

A variance has more range than float16. What counts is the slope, scale / sqrt(variance + epsilon): where parameters
that are rounded give it to within two roundings, they are stored as they are. Elsewhere the slope itself is the scale,
times a power of two that keeps it off the subnormal numbers, and the square of that power the variance. A model that is
served has its parameters as the scope has them: it computes the slope of them, which onnxruntime does once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from amp_transpiler.ir.decompose import Parts, write_instead
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable, origin
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import HALF, LIMITS, SHORT, numpy_dtype
from amp_transpiler.ops.norm_parts import epsilon_of
from amp_transpiler.passes.canonicalize.matching import drop_unread
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.precision.rules import constant_reason
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.typing import Obstacle, narrowed, programs

Array = np.ndarray[Any, Any]
#: The exponent of two up to which a variance is a normal number of float16 whose root is a power of two.
_ROOTS = 7


def _content(variable: Variable) -> Array | None:
    """What a constant holds, also one outside of a nested program."""
    held = constants.content(origin(variable))
    return None if held is None else as_array(held)


def keep_norms(program: Graph, dtype: str, constraints: Constraints) -> None:
    """Constrain to fp32 each norm that ``dtype`` does not hold the parameters of, or of which they are computed."""
    for norm in _norms(program):
        slots = narrowed(norm, dtype)
        if isinstance(slots, Obstacle) or len({*slots.inputs}) == 1 or _stored(norm, dtype) is not None:
            continue
        computed = next((v for v in norm.inputs[1:] if v is not None and _content(v) is None), None)
        named = next(v for v in (computed, *norm.inputs[1:]) if v is not None)
        how = "beyond it" if computed is None else "computed"
        constraints.keep(norm, Reason(Kind.ONE_TYPE, origin(named).name, (SHORT[dtype], how)))


def store_norms(program: Graph) -> None:
    """Store the fp32 parameters of norms that run in 16 bit in it, where they are constants that it holds."""
    for norm, dtype in _mixed(program):
        stored = _stored(norm, dtype)
        if stored is not None:
            arrays, epsilon = stored
            if epsilon != epsilon_of(norm):
                norm.attrs["epsilon"] = epsilon
            for slot, array in enumerate(arrays, 1):
                _give(norm, slot, array, dtype)


def write_norms_of_one_type(program: Graph) -> None:
    """Write norms that run in 16 bit for kernels that take one type; fp32 parameters stay, and may change.

    In float16 they are read through casts, the slope in place of scale and variance. In bfloat16 CUDA has no kernel,
    and the norm runs in fp32 between casts.
    """
    for norm, dtype in list(_mixed(program)):
        write_instead(norm, _sloped if dtype == "float16" else _widened)


def _sloped(d: Parts, op: Operator, x: Variable, scale: Variable, bias: Variable, *seen: Variable) -> list[Variable]:
    mean, variance = seen
    slope = d.Div(scale, d.Sqrt(d.Add(variance, epsilon_of(op))))
    ones = d.const(np.ones(static(variance.shape) or ()), x.dtype)
    return [d.BatchNormalization(x, *(d.cast(each, x.dtype) for each in (slope, bias, mean, ones)), epsilon=0.0)]


def _widened(d: Parts, op: Operator, x: Variable, *parameters: Variable) -> list[Variable]:
    return [d.cast(d.BatchNormalization(d.cast(x, "float32"), *parameters, epsilon=epsilon_of(op)), x.dtype)]


def _mixed(program: Graph) -> Iterator[tuple[Operator, str]]:
    """Norms that run in 16 bit with parameters in fp32, and the type."""
    for norm in _norms(program):
        data = norm.input(0)
        parameters = [v for v in norm.inputs[1:] if v is not None and v.dtype == "float32" and static(v.shape)]
        if data is not None and data.dtype in HALF and len(parameters) == len(norm.inputs) - 1:
            yield norm, data.dtype


def _norms(program: Graph) -> Iterator[Operator]:
    for each in programs(program):
        norms = (op for op in of_type(each, "BatchNormalization") if not op.attrs.get("training_mode", 0))
        yield from (op for op in norms if len(op.inputs) == 5 and None not in op.inputs)


def _stored(norm: Operator, dtype: str) -> tuple[list[Array], float] | None:
    """Scale, bias, mean and variance in ``dtype``, and epsilon; None where it does not hold them."""
    contents = [_content(v) for v in norm.inputs[1:] if v is not None]
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
        variable.dtype = dtype
        if variable.producer is not None:
            variable.producer.precision, variable.producer.why = dtype, constant_reason(dtype)
    else:
        norm.set_input(slot, program.add_constant(f"{variable.name}.cast_{SHORT[dtype]}", array))
        drop_unread(variable)
