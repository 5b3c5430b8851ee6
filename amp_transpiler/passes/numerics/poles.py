"""Bounds that keep numbers from a pole, and that 16 bit rounds onto it.

A function that comes near the ends of its range, and does not reach them, is such a bound: ``log(1 - sigmoid(x))`` is
finite up to an x of 17, and infinite from 8.4 on where the sigmoid is 1 in float16.

``log(1 - clip(x, eps, 1 - eps))`` is finite for the bound alone, which is 1 in float16 from an eps of 0.0002 on. Each
bound that is no number of the format is followed through arithmetic with constants, as it is and as 16 bit computes
it; where the one is off a pole that the other meets, what lies between the bound and the pole stays fp32.
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import SHORT, numpy_dtype
from amp_transpiler.passes.numerics.constraints import ConstantNote, Constraints
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import label

#: What bounds, or puts a number in the place of those beyond a bound.
_BOUNDING = frozenset({"Clip", "Max", "Min", "Where"})


def keep_from_poles(flow: Flow, dtype: str, constraints: Constraints) -> None:
    """Add to ``constraints`` the tensors between such bounds and the operators with poles, and a note of each bound."""
    if not flow.of("Div", "Pow", having=lambda kind: bool(kind.poles)):
        return
    for op, name, _ in flow.of(*_BOUNDING, having=lambda kind: kind.nears):
        for bound, number in _bounds(op, name, flow):
            if math.isfinite(number) and _rounded(number, dtype) != number:
                _follow(op, bound, number, flow, dtype, constraints)


def _bounds(op: Operator, name: str, flow: Flow) -> list[tuple[Variable | None, float]]:
    """The numbers by which it bounds, each with the constant that holds it (None for an attribute, or where it is the
    number of float32 that is next to an end of its range)."""
    if traits_of(op).nears:
        low, high = (np.float32(end) for end in traits_of(op).bounded or ())
        least = np.finfo(np.float32).smallest_normal if low == 0 else np.nextafter(low, high)
        return [(None, float(least)), (None, float(np.nextafter(high, low)))]
    if name == "Clip" and len(op.inputs) == 1:
        return [(None, op.attrs[each]) for each in ("min", "max") if each in op.attrs]
    read = flow.inputs[op][1:] if name == "Clip" else flow.inputs[op]
    return [(variable, number) for variable in read if (number := flow.number(variable)) is not None]


def _follow(
    op: Operator, bound: Variable | None, number: float, flow: Flow, dtype: str, constraints: Constraints
) -> None:
    """Keep fp32 what lies between the operator that bounds by a number, and the poles that its rounding meets."""
    start = op.outputs[0]
    assert start is not None
    #: What the bound becomes, as it is and in 16 bit, and of which tensor.
    values = {start: (number, _rounded(number, dtype))}
    before: dict[Variable, Variable] = {}
    pending, met = [start], False

    def hand_on(found: tuple[float, float], came: Variable, *became: Variable | None) -> None:
        for made in became:
            if made is not None and made not in values:
                values[made], before[made] = found, came
                pending.append(made)

    for variable in pending:
        exact, short = values[variable]
        for reader, slot in flow.uses.get(variable, ()):
            name = reader.full_type
            if exact != short and short in _poles(reader, name, slot, flow):
                kind = Kind.ONTO_A_POLE
                detail: tuple[str, ...] = f"{_rounded(number, dtype):g}", SHORT[dtype]
                if traits_of(op).nears:
                    kind = Kind.NEARS_A_POLE
                else:
                    detail = str(np.float32(number)), *detail
                why, met = Reason(kind, label(reader), detail), True
                kept: Variable | None = variable
                while kept is not None:
                    constraints.keep_tensor(kept, why)
                    kept = before.get(kept)
                continue
            one, other = (_becomes(reader, name, slot, value, flow) for value in (exact, short))
            if one is None or other is None:
                continue
            found = one, _rounded(other, dtype)
            hand_on(found, variable, *reader.outputs)
        hand_on(values[variable], variable, *(v for edges in flow.borders for v in edges.get(variable, ())))
    if met and bound is not None and bound.name not in {note.name for note in constraints.constants}:
        note = ConstantNote(bound.name, "underflow", 1, 1, number, "what reads it stays fp32")
        constraints.constants.append(note)


def _poles(op: Operator, name: str, slot: int, flow: Flow) -> tuple[float, ...]:
    """Numbers in a slot at which what the operator makes, or its slope, is infinite."""
    if name == "Div":
        return (0.0,) if slot == 1 else ()
    if name == "Pow":
        return (0.0,) if slot == 0 and (flow.number(op.input(1)) or 0) < 0 else ()
    return traits_of(op).poles if slot == 0 else ()


def _becomes(op: Operator, name: str, slot: int, value: float, flow: Flow) -> float | None:
    """What becomes of a number in a slot by arithmetic with constants; None where that is not known."""
    if moves(op, slot):
        return value
    if name in ("Neg", "Abs"):
        return -value if name == "Neg" else abs(value)
    if name == "Clip":
        low, high = op.attrs.get("min"), op.attrs.get("max")
        if len(op.inputs) > 1:
            low, high = flow.number(op.input(1)), flow.number(op.input(2))
        return min(max(value, -math.inf if low is None else low), math.inf if high is None else high)
    if name not in ("Add", "Sub", "Mul", "Div", "Max", "Min") or len(op.inputs) != 2:
        return None
    number = flow.number(flow.inputs[op][1 - slot])
    if number is None:  # zero times anything is zero
        return value if value == 0 and (name == "Mul" or (name == "Div" and slot == 0)) else None
    left, right = (value, number) if slot == 0 else (number, value)
    if name == "Div":
        return left / right if right else None
    made = {"Add": left + right, "Sub": left - right, "Mul": left * right}
    return made[name] if name in made else max(left, right) if name == "Max" else min(left, right)


def _rounded(value: float, dtype: str) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(value).astype(numpy_dtype(dtype)))
