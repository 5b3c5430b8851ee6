"""Overflow rules: what is known to leave the range of 16 bit, or to lose its digits there, stays fp32.

They look for the operators that make such numbers; :mod:`.overflow_propagation` follows the numbers to where they end.

- Squares on the way to a sum (variance, RMS norm, L2 norm, distance, magnitude): a square leaves float16 beyond
  255, and below 0.008 it loses digits. From the square to the root, and to the division by it.
- Sums over more than :data:`FEW` elements, unless proved to fit. A mean fits, for its operator sums in fp32.
- Sums that a loop carries from round to round (:mod:`.carried_sums`).
- What combines the elements that come to one place, as a scatter that adds.
- Quotients of a bounded number by what is bounded just above zero: the bound is there for where the quotient is large.
- Powers beyond the square, negative ones and those whose exponent is not constant; cubes written as products, but for
  those on the way to a tanh (:mod:`.saturation`); products over elements; matrix products with weights beyond any
  trained network's; Exp of what is not proved to be small; Cosh and Sinh; determinants.
- What a sound interval puts wholly beyond the format, and masks in sums of more than share its range.

bfloat16 has the range of float32, so that only the squares remain there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import NORM
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import combined, moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import SHORT
from amp_transpiler.passes.numerics.carried_sums import carried_sums
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.masks import HIGH, LOW, Masks, less_its_top
from amp_transpiler.passes.numerics.overflow_propagation import (
    INVERSE,
    MAY_OVERFLOW,
    MAY_UNDERFLOW,
    SQUARE,
    OverflowPropagation,
    summed_terms,
)
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.numerics.saturation import saturated
from amp_transpiler.passes.numerics.weight_norms import LARGE, summed_axes, weight_norm
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.flow import Step
from amp_transpiler.passes.view.names import label, written_name

#: A sum of so many terms is no more than as many Adds, which nobody keeps fp32.
FEW = 4
#: How many tensors before a divisor are asked whether it is the norm of what is divided.
_NEAR = 16
#: What may lie between a sum and the square of the mean, beside sums, means and what moves elements.
_MEANS = frozenset({"Sqrt", "Mul", "Div", "Pow"})
#: What may lie between a signal and its spectrum, beside products and what moves elements.
_LINEAR = frozenset({"Add", "Sub", "Mul", "Div", "Neg"})


def apply_overflow_rules(program: Graph, masks: Masks, ranges: Ranges, constraints: Constraints) -> None:
    """Add to ``constraints`` what patterns and intervals rule out in a 16-bit type.

    Operators of the custom white list are the caller's business. The program is not changed, and what an earlier
    conversion did to it makes no difference. Linear in its size. ``masks`` (which say the type): the program's.
    """
    flow, limit = masks.flow, masks.limit
    propagation = OverflowPropagation(masks, constraints, lambda v: ranges.within(v, limit))
    far = any(constraints.magnitudes.get(v, limit) >= limit for v in flow.uses if constants.may_hold(v))
    for variable, bit in masks.found.items() if far else ():
        propagation.mark(variable, bit, (None, Reason(Kind.MASK, variable.name)))
    rules = _OverflowRules(propagation, ranges)
    for variable in program.inputs:
        why = rules.beyond(variable)
        if why:
            propagation.mark(variable, MAY_OVERFLOW, (None, Reason(Kind.INPUT, variable.name, cause=why)))
    for each in carried_sums(flow):
        why = Reason(Kind.CARRIED, written_name(each.state))
        for op in each.operators:
            constraints.keep(op, why)
        if each.grows and rules.float16:
            propagation.mark(each.next, MAY_OVERFLOW, (each.next.producer, why))
    propagation.sweep(rules.seed)
    rules.keep_subtracted_squares(constraints)
    rules.keep_spectra(constraints)


class _OverflowRules:
    """What each operator makes of ordinary operands."""

    def __init__(self, propagation: OverflowPropagation, ranges: Ranges) -> None:
        self.flow, self.propagation, self.ranges, self.limit = propagation.flow, propagation, ranges, propagation.limit
        self.short, self.float16 = SHORT[propagation.dtype], propagation.dtype == "float16"
        self.magnitudes = propagation.constraints.magnitudes
        self.weight_norms: dict[tuple[Variable, tuple[int, ...]], float] = {}
        #: What an operator type may do by itself, in the words of :meth:`seed`.
        self.kinds: dict[str, bool] = {}
        #: The tensors that are squares of one tensor, and which.
        self.squares: dict[Variable, Variable] = {}
        for op, name, read in self.flow.of("Mul", "Pow"):
            made, is_square = op.output(0), read[0] is read[1] if name == "Mul" else self._exponent(op) == 2
            if is_square and made is not None and read[0] is not None:
                self.squares[made] = read[0]
        self.summed = self.cubed = frozenset[Variable]()
        if self.squares:
            steps = self.flow.of("Pow", "Sqrt", having=lambda kind: kind.reduces in ("sum", "mean"))
            self.summed = self._before(step for step in steps if step[1] != "Pow" or self._exponent(step[0]) == 0.5)
            products = (read for _, _, read in self.flow.of("Mul") if self._cubes(read))
            self.cubed = frozenset(v for read in products for v in read if v is not None)
        self.saturated = saturated(self.flow, self.limit)
        self.logged = self._before(self.flow.of("Log"))

    def seed(self, op: Operator, name: str) -> tuple[int, Reason] | None:
        """What the operator makes (:mod:`.overflow_propagation`) and why it stays fp32; None where no rule applies."""
        made = op.output(0)
        if made is None:
            return None
        if name not in self.kinds:
            self.kinds[name] = self._may_seed(op, name)
        if not self.kinds[name]:
            return self._proved(op, made)
        found = self._squares(op, made) or self._combines(op, made)
        if found is None and self.float16:
            why = self._grows(op, name)
            if why and not self.ranges.within(made, self.limit):
                found = INVERSE if why.kind is Kind.NEGATIVE_POWER else MAY_OVERFLOW, why
        return found or self._proved(op, made)

    def _may_seed(self, op: Operator, name: str) -> bool:
        """Whether operators of this type may make what leaves the format of ordinary operands."""
        traits = traits_of(op)
        inside = traits.overflows_inside is not None or traits.reduces == "squares"
        alone = traits.reduces == "sum" or traits.product or traits.overflows is not None or bool(traits.combines)
        alone |= name in ("Pow", "Exp", "Reciprocal", "Div")
        return inside or alone or (name == "Mul" and bool(self.squares))

    def keep_subtracted_squares(self, constraints: Constraints) -> None:
        """A variance as the mean of squares less the square of the mean: what is left are the digits that both
        share least, so that the mean, back to its sum, stays fp32 as the squares do."""
        for op, _, read in self.flow.of("Sub") if self.squares else ():
            for squared in read if constraints.on(op) else ():
                maker = squared.producer if squared is not None and squared in self.squares else None
                why = Reason(Kind.SUBTRACTED_SQUARE, label(op))
                while maker is not None and (moves(maker) or _sums(maker) or maker.full_type in _MEANS):
                    constraints.keep(maker, why)
                    if _sums(maker):
                        break
                    operands = (v for v in self.flow.inputs[maker] if v is not None and not constants.is_constant(v))
                    maker = next((v.producer for v in operands), None)

    def keep_spectra(self, constraints: Constraints) -> None:
        """What is squared on the way to a logarithm, and the signal that it is made of by one matrix product: the
        small numbers between the large ones are most of a logarithm, and rounding before the sum drowns them."""
        if not self.logged:
            return
        seen: set[tuple[Variable, bool]] = set()
        found = dict(self.squares)
        for op, _, read in self.flow.of(having=lambda kind: kind.reduces in ("squares", "norm")):
            made = op.output(0)
            if made is not None and read[0] is not None:
                found[made] = read[0]
        for made, squared in found.items() if self.float16 else ():
            if made not in self.logged:
                continue
            why = Reason(Kind.SPECTRUM, written_name(made))
            pending = [(squared, False)]
            while pending:
                variable, summed = pending.pop()
                if (variable, summed) in seen or constants.is_constant(variable) or variable.persistable:
                    continue
                seen.add((variable, summed))
                constraints.keep_tensor(variable, why)
                maker = variable.producer
                if maker is None:
                    continue
                product = traits_of(maker).product
                if (product and summed) or not (product or moves(maker) or maker.full_type in _LINEAR):
                    continue
                pending += [(v, summed or product) for v in self.flow.inputs[maker] if v is not None]

    def beyond(self, variable: Variable) -> Reason | None:
        """Which sound interval puts the tensor wholly beyond the format; None where none does."""
        interval = self.ranges.bound(variable)
        if interval is None or (-self.limit <= interval[1] and interval[0] <= self.limit):
            return None
        return Reason(Kind.INTERVAL, detail=(f"{interval[0]:g}", f"{interval[1]:g}", self.short))

    def _proved(self, op: Operator, variable: Variable) -> tuple[int, Reason] | None:
        why = self.beyond(variable)
        if why is None or variable.dtype not in ("float32", self.propagation.dtype) or constants.is_constant(variable):
            return None
        masks = (
            self.propagation.state.get(v, 0) & (LOW | HIGH) for v in (variable, *self.flow.inputs[op]) if v is not None
        )
        return None if any(masks) else (MAY_OVERFLOW, why)  # a saturated mask lies within, whatever it was before

    # -- squares -----------------------------------------------------------------------------------------
    def _squares(self, op: Operator, made: Variable) -> tuple[int, Reason] | None:
        traits = traits_of(op)
        if made not in self.squares and traits.reduces != "squares" and traits.overflows_inside is None:
            return None
        square = Reason(Kind.SQUARE_RANGE if self.float16 else Kind.SQUARE_DIGITS)
        if (made in self.squares and made in self.summed) or traits.reduces == "squares":
            return SQUARE, Reason(Kind.SUMS_SQUARES, cause=square)
        if made in self.squares and made in self.logged and self.float16:
            return SQUARE, Reason(Kind.SQUARE_BEFORE_LOG, cause=square)
        if traits.overflows_inside is Kind.SQUARES_INSIDE and op.attrs.get("p", 2) == 2 and NORM not in op.metadata:
            norm = traits.reduces == "norm"  # which squares in fp32 inside; bfloat16 has too few digits for a whole row
            divides = norm and made in self.propagation.divides
            if norm and self.float16 and not divides:
                return None
            return MAY_UNDERFLOW if divides else 0, Reason(Kind.SQUARES_INSIDE, cause=square)
        if traits.overflows_inside is Kind.POWERS_INSIDE:
            power = Reason(Kind.POWER_RANGE if self.float16 else Kind.POWER_DIGITS)
            return 0, Reason(Kind.POWERS_INSIDE, cause=power)
        return None

    def _before(self, ends: Iterable[Step]) -> frozenset[Variable]:
        """Tensors that are the first operand of such operators (a sum, a root), at once or after additions, factors
        and, on the way to a logarithm or a division, matrix products."""

        def passes(op: Operator, slot: int) -> bool:
            name, traits = op.full_type, traits_of(op)
            if name in ("Add", "Sub", "Sum", "Mul", "Max", "Sqrt") or (name in ("Div", "Clip") and not slot):
                return True
            divides = traits.product and op.output(0) in self.propagation.divides
            return moves(op, slot) or traits.reduces == "sum" or divides

        return self.flow.before((v for _, _, read in ends for v in read[:1]), passes)

    def _combines(self, op: Operator, made: Variable) -> tuple[int, Reason] | None:
        """What adds up, or compares, as many elements as come to one place."""
        how = combined(op)
        if how == "none":
            return None
        grows = self.float16 and how in ("add", "mul") and not self.ranges.within(made, self.limit)
        return MAY_OVERFLOW if grows else 0, Reason(Kind.COMBINES)

    # -- range -------------------------------------------------------------------------------------------
    def _grows(self, op: Operator, name: str) -> Reason | None:
        """Why the result may leave float16."""
        traits, made = traits_of(op), op.output(0)
        if made in self.saturated:
            return None
        if traits.reduces == "sum":
            terms = summed_terms(op, self.flow)
            if terms is not None and terms <= self.limit and self._shifted(self._maker(op)):
                return None  # each term is 1 at most
            many = Reason(Kind.SUMS, detail=(str(terms or "an unknown number of"),))
            return None if terms is not None and terms <= FEW else many
        if name in ("Mul", "Pow") and made in self.squares and made in self.cubed:
            return Reason(Kind.HIGHER_POWER)
        if name == "Pow":
            exponent = self._exponent(op)
            if exponent is None:
                return Reason(Kind.ANY_POWER)
            if exponent < 0:
                return Reason(Kind.NEGATIVE_POWER)
            return Reason(Kind.POWER, detail=(f"{exponent:g}",)) if exponent > 2 else None
        if name == "Mul" and self._cubes(self.flow.inputs[op]):
            return Reason(Kind.TIMES_SQUARE)
        if traits.product:
            return self._weight_norms(op)
        if name == "Exp":
            return None if self._shifted(op) else Reason(Kind.EXPONENTIAL)
        if name in ("Reciprocal", "Div"):
            return self._over_a_floor(op, name)
        return Reason(traits.overflows) if traits.overflows is not None else None

    def _weight_norms(self, op: Operator) -> Reason | None:
        variable, axes = self.flow.inputs[op][1] if len(op.inputs) > 1 else None, summed_axes(op)
        if variable is None or not axes:
            return None
        if (variable, axes) not in self.weight_norms:
            self.weight_norms[variable, axes] = weight_norm(variable, axes, self.magnitudes.get(variable))
        norm = self.weight_norms[variable, axes]
        if norm < LARGE:
            return None
        return Reason(Kind.GAIN, detail=(f"{norm:.3g}", f"{self.limit / norm:.2g}"))

    def _over_a_floor(self, op: Operator, name: str) -> Reason | None:
        """Whether it divides what may be as large by what may be as small that the quotient leaves the format."""
        numerator, divisor = (None, *self.flow.inputs[op]) if name == "Reciprocal" else self.flow.inputs[op]
        if divisor is None or constants.is_constant(divisor) or self.propagation.state.get(divisor, 0):
            return None
        above = (1.0, 1.0) if numerator is None else self.ranges.bound(numerator)
        below = self.ranges.bound(divisor)
        if above is None or below is None:
            return None
        largest, floor = max(map(abs, above)), max(below[0], -below[1])
        if floor <= 0 or math.isinf(largest) or largest <= floor * self.limit or self._shares(numerator, divisor):
            return None
        return Reason(Kind.OVER_A_FLOOR, written_name(divisor), (f"{floor:.3g}",))

    def _shares(self, part: Variable | None, whole: Variable) -> bool:
        """Whether a tensor is divided by its own sum or norm, a few operators on: it is no larger."""
        pending, seen = [(whole, False)], 0
        while pending and part is not None and seen < _NEAR:
            variable, reduced = pending.pop(0)
            seen += 1
            if reduced and variable is part:
                return True
            if (maker := variable.producer) is not None:
                reduced |= traits_of(maker).reduces != ""
                pending += [(v, reduced) for v in self.flow.inputs[maker] if v is not None and v.data is None]
        return False

    def _exponent(self, op: Operator) -> float | None:
        return self.flow.number(op.input(1))

    def _cubes(self, factors: list[Variable | None]) -> bool:
        """Whether their product is a third or fourth power written out."""
        left, right = factors
        of_left, of_right = (self.squares.get(v) if v is not None else None for v in (left, right))
        return (of_left is not None and of_left in (right, of_right)) or (of_right is not None and of_right is left)

    def _maker(self, op: Operator) -> Operator | None:
        """The operator that makes its first operand."""
        read = self.flow.inputs[op][0]
        return read.producer if read is not None else None

    def _shifted(self, op: Operator | None) -> bool:
        """Whether it is an exponential of what the maximum was subtracted from, as in a softmax: 1 at most."""
        if op is None or op.full_type != "Exp":
            return False
        sub = self._maker(op)
        return sub is not None and less_its_top(sub, self.flow)


def _sums(op: Operator) -> bool:
    """Whether it adds up or averages elements, or takes the root of such a sum."""
    return op.full_type == "Sqrt" or traits_of(op).reduces in ("sum", "mean")
