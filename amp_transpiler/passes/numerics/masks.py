"""Masks: numbers far beyond any logit, put where a softmax or a maximum shall not look.

``-3.4e38`` at a masked place means "never"; the smallest number of a format means the same there. That holds
wherever the tensor can go, so it is decided by what reads it: data movement, additions to the logits and
multiplications by zeros and ones, and at the end an operator in which the lowest numbers count for nothing.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import is_float, operator_name

#: The tensor holds the format's smallest number at masked places; its largest; both as bits.
LOW, HIGH = 1, 2

_IGNORES = {"low": LOW, "high": HIGH}
_INSPECTS = frozenset({"IsNaN", "IsInf"})
#: Arithmetic that hands masks on, each in its own way (see :func:`through`).
_PASSES = frozenset({"Add", "Sum", "Sub", "Neg", "Max", "Min", "Mul", "Div"})
#: A mask times 0.001 still masks.
_SCALES = (1e-3, 1.0)
_INTEGERS = frozenset({"bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"})


def through(op: Operator, slot: int, flow: Flow, binary: frozenset[Variable]) -> int | None:
    """What becomes of a mask that ``op`` reads in ``slot``: 1 its output masks as well, -1 with the other sign.

    None where it does neither, or where the operator computes with it.
    """
    if moves(op, slot):
        return 1
    name = operator_name(op)
    if name not in _PASSES:
        return None
    if name == "Neg" or (name == "Sub" and slot == 1):
        return -1
    if name not in ("Mul", "Div"):
        return 1
    if name == "Div" and slot == 1:
        return None
    other = flow.inputs[op][1 - slot]
    if other in binary:
        return 1 if name == "Mul" else None
    factor = flow.number(other)
    if not factor:
        return None
    factor = factor if name == "Mul" else 1 / factor
    return (1 if factor > 0 else -1) if _SCALES[0] <= abs(factor) <= _SCALES[1] else None


def flipped(bits: int, sign: int) -> int:
    """Low and high places exchanged where the sign is negative."""
    return bits if sign > 0 else (HIGH if bits & LOW else 0) | (LOW if bits & HIGH else 0)


def maskable(flow: Flow, binary: frozenset[Variable]) -> dict[Variable, int]:
    """For every operand, whether all that reads it takes very low (LOW) or very high (HIGH) numbers as a mask.

    One sweep against the direction of the program. What the caller sees, and states of loops, never count as masks.
    """
    found: dict[Variable, int] = {}

    def settled(variable: Variable) -> int:
        bits = found.get(variable, LOW | HIGH)
        if variable in flow.fetched or variable in flow.loops:
            return 0
        for outside in (*flow.results.get(variable, ()), *flow.entries.get(variable, ())):
            bits &= settled(outside)
        return bits

    for op, name, read in reversed(flow.steps):
        for slot, variable in enumerate(read):
            if variable is None or found.get(variable) == 0 or (op.attrs.programs and variable in flow.entries):
                continue
            bits = _ends(op, name, slot)
            if bits is None:
                sign = through(op, slot, flow, binary)
                bits = LOW | HIGH if sign is not None else 0
                for made in op.outputs if sign is not None else ():
                    if made is not None:
                        bits &= flipped(settled(made), sign or 1) if is_float(made) else 0
            found[variable] = found.get(variable, LOW | HIGH) & bits
    return {variable: settled(variable) for variable in found}


def _ends(op: Operator, name: str, slot: int) -> int | None:
    """The masks that end in this operand without a trace; None where the output has to be looked at."""
    if name in _PASSES:
        return None
    traits = traits_of(op)
    if traits.shape_only or name in _INSPECTS:
        return LOW | HIGH
    if name == "TopK":
        return LOW if op.attrs.get("largest", 1) else HIGH
    if name == "Attention":
        return LOW if slot == 3 else 0
    if name == "Cast":
        made = op.outputs[0]
        return LOW | HIGH if made is not None and made.dtype == "bool" else None
    if traits.ignores:
        return _IGNORES[traits.ignores] if slot == 0 else 0
    return None


def binary_tensors(flow: Flow) -> frozenset[Variable]:
    """Tensors of zeros and ones, as masks are made of: cast from truth values or integers, ``1 - mask``."""
    found: set[Variable] = set()
    kinds = {name for name, traits in flow.kinds.items() if traits.moves != ()} | {"Sub", "Mul"}
    for op, name, operands in flow.steps:
        if name not in kinds:
            continue
        read = [v for v in operands if v is not None]
        if name == "Cast":
            first = op.inputs[0]
            yes = first is not None and (first.dtype in _INTEGERS or source(first) in found)
        elif name == "Sub":
            yes = bool(read) and flow.number(read[0]) == 1 and read[0] is not read[-1]
        else:
            yes = bool(read) and all(v in found or flow.number(v) in (0, 1) for v in read)
        if yes:
            found.update(v for v in op.outputs if v is not None and is_float(v))
    return frozenset(found)


def masking(limit: float, allowed: dict[Variable, int]) -> dict[Variable, int]:
    """Constants in the place of masks that hold numbers of at least the magnitude ``limit``: LOW, HIGH.

    It finds those that were saturated before as well as those that will be.
    """
    found: dict[Variable, int] = {}
    for variable, bits in allowed.items():
        content = constants.fill(variable.producer)
        if content is None and bits:
            content = constants.content(variable)
        if content is None or not bits:
            continue
        array = as_array(content)
        array = array[np.isfinite(array)]  # minus infinity is in any format, and any sum of masks
        if array.size and bits & LOW and array.min() <= -limit:
            found[variable] = LOW
        elif array.size and bits & HIGH and array.max() >= limit:
            found[variable] = HIGH
    return found
