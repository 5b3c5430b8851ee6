"""Masks: numbers far beyond any logit, put where a softmax or a maximum shall not look.

``-3.4e38`` at a masked place means "never"; the smallest number of a format means the same there. That holds
wherever the tensor can go, so it is decided by what reads it: data movement, additions to the logits and
multiplications by zeros and ones, and at the end an operator in which the lowest numbers count for nothing. One that
picks among elements, a maximum or TopK, gives a masked one where there is no other, and what reads that decides; so
does what reads the logarithm of a softmax, which is as low at masked places.

What is added to a mask, scores or a second mask, shares the format's range with it: a sum beyond would be infinite, and
a softmax over a row of nothing but minus infinity is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.types import INTEGERS, LIMITS
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import is_float

#: The tensor holds the format's smallest number at masked places; its largest; both as bits.
LOW, HIGH = 1, 2

_IGNORES = {"low": LOW, "high": HIGH}
#: What compares with a number of this size at most, far from a mask, tells a masked place from any other.
_FAR = 1e3
#: Arithmetic that hands masks on, each in its own way (see :meth:`.Masks.through`).
_PASSES = frozenset({"Add", "Sum", "Sub", "Neg", "Max", "Min", "Mul", "Div"})
_SUMS = frozenset({"Add", "Sum", "Sub"})
#: A mask times 0.001 still masks.
_SCALES = (1e-3, 1.0)
_COUNTED = INTEGERS | {"bool"}
#: What is no less than any element.
_TOPS = frozenset({"ReduceMax", "ReduceLogSumExp"})
#: How far the maximum is followed back through operators that move it.
_HOPS = 4
#: A mask takes no less than this part of the range, a power of two: 16376 in float16 is far beyond any logit.
SHARES = 4


@dataclass(frozen=True)
class Summands:
    """What is added up at masked places: so many masks, and maybe scores ``beside`` them."""

    masks: int
    beside: bool

    @property
    def total(self) -> int:
        return self.masks + self.beside


class Masks:
    """The constants of a program that mask in a 16-bit type, and where their masks go."""

    def __init__(self, flow: Flow, dtype: str) -> None:
        self.flow, self.dtype, self.limit = flow, dtype, LIMITS[dtype].largest

    @cached_property
    def binary(self) -> frozenset[Variable]:
        """Tensors of zeros and ones, as masks are made of: cast from truth values or integers, ``1 - mask``."""
        flow, found = self.flow, set[Variable]()
        kinds = {name for name, traits in flow.kinds.items() if traits.moves != ()} | {"Sub", "Mul"}
        for op, name, operands in flow.steps:
            if name not in kinds:
                continue
            read = [v for v in operands if v is not None]
            if name == "Cast":
                first = op.inputs[0]
                yes = first is not None and (first.dtype in _COUNTED or source(first) in found)
            elif name == "Sub":
                yes = bool(read) and flow.number(read[0]) == 1 and read[0] is not read[-1]
            else:
                yes = bool(read) and all(v in found or flow.number(v) in (0, 1) for v in read)
            if yes:
                found.update(v for v in op.outputs if v is not None and is_float(v))
        return frozenset(found)

    @cached_property
    def found(self) -> dict[Variable, int]:
        """Constants in the place of masks that hold numbers of at least the magnitude ``limit``: LOW, HIGH.

        Those that were saturated before as well as those that will be.
        """
        found: dict[Variable, int] = {}
        for variable, bits in self._allowed().items():
            array = constants.values(variable) if bits else None
            if array is None:
                continue
            array = array[np.isfinite(array)]  # minus infinity is in any format, and any sum of masks
            if array.size and bits & LOW and array.min() <= -self.limit:
                found[variable] = LOW
            elif array.size and bits & HIGH and array.max() >= self.limit:
                found[variable] = HIGH
        return found

    def _allowed(self) -> dict[Variable, int]:
        """For every operand, whether all that reads it takes very low (LOW) or very high (HIGH) numbers as a mask.

        One sweep against the direction of the program. What the caller sees, and states of loops, never count as masks.
        The caller may ask for what nothing reads: a loss, what a built program is for.
        """
        flow, found = self.flow, dict[Variable, int]()

        def settled(variable: Variable) -> int:
            if variable in flow.fetched or variable in flow.loops or _is_last(variable, flow):
                return 0
            bits = found.get(variable, LOW | HIGH)
            for further in flow.beyond(variable):
                bits &= settled(further)
            return bits

        for op, name, read in reversed(flow.steps):
            for slot, variable in enumerate(read):
                if variable is None or found.get(variable) == 0 or (op.attrs.programs and variable in flow.entries):
                    continue
                bits = _ends(op, name, slot, flow)
                if bits is None:
                    sign = self.through(op, slot)
                    bits = (_ignored(op, name) or LOW | HIGH) if sign is not None else 0
                    for made in op.outputs if sign is not None else ():
                        if made is not None and is_float(made):
                            bits &= flipped(settled(made), sign or 1)
                found[variable] = found.get(variable, LOW | HIGH) & bits
        return {variable: settled(variable) for variable in found}

    def through(self, op: Operator, slot: int) -> int | None:
        """What becomes of a mask that ``op`` reads in ``slot``: 1 its output masks as well, -1 with the other sign.

        None where it does neither, or where the operator computes with it.
        """
        if moves(op, slot):
            return 1
        name = op.full_type
        if name not in _PASSES:
            return 1 if slot == 0 and _picks(op, name) else None
        if name == "Sub" and slot == 1:
            return None if less_its_top(op, self.flow) else -1
        if name == "Neg":
            return -1
        if name not in ("Mul", "Div"):
            return 1
        if name == "Div" and slot == 1:
            return None
        other = self.flow.inputs[op][1 - slot]
        if other in self.binary:
            return 1 if name == "Mul" else None
        factor = self.flow.number(other)
        if not factor:
            return None
        factor = factor if name == "Mul" else 1 / factor
        return (1 if factor > 0 else -1) if _SCALES[0] <= abs(factor) <= _SCALES[1] else None

    @cached_property
    def summands(self) -> dict[Variable, Summands]:
        """For every tensor with masked places, what is added up there."""
        count: dict[Variable, Summands] = {}
        for variable in self.found:
            self._note(count, variable, Summands(1, False))
        for op, name, read in self.flow.steps if count else ():
            masked = [slot for slot, v in enumerate(read) if v is not None and v in count and self._passes(op, slot)]
            if not masked:
                continue
            known = [count[read[slot]] for slot in masked]  # type: ignore[index]
            beside = any(each.beside for each in known) or _is_as_low(op)
            masks = max(each.masks for each in known)
            if name in _SUMS:
                masks = sum(each.masks for each in known)
                others = (v for slot, v in enumerate(read) if slot not in masked and v is not None)
                beside |= any(v not in self.binary and not self._is_near(v) for v in others)
            for made in op.outputs:
                if made is not None and is_float(made):
                    self._note(count, made, Summands(masks, beside))
        return count

    @cached_property
    def _most(self) -> dict[Variable, int]:
        """The most that are added up wherever a tensor with masked places goes."""
        most = {variable: summands.total for variable, summands in self.summands.items()}

        def settle(variable: Variable, *further: Variable) -> int:
            most[variable] = max(most.get(v, 1) for v in (variable, *further, *self.flow.beyond(variable)))
            return most[variable]

        for op, _, read in reversed(self.flow.steps) if most else ():
            made = [v for v in op.outputs if v is not None and v in most and settle(v)]
            for slot, variable in enumerate(read):
                if variable is not None and variable in most:
                    settle(variable, *(made if self._passes(op, slot) else ()))
        return most

    def share(self, variable: Variable, least: int = 1) -> float:
        """What a constant of ``found`` takes at masked places: the limit, shared by what is added, by ``least``.

        A power of two shares, so that the format holds the number and their sum.
        """
        summands = max(self._most.get(variable, 1), least)
        parts = min(1 << (summands - 1).bit_length(), SHARES)
        return (-self.limit if self.found[variable] == LOW else self.limit) / parts

    def stored(self, writes: Callable[[Operator], bool], reads: Callable[[Operator, int], bool]) -> set[Variable]:
        """The tensors whose masked places come into 16 bit: by operators that write it, or read it in a slot."""
        found: set[Variable] = set()

        def settle(variable: Variable) -> None:
            if any(v in found for v in self.flow.beyond(variable)):
                found.add(variable)

        sweeps = 2 if self.flow.results else 1  # an If may come before what is in its branches
        for op, _, read in self.flow.steps[::-1] * sweeps if self.summands else ():
            made = [v for v in op.outputs if v is not None and v in self.summands]
            for each in made:
                settle(each)
            if made and writes(op):
                found.update(made)
            ahead = any(v in found for v in made)
            for slot, variable in enumerate(read):
                if variable is not None and variable in self.summands:
                    settle(variable)
                    if reads(op, slot) or (ahead and self._passes(op, slot)):
                        found.add(variable)
        return found

    def crowded(self, op: Operator, name: str) -> bool:
        """Whether the operator adds up more than share the range."""
        made = op.output(0)
        return name in _SUMS and made in self.summands and self.summands[made].total > SHARES

    def _note(self, count: dict[Variable, Summands], variable: Variable, new: Summands) -> None:
        known = count.get(variable, Summands(0, False))
        merged = Summands(max(new.masks, known.masks), new.beside or known.beside)
        if merged != known:
            count[variable] = merged
            for further in self.flow.beyond(variable):
                self._note(count, further, merged)

    def _is_near(self, variable: Variable) -> bool:
        """Whether it is one number, far from a mask."""
        number = self.flow.number(variable)
        return number is not None and abs(number) < _FAR

    def _passes(self, op: Operator, slot: int) -> bool:
        return self.through(op, slot) is not None


def flipped(bits: int, sign: int) -> int:
    """Low and high places exchanged where the sign is negative."""
    return bits if sign > 0 else (HIGH if bits & LOW else 0) | (LOW if bits & HIGH else 0)


def _is_last(variable: Variable, flow: Flow) -> bool:
    """Whether nothing reads what an operator makes; one of several outputs is merely not needed."""
    maker = variable.producer
    if maker is None or variable in flow.uses or variable in flow.results or variable in flow.entries:
        return False
    return not any(v is not None and v.readers for v in maker.outputs)


def _ends(op: Operator, name: str, slot: int, flow: Flow) -> int | None:
    """The masks that end in this operand without a trace; None where the outputs have to be looked at."""
    if name in _PASSES:
        return LOW | HIGH if name == "Sub" and slot == 1 and less_its_top(op, flow) else None
    traits = traits_of(op)
    if traits.shape_only or (traits.compares and len(op.inputs) == 1):
        return LOW | HIGH
    if traits.compares:
        number = flow.number(flow.inputs[op][1 - slot])
        return LOW | HIGH if number is not None and abs(number) <= _FAR else 0
    if name == "Attention":
        return LOW if slot == 3 else 0
    if name in ("Cast", "CastLike"):
        made = op.outputs[0]
        return None if made is None or is_float(made) else LOW | HIGH if made.dtype == "bool" else 0
    if name == "Pad" and slot == 2:
        return LOW if _is_border(op, flow) else None
    ignored = _ignored(op, name)
    return None if not ignored or (slot == 0 and _picks(op, name)) else ignored if slot == 0 else 0


def _ignored(op: Operator, name: str) -> int:
    """The masks that count for nothing in its first operand, beside ordinary numbers."""
    if name == "TopK":
        return LOW if op.attrs.get("largest", 1) else HIGH
    return _IGNORES.get(traits_of(op).ignores, 0)


def _picks(op: Operator, name: str) -> bool:
    """Whether it makes masked numbers of its first operand: of each row one or some, where the whole row is masked, or
    one of each element."""
    return name == "TopK" or (traits_of(op).reduces != "" and _ignored(op, name) != 0) or _is_as_low(op)


def _is_as_low(op: Operator) -> bool:
    """Whether what it makes of a masked element, for which it has no bound, is as low but for a number beside it."""
    traits = traits_of(op)
    return traits.ignores == "low" and traits.bounded is not None and traits.bounded[0] == -math.inf


def _is_border(op: Operator, flow: Flow) -> bool:
    """Whether what a Pad puts around its data is narrower than the windows of the maxima that alone read it."""
    made, pads = op.output(0), flow.integers(op.input(1))
    readers = flow.uses.get(made, ()) if made is not None else ()
    if not readers or not pads or op.input(3) is not None or made in flow.fetched or made in flow.results:
        return False
    for pool, _ in readers:
        window, attrs = pool.attrs.get("kernel_shape", ()), pool.attrs
        further = attrs.get("pads", [0] * 2 * len(window))
        least = [0, 0, *(size - 1 for size in window)] * 2
        whole = [0, 0, *further[: len(window)], 0, 0, *further[len(window) :]]
        plain = attrs.get("auto_pad", "NOTSET") in ("NOTSET", "VALID") and not attrs.get("ceil_mode", 0)
        if pool.full_type != "MaxPool" or not plain or set(attrs.get("dilations", ())) - {1}:
            return False
        if len(pads) != len(least) or any(p < 0 or p + q > r for p, q, r in zip(pads, whole, least, strict=True)):
            return False
    return True


def less_its_top(op: Operator, flow: Flow) -> bool:
    """Whether it subtracts from a tensor its largest along axes, as a softmax does: what it makes is 0 at most."""
    if op.full_type != "Sub":
        return False
    data, top = flow.inputs[op]
    for _ in range(_HOPS):
        maker = top.producer if top is not None else None
        if maker is None or not (moves(maker, 0) or maker.full_type == "Max"):
            break
        operands = [v for v in flow.inputs[maker] if v is not None and flow.number(v) is None]
        top = operands[0] if len(operands) == 1 else None  # a maximum with a constant is no less
    reduce = top.producer if top is not None else None
    return reduce is not None and reduce.full_type in _TOPS and flow.inputs[reduce][0] is data
