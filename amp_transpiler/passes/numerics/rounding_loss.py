"""What constants lose when they are rounded to 16 bit, and what happens to those that lose too much.

The policy: a mask beyond the format takes the format's limit instead, or its share of it where something is added to
the mask; any other number beyond it keeps its readers in fp32. A number that would become zero keeps its readers in
fp32 where it is all that the constant holds (the eps of a norm, which guards a division) or where it makes up the
tensor it is a factor of. Single elements of a larger tensor that become zero are ordinary rounding. Every element
that is lost is noted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import release
from amp_transpiler.ir.types import FLOATS, LIMITS, SHORT, element_type, numpy_dtype
from amp_transpiler.passes.numerics.constraints import ConstantNote, Constraints
from amp_transpiler.passes.numerics.extremes import Extremes
from amp_transpiler.passes.numerics.masks import HIGH, LOW, Masks
from amp_transpiler.passes.numerics.overflow_propagation import BEYOND, MAY_OVERFLOW, VANISHING, OverflowPropagation
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.reached import reached
from amp_transpiler.passes.view.typing import Obstacle, is_float, narrowed, programs

#: Relative error (L2) from which on rounding loses a factor.
TOLERANCE = 2.0**-7
#: Elements that are read at once: few enough to stay in the cache between the looks at them.
CHUNK = 1 << 17

#: As what a constant is read. A bias is added to a sum of products (or a variance to the eps of its
#: norm), beside which what vanishes is nothing.
ADDEND, BIAS, FACTOR = "addend", "bias", "factor"


def check_constants(program: Graph, masks: Masks, constraints: Constraints, small: Mapping[Variable, Extremes]) -> None:
    """Add to ``constraints`` the constants that a 16-bit type does not hold, a note of each, and the magnitudes of all.

    Every constant that an operator would read in 16 bit is read once, in small chunks. Infinities and NaN are what
    they are in any format. The program is not changed: see :func:`.constants.saturate` for ``constraints.replaced``.
    ``masks`` (which say the type) and ``small``: those of the program.
    """
    _RoundingLoss(program, masks, constraints).check(small)


@dataclass
class Losses:
    """What rounding to 16 bit does to a tensor: finite elements that become infinite, and numbers that become zero.

    ``signs``: LOW where some overflow below, HIGH where some do above.
    ``largest``: the largest finite magnitude; ``finite``: whether it is the largest of all.
    """

    size: int
    largest: float = 0.0
    finite: bool = True
    beyond: int = 0
    signs: int = 0
    vanishing: int = 0
    smallest: float = math.inf


def losses(array: np.ndarray, dtype: str) -> Losses:
    """What rounding a float32 array to ``dtype`` loses; one look at the array, chunk by chunk."""
    flat = array.reshape(-1)
    found = Losses(flat.size)
    buffer = np.empty(min(CHUNK, flat.size), np.float32)
    over, under = np.float32(LIMITS[dtype].overflow), np.float32(LIMITS[dtype].vanish)
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        size = np.abs(chunk, out=buffer[: chunk.size])
        top = float(size.max())
        if not top < over:
            top = _overflow(found, chunk, size, over)
        found.largest = max(found.largest, top)
        if not float(size.min()) > under:
            lost = size[(size <= under) & (chunk != 0)]
            if lost.size:
                found.vanishing += lost.size
                found.smallest = min(found.smallest, float(lost.min()))
    return found


def _overflow(found: Losses, chunk: np.ndarray, size: np.ndarray, over: np.float32) -> float:
    """Count the elements beyond; the largest finite magnitude of the chunk."""
    finite = np.isfinite(chunk)
    found.finite &= bool(finite.all())
    lost = finite & (size >= over)
    found.beyond += int(lost.sum())
    found.signs |= (LOW if (chunk[lost] < 0).any() else 0) | (HIGH if (chunk[lost] > 0).any() else 0)
    return float(size[finite].max(initial=0))


def error_bound(found: Losses, dtype: str) -> float:
    """A bound of the relative error (L2) of rounding, from the largest element alone."""
    return _bound(found.size, found.largest, dtype)


def _bound(size: int, largest: float, dtype: str) -> float:
    # An element is off by half a unit in its last place, or by half a step near zero; the largest one is in the norm.
    limits = LIMITS[dtype]
    return limits.epsilon / 2 + limits.vanish * math.sqrt(size) / largest if largest else 0.0


def relative_error(array: np.ndarray, dtype: str) -> float:
    """The relative error (L2) of rounding the finite elements of the array to ``dtype``."""
    flat, error, total = array.reshape(-1), 0.0, 0.0
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        exact = chunk[np.isfinite(chunk)]
        with np.errstate(over="ignore", under="ignore"):
            deviation = exact.astype(numpy_dtype(dtype)).astype(np.float64) - exact
        error += float((deviation**2).sum())
        total += float((exact.astype(np.float64) ** 2).sum())
    return math.sqrt(error / total) if total else 0.0


class _RoundingLoss:
    def __init__(self, program: Graph, masks: Masks, constraints: Constraints) -> None:
        self.program, self.masks, self.constraints = program, masks, constraints
        self.flow, self.dtype, self.short, self.limit = masks.flow, masks.dtype, SHORT[masks.dtype], masks.limit
        #: Constants that stay fp32, for :class:`.OverflowPropagation`.
        self.kept: dict[Variable, tuple[int, Reason]] = {}

    def check(self, small: Mapping[Variable, Extremes]) -> None:
        magnitudes = self.constraints.magnitudes
        held = (v for each in programs(self.program) for v in each.variables if constants.may_hold(v))
        for variable in held:
            if variable.outer is not None or not is_float(variable) or variable.dtype == self.dtype:
                continue
            if variable not in self.flow.uses and variable not in self.flow.results:
                continue
            known = small.get(variable)
            if known is not None and self._holds(known):
                magnitudes[variable] = known.magnitude
                continue
            array = _content(variable)
            if array is None or not array.size:
                continue
            if array.dtype != np.float32:
                self._elsewhere(variable, array)
                continue
            found = losses(array, self.dtype)
            if found.finite:
                magnitudes[variable] = found.largest
            beyond = found.largest >= self.limit
            suspect = beyond or found.vanishing or error_bound(found, self.dtype) > TOLERANCE
            if suspect and self._narrow(variable):
                if beyond:
                    self._overflow(variable, array, found)
                self._underflow(variable, array, found)
            release(constants.content(variable))
        if self.kept:
            propagation = OverflowPropagation(self.masks, self.constraints, lambda v: False)
            for variable, (bits, why) in self.kept.items():
                propagation.mark(variable, bits, (None, why))
            propagation.sweep(lambda op, name: None)

    def _holds(self, known: Extremes) -> bool:
        """Whether nothing is lost of a constant, nor much of its digits."""
        whole = known.magnitude < self.limit and known.least > LIMITS[self.dtype].vanish
        return whole and _bound(known.size, known.magnitude, self.dtype) <= TOLERANCE

    def _elsewhere(self, variable: Variable, array: np.ndarray) -> None:
        """Mark a constant of another type, such as bfloat16, of which the operators that read it stay in theirs.

        It keeps its values; what is made of it and cast from there may not.
        """
        with np.errstate(over="ignore", under="ignore"):
            found = losses(array.astype(np.float32), self.dtype)
        if found.beyond:
            self._keep(variable, BEYOND | MAY_OVERFLOW, Kind.CONSTANT_BEYOND, f"{found.largest:g}")
        elif found.vanishing and found.largest <= LIMITS[self.dtype].vanish and self._roles(variable) != {BIAS}:
            self._keep(variable, VANISHING, Kind.CONSTANT_VANISHES, f"{found.smallest:g}")

    def _narrow(self, variable: Variable) -> bool:
        """Whether an operator reads it in 16 bit, or hands it to where one may."""
        if variable in self.flow.results:
            return True
        for op, slot in self.flow.uses[variable]:
            made = op.output(0)
            if op.attrs.programs or (op.full_type == "Cast" and made is not None and made.dtype == "float32"):
                return True
            slots = narrowed(op, self.dtype)
            if not isinstance(slots, Obstacle) and slots.inputs[slot] == self.dtype:
                return True
        return False

    def _overflow(self, variable: Variable, array: np.ndarray, found: Losses) -> None:
        worst = -found.largest if found.signs == LOW else found.largest
        if found.signs in (0, LOW, HIGH) and self.masks.found.get(variable, 0) & (found.signs or LOW | HIGH):
            limit = self.masks.share(variable)
            changed = np.isfinite(array) & (array < limit if limit < 0 else array > limit)
            if changed.any():
                self.constraints.replaced[variable] = limit
                worst = math.copysign(found.largest, limit)
                action = f"takes {limit:g} instead: it only masks"
                self._note(variable, "overflow", int(changed.sum()), found.size, worst, action)
        elif found.beyond and not constants.only_bounds(variable, array, self.dtype):
            action = self._keep(variable, BEYOND | MAY_OVERFLOW, Kind.CONSTANT_BEYOND, f"{worst:g}")
            self._note(variable, "overflow", found.beyond, found.size, worst, action)

    def _underflow(self, variable: Variable, array: np.ndarray, found: Losses) -> None:
        entire = found.vanishing > 0 and found.largest <= LIMITS[self.dtype].vanish
        roles = self._roles(variable)
        error = 0.0
        if FACTOR in roles and error_bound(found, self.dtype) > TOLERANCE:
            error = relative_error(array, self.dtype)
        action = ""
        if entire and roles != {BIAS}:
            action = self._keep(variable, VANISHING, Kind.CONSTANT_VANISHES, f"{found.smallest:g}")
        elif error > TOLERANCE:
            action = self._keep(variable, VANISHING, Kind.CONSTANT_OFF, f"{error:.2g}")
        elif found.vanishing:
            some = "its smallest elements become 0, the tensor as a whole keeps its values"
            action = "becomes 0 beside a sum" if entire else some
        if action:
            smallest = found.smallest if found.vanishing else found.largest
            self._note(variable, "underflow", found.vanishing, found.size, smallest, action)

    def _keep(self, variable: Variable, bits: int, kind: Kind, number: str) -> str:
        why = Reason(kind, variable.name, (number, self.short))
        self.constraints.keep_tensor(variable, why)
        self.kept.setdefault(variable, (bits, why))
        return "what reads it stays fp32"

    def _note(self, variable: Variable, problem: str, count: int, size: int, worst: float, action: str) -> None:
        self.constraints.constants.append(ConstantNote(variable.name, problem, count, size, worst, action))

    def _roles(self, variable: Variable) -> set[str]:
        """As what the constant is read, moved about before or not."""
        uses = self.flow.uses

        def moved(at: Variable) -> Iterable[Variable]:
            return (source(v) for op, slot in uses.get(at, ()) if moves(op, slot) for v in op.outputs if v is not None)

        read = (use for at in reached([variable], moved) for use in uses.get(at, ()))
        return {_role(op, slot) for op, slot in read if not moves(op, slot)}


def _role(op: Operator, slot: int) -> str:
    traits = traits_of(op)
    if traits.adds or (traits.elementwise and slot in traits.settings):
        return ADDEND
    return BIAS if slot in traits.biases else FACTOR


def _content(variable: Variable) -> np.ndarray | None:
    """The floating-point content of a constant, or the element that a ConstantOfShape writes."""
    array = constants.values(variable)
    return array if array is not None and element_type(array.dtype) in FLOATS else None
